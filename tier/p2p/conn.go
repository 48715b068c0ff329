package p2p

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// conn dials one peer and sends to it. The loop calls send and hang; run is the conn's goroutine.
type conn struct {
	t      *Tier
	peer   session.PeerID
	gen    kv.Generation
	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{} // cap 1

	mu struct {
		sync.Mutex
		queue  [][]byte
		bytes  int
		hung   bool // nothing more is sent, and nobody is told of the end
		probe  bool // a sign of life is to be asked for
		remote netip.AddrPort
	}
}

var errNotReading = errors.New("it does not read what it is sent")

func (t *Tier) dial(peer session.PeerID, gen kv.Generation) *conn {
	c := &conn{t: t, peer: peer, gen: gen, wake: make(chan struct{}, 1)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	t.running.Add(1)
	go c.run()
	return c
}

// send queues a message. It reports false when too much waits.
func (c *conn) send(b []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.mu.queue) >= sendMessages || len(c.mu.queue) > 0 && c.mu.bytes+len(b) > sendBytes {
		return false
	}
	c.mu.queue = append(c.mu.queue, b)
	c.mu.bytes += len(b)
	notify(c.wake)
	return true
}

// ping asks the peer for a sign of life.
func (c *conn) ping() {
	c.mu.Lock()
	c.mu.probe = true
	c.mu.Unlock()
	notify(c.wake)
}

func (c *conn) alive() { c.t.post(session.Alive{Peer: c.peer, Gen: c.gen}) }

// hang ends the connection after what is queued, or after hangUpTime.
func (c *conn) hang() {
	c.mu.Lock()
	c.mu.hung = true
	c.mu.Unlock()
	notify(c.wake)
	time.AfterFunc(hangUpTime, c.cancel)
}

func (c *conn) run() {
	defer c.t.running.Done()
	defer c.cancel()
	err := c.talk()
	c.mu.Lock()
	hung := c.mu.hung
	c.mu.Unlock()
	if !hung {
		c.t.post(session.Down{Peer: c.peer, Gen: c.gen, Err: err})
	}
}

// talk is the life of the connection.
func (c *conn) talk() error {
	ctx, cancel := context.WithTimeout(c.ctx, dialTimeout)
	defer cancel()
	host, port := c.peer.Split()
	d, err := zmtp.DialDealer(ctx, c.open, net.JoinHostPort(host, port), zmtp.Options{
		Identity: c.t.cfg.Name, Heartbeat: c.t.cfg.heartbeat(), OnPong: c.alive,
	})
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // it never fails
	c.mu.Lock()
	remote := c.mu.remote
	c.mu.Unlock()
	c.t.post(session.Up{Peer: c.peer, Gen: c.gen, Remote: remote})
	for {
		b, hung, probe := c.next()
		if probe && !d.Ping() {
			c.alive() // it cannot be asked
		}
		switch {
		case b != nil:
			if err := d.Send(c.ctx, b); err != nil {
				return err
			}
			continue
		case hung:
			return d.Shutdown(c.ctx)
		}
		select {
		case <-c.wake:
		case <-d.Done():
			if err := d.Err(); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			return errors.New("it has closed the connection")
		case <-c.ctx.Done():
			return context.Cause(c.ctx)
		}
	}
}

func (c *conn) next() (b []byte, hung, probe bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	probe, c.mu.probe = c.mu.probe, false
	if len(c.mu.queue) == 0 {
		c.mu.queue = nil
		return nil, c.mu.hung, probe
	}
	b = c.mu.queue[0]
	c.mu.queue = c.mu.queue[1:]
	c.mu.bytes -= len(b)
	return b, false, probe
}

// open dials and remembers whom it has reached.
func (c *conn) open(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := c.t.cfg.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	watch(nc)
	if a, ok := nc.RemoteAddr().(*net.TCPAddr); ok {
		c.mu.Lock()
		c.mu.remote = a.AddrPort()
		c.mu.Unlock()
	}
	return nc, nil
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
