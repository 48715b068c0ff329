package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/agenttest"
)

// relays is a network of agents whose every connection runs through a relay in this process, which
// can stall it or tear it down.
type relays struct {
	cfg Config
	mu  struct {
		sync.Mutex
		wake    *sync.Cond
		names   map[string]agent.Name // by advertised address
		stalled map[agent.Name]bool
		dead    map[agent.Name]bool
		pairs   map[*relay]bool
	}
	pumps sync.WaitGroup
}

// relay is one connection: a is the dialer's end, b the listener's.
type relay struct {
	from, to agent.Name
	a, b     *net.TCPConn
	closed   bool
}

func newRelays(t testing.TB, cfg Config) *relays {
	n := &relays{cfg: cfg}
	n.mu.wake = sync.NewCond(&n.mu)
	n.mu.names = map[string]agent.Name{}
	n.mu.stalled = map[agent.Name]bool{}
	n.mu.dead = map[agent.Name]bool{}
	n.mu.pairs = map[*relay]bool{}
	t.Cleanup(func() {
		n.teardown(func(*relay) bool { return true })
		n.pumps.Wait()
	})
	return n
}

func (n *relays) net() agenttest.Net {
	return agenttest.Net{New: n.new, Stall: n.stall, Kill: n.kill}
}

func (n *relays) new(t testing.TB, limits agent.Limits) agent.Agent {
	cfg := n.cfg
	cfg.Limits = limits
	var name agent.Name
	cfg.dial = func(ctx context.Context, addr string) (net.Conn, error) { return n.dial(ctx, name, addr) }
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	name = a.Name()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.names[a.Addr().String()] = name
	return a
}

// dial makes a connection through a relay.
func (n *relays) dial(ctx context.Context, from agent.Name, addr string) (net.Conn, error) {
	var d net.Dialer
	up, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	ours, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	theirs, err := l.Accept()
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	r := &relay{from: from, to: n.mu.names[addr], a: theirs.(*net.TCPConn), b: up.(*net.TCPConn)}
	if n.mu.dead[r.from] || n.mu.dead[r.to] {
		r.close()
		ours.Close()
		return nil, errors.New("connection refused")
	}
	n.mu.pairs[r] = true
	n.pumps.Go(func() { n.pump(r, r.a, r.b) })
	n.pumps.Go(func() { n.pump(r, r.b, r.a) })
	return ours, nil
}

func (n *relays) pump(r *relay, src, dst *net.TCPConn) {
	buf := make([]byte, 64<<10)
	for {
		k, err := src.Read(buf)
		n.mu.Lock()
		for (n.mu.stalled[r.from] || n.mu.stalled[r.to]) && !r.closed {
			n.mu.wake.Wait()
		}
		n.mu.Unlock()
		if k > 0 {
			if _, werr := dst.Write(buf[:k]); werr != nil {
				err = werr
			}
		}
		if err == io.EOF {
			_ = dst.CloseWrite()
			return
		}
		if err != nil {
			n.teardown(func(x *relay) bool { return x == r })
			return
		}
	}
}

// close resets both ends.
func (r *relay) close() {
	r.closed = true
	_ = r.a.SetLinger(0)
	_ = r.b.SetLinger(0)
	_ = r.a.Close()
	_ = r.b.Close()
}

func (n *relays) teardown(which func(*relay) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for r := range n.mu.pairs {
		if which(r) && !r.closed {
			r.close()
		}
		if r.closed {
			delete(n.mu.pairs, r)
		}
	}
	n.mu.wake.Broadcast()
}

func (n *relays) stall(_ testing.TB, a agent.Agent) func() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.stalled[a.Name()] = true
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.mu.stalled[a.Name()] = false
		n.mu.wake.Broadcast()
	}
}

func (n *relays) kill(_ testing.TB, a agent.Agent) {
	n.mu.Lock()
	n.mu.dead[a.Name()] = true
	n.mu.Unlock()
	n.teardown(func(r *relay) bool { return r.from == a.Name() || r.to == a.Name() })
}
