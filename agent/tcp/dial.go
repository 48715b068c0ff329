package tcp

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
	"github.com/kvferry/kvferry/kv"
)

// dialAny connects to the first address that answers as the peer. It leaves nothing behind when it
// fails.
func (a *Agent) dialAny(ctx context.Context, o offer) (*link, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(a.ctx, cancel)()
	var errs []error
	for _, addr := range o.addrs {
		l, err := a.dialPeer(ctx, o.name, addr)
		if err == nil {
			return l, nil
		}
		if a.ctx.Err() != nil {
			return nil, agent.ErrClosed
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	if len(errs) == 1 {
		return nil, errs[0]
	}
	return nil, &agent.PeerError{Peer: o.name, Phase: "dial", Err: errors.Join(errs...)}
}

// dialPeer opens all streams of one link, the control stream first.
func (a *Agent) dialPeer(ctx context.Context, name agent.Name, addr string) (*link, error) {
	var session frame.Session
	_, _ = rand.Read(session[:]) // never fails
	var conns []*conn
	var welcome frame.Welcome
	for i := range a.cfg.Streams + 1 {
		hello := frame.Hello{Stream: i, Streams: a.cfg.Streams, Session: session, Name: string(a.name)}
		c, w, err := a.dialStream(ctx, addr, hello)
		if err == nil && w.Name != string(name) {
			err = fmt.Errorf("it is %q; another process may have taken the address", w.Name)
			_ = c.Close()
		}
		if err != nil {
			for _, c := range conns {
				_ = c.Close()
			}
			phase := "hello"
			if c == nil {
				phase = "dial"
			}
			if host, _, _ := net.SplitHostPort(addr); kv.OwnHost(host) {
				err = fmt.Errorf("%w; %s is this host itself: if the peer runs on another host, start it with --agent-listen HOST:PORT or "+
					"--agent-advertise HOST by which others reach it", err, host)
			}
			return nil, &agent.PeerError{Peer: name, Addr: addr, Phase: phase, Err: err}
		}
		if i == 0 {
			welcome = w
			c.in = bufio.NewReaderSize(c.TCPConn, 4096)
		}
		conns = append(conns, c)
	}
	return newLink(a, name, addr, conns, welcome), nil
}

// dialStream dials and says Hello. With an error after the dial, the connection is closed but
// returned, so that the caller can tell the phases apart.
func (a *Agent) dialStream(ctx context.Context, addr string, hello frame.Hello) (*conn, frame.Welcome, error) {
	var w frame.Welcome
	dialCtx, cancel := context.WithTimeout(ctx, a.cfg.HandshakeTimeout)
	defer cancel()
	nc, err := a.cfg.dial(dialCtx, addr)
	if err != nil {
		return nil, w, err
	}
	c, err := newConn(nc.(*net.TCPConn), a.cfg.UserTimeout)
	if err != nil {
		_ = nc.Close()
		return nil, w, err
	}
	// The context's end wakes the reads below.
	stop := context.AfterFunc(dialCtx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	w, err = c.hello(hello)
	if !stop() && err == nil {
		err = dialCtx.Err()
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		if dialCtx.Err() != nil {
			err = dialCtx.Err()
		}
	}
	return c, w, err
}

// hello is the dialer's side of the first frames.
func (c *conn) hello(h frame.Hello) (frame.Welcome, error) {
	if _, err := c.Write(h.Append(nil)); err != nil {
		return frame.Welcome{}, err
	}
	kind, body, err := c.next()
	if err != nil {
		return frame.Welcome{}, unexpected(err)
	}
	switch kind {
	case frame.KindWelcome:
		return frame.DecodeWelcome(body)
	case frame.KindBye:
		text, err := frame.DecodeBye(body)
		if err == nil {
			err = fmt.Errorf("the peer does not take the connection: %s", text)
		}
		return frame.Welcome{}, err
	}
	return frame.Welcome{}, fmt.Errorf("answered with a frame of kind %d", kind)
}
