package zmtp

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/zmtp/zmtptest"
)

const serverAddr = "server:5600"

// hello is greeting and READY of a raw peer.
func hello(kind socketType, identity string) []byte {
	return appendReady(appendGreeting(nil, identity), ready{kind, identity})
}

// message encodes frames without the package's writer.
func message(frames ...string) []byte {
	var b []byte
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = 1
		}
		b = appendFrameHeader(b, flags, len(f))
		b = append(b, f...)
	}
	return b
}

// rawPeer is a peer made of bytes. It reads all the time, as net.Pipe has no buffer, and keeps what it read.
type rawPeer struct {
	conn net.Conn
	mu   struct {
		sync.Mutex
		got  bytes.Buffer
		err  error
		when time.Time // of err
	}
	over chan struct{}
}

func newRawPeer(conn net.Conn) *rawPeer {
	p := &rawPeer{conn: conn, over: make(chan struct{})}
	go func() {
		defer close(p.over)
		buf := make([]byte, 4096)
		for {
			n, err := conn.Read(buf)
			p.mu.Lock()
			p.mu.got.Write(buf[:n])
			p.mu.err, p.mu.when = err, time.Now()
			p.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return p
}

func (p *rawPeer) got() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return bytes.Clone(p.mu.got.Bytes())
}

// closedAt waits for the other side to hang up.
func (p *rawPeer) closedAt() time.Time {
	<-p.over
	return p.mu.when
}

func (p *rawPeer) close() {
	p.conn.Close()
	<-p.over
}

// send writes what the other side takes; an error means that it hung up, which tests see elsewhere.
func (p *rawPeer) send(b []byte) { _, _ = p.conn.Write(b) }

// rig is a Router in a network of memory, with the ends of its connections.
type rig struct {
	t    testing.TB
	net  zmtptest.Network
	r    *Router
	ends chan end
}

type end struct {
	peer Peer
	addr string
	err  error
	when time.Time
}

func newRig(t testing.TB, opts Options) *rig {
	g := &rig{t: t, ends: make(chan end, 1000)}
	opts.OnEnd = func(p Peer, addr string, err error) { g.ends <- end{p, addr, err, time.Now()} }
	ln, err := g.net.Listen(serverAddr)
	if err != nil {
		t.Fatal(err)
	}
	if g.r, err = Listen(context.Background(), ln, opts); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *rig) close() {
	if err := g.r.Close(); err != nil {
		g.t.Errorf("Close: %v", err)
	}
}

// raw connects a raw peer and sends it something.
func (g *rig) raw(host string, first []byte) *rawPeer {
	conn, err := g.net.From(host)(context.Background(), "tcp", serverAddr)
	if err != nil {
		g.t.Fatal(err)
	}
	p := newRawPeer(conn)
	p.send(first)
	return p
}

// wantEnd waits for the next connection's end and compares its reason.
func (g *rig) wantEnd(want error) end {
	g.t.Helper()
	e := <-g.ends
	if !errors.Is(e.err, want) {
		g.t.Errorf("connection from %s ended with %v, want %v", e.addr, e.err, want)
	}
	var typed *Error
	if !errors.As(e.err, &typed) || typed.Peer == "" {
		g.t.Errorf("%v does not name the peer", e.err)
	}
	return e
}

// wantRecv receives a message and compares it.
func (g *rig) wantRecv(identity string, frames ...string) Message {
	g.t.Helper()
	m, err := g.r.Recv(context.Background())
	if err != nil {
		g.t.Fatal(err)
	}
	want := make([][]byte, len(frames))
	for i, f := range frames {
		want[i] = []byte(f)
	}
	if m.Identity != identity || !sameFrames(m.Frames, want) {
		g.t.Fatalf("received %q from %q, want %q from %q", m.Frames, m.Identity, frames, identity)
	}
	return m
}

// serveRaw accepts one connection at serverAddr and hands it over as a raw peer that has sent first.
func serveRaw(t testing.TB, n *zmtptest.Network, first []byte) <-chan *rawPeer {
	ln, err := n.Listen(serverAddr)
	if err != nil {
		t.Fatal(err)
	}
	out := make(chan *rawPeer, 1)
	go func() {
		defer ln.Close()
		conn, err := ln.Accept()
		if err != nil {
			t.Error(err)
			close(out)
			return
		}
		p := newRawPeer(conn)
		p.send(first)
		out <- p
	}()
	return out
}
