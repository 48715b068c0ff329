package main

import (
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	// relayDial bounds the connection to a relay's target, which is on this machine.
	relayDial = 5 * time.Second
	// relayChunk is the most that flows before a relay looks at its orders again.
	relayChunk = 16 << 10
)

// relay forwards TCP connections to one target and can cut them, hold them back, change a byte or refuse new ones:
// the bad network of the fault check. Its methods may be called from any goroutine.
//
//	engine ──> relay ──> engine's agent or side channel
type relay struct {
	addr   string
	target string
	ln     net.Listener
	held   chan struct{} // closed when the budget ran out
	pumps  sync.WaitGroup

	mu struct {
		sync.Mutex
		links   map[*link]struct{}
		gate    chan struct{} // not nil: bytes wait until it is closed
		budget  int64         // bytes that may flow in one direction before all are held back; -1: any number
		back    bool          // that direction is the target's answers
		refuses bool
		spoil   [2]int64 // bytes that flow forth, and back, before one is changed; 0: none is
	}
}

// link is one connection through a relay.
type link struct {
	in, out *net.TCPConn
	done    chan struct{}
	once    sync.Once
}

// newRelay listens on a free port of 127.0.0.1. Nothing flows before run.
func newRelay() (*relay, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	r := &relay{addr: ln.Addr().String(), ln: ln, held: make(chan struct{})}
	r.mu.links = map[*link]struct{}{}
	r.mu.budget = -1
	return r, nil
}

// port is that of its address.
func (r *relay) port() int { return r.ln.Addr().(*net.TCPAddr).Port }

// run forwards to target until close.
func (r *relay) run(target string) {
	r.target = target
	r.pumps.Go(func() {
		for {
			in, err := r.ln.Accept()
			if err != nil {
				return
			}
			r.pumps.Go(func() { r.serve(in.(*net.TCPConn)) })
		}
	})
}

// serve carries one connection until either end closes it or it is cut.
func (r *relay) serve(in *net.TCPConn) {
	out, err := net.DialTimeout("tcp", r.target, relayDial)
	if err != nil {
		reset(in)
		return
	}
	l := &link{in: in, out: out.(*net.TCPConn), done: make(chan struct{})}
	if !r.keep(l) {
		l.cut()
		return
	}
	var both sync.WaitGroup
	both.Go(func() { r.pump(l, l.out, l.in, true) })
	both.Go(func() { r.pump(l, l.in, l.out, false) })
	both.Wait()
	l.cut()
	r.mu.Lock()
	delete(r.mu.links, l)
	r.mu.Unlock()
}

func (r *relay) keep(l *link) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.refuses {
		return false
	}
	r.mu.links[l] = struct{}{}
	return true
}

// pump copies one direction. The end of one direction leaves the other open.
func (r *relay) pump(l *link, dst, src *net.TCPConn, forth bool) {
	buf := make([]byte, relayChunk)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if !r.pass(l, n, forth) {
				return
			}
			r.damage(buf[:n], forth)
			if _, werr := dst.Write(buf[:n]); werr != nil {
				l.cut()
				return
			}
		}
		if err == io.EOF && r.pass(l, 0, forth) {
			_ = dst.CloseWrite()
			return
		}
		if err != nil {
			l.cut()
			return
		}
	}
}

// pass waits until n bytes may go on; false if the link was cut first.
func (r *relay) pass(l *link, n int, forth bool) bool {
	for {
		r.mu.Lock()
		if forth != r.mu.back && r.mu.gate == nil && r.mu.budget >= 0 {
			if r.mu.budget >= int64(n) {
				r.mu.budget -= int64(n)
			} else {
				r.mu.gate = make(chan struct{})
				close(r.held)
			}
		}
		gate := r.mu.gate
		r.mu.Unlock()
		if gate == nil {
			return true
		}
		select {
		case <-gate:
		case <-l.done:
			return false
		}
	}
}

// holdAfter lets n more bytes flow to the target and then holds everything back; held tells when.
// It may be used once.
func (r *relay) holdAfter(n int64) { r.limit(n, false) }

// holdAnswersAfter does the same after n bytes of the target's.
func (r *relay) holdAnswersAfter(n int64) { r.limit(n, true) }

func (r *relay) limit(n int64, back bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.budget, r.mu.back = n, back
}

// spoil changes the n-th byte, from 1, of those that flow from now on to the target, or back from it.
func (r *relay) spoil(n int64, back bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.spoil[direction(back)] = n
}

// spoiled reports whether it has done so.
func (r *relay) spoiled(back bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.spoil[direction(back)] == 0
}

func direction(back bool) int {
	if back {
		return 1
	}
	return 0
}

// damage does what spoil has asked for to bytes on their way.
func (r *relay) damage(b []byte, forth bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := &r.mu.spoil[direction(!forth)]
	switch n := int64(len(b)); {
	case *left == 0:
	case *left > n:
		*left -= n
	default:
		b[*left-1] ^= 1
		*left = 0
	}
}

// hold keeps all bytes back, of both directions and of new connections, until release.
func (r *relay) hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.gate == nil {
		r.mu.gate = make(chan struct{})
	}
}

// release lets bytes flow again, without a budget.
func (r *relay) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.budget = -1
	if r.mu.gate != nil {
		close(r.mu.gate)
		r.mu.gate = nil
	}
}

// cut resets every connection, and with refuse also every new one until accept.
func (r *relay) cut(refuse bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.refuses = refuse
	for l := range r.mu.links {
		l.cut()
	}
}

// accept takes new connections again.
func (r *relay) accept() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.refuses = false
}

// close ends the relay and everything on it.
func (r *relay) close() {
	_ = r.ln.Close()
	r.cut(true)
	r.pumps.Wait()
}

// cut resets both ends.
func (l *link) cut() {
	l.once.Do(func() {
		close(l.done)
		reset(l.in)
		reset(l.out)
	})
}

// reset closes a connection so that the peer sees an error, not an orderly end.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}
