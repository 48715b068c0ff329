package zmtp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Router is a ROUTER socket on a listener. Its methods may be called by any goroutine.
type Router struct {
	ln      net.Listener
	opts    Options
	queue   *fairQueue
	tenants *tenants
	done    chan struct{} // closed by shut
	stop    func() bool   // detaches the context
	running sync.WaitGroup
	mu      struct {
		sync.Mutex
		links      map[*link]struct{} // all that run
		names      map[string]*link   // those past their handshake
		generation uint64
		invented   uint32
		closed     bool
		reason     error
		lnErr      error
	}
}

// Listen runs a Router on ln until Close or the end of ctx. It takes over ln and closes it.
func Listen(ctx context.Context, ln net.Listener, opts Options) (*Router, error) {
	opts, err := opts.settled()
	if err != nil {
		return nil, &Error{Phase: "listen", Err: err}
	}
	r := &Router{
		ln: ln, opts: opts, queue: newFairQueue(), done: make(chan struct{}),
		tenants: newTenants(opts.Limits.MaxConnections, opts.Limits.BufferedBytes),
	}
	r.mu.links = make(map[*link]struct{})
	r.mu.names = make(map[string]*link)
	r.running.Add(1)
	go r.accept()
	r.stop = context.AfterFunc(ctx, func() { r.shut(fmt.Errorf("%w: %w", ErrClosed, context.Cause(ctx))) })
	return r, nil
}

// Addr is the listener's address.
func (r *Router) Addr() net.Addr { return r.ln.Addr() }

// Recv waits for the next message. Connections that have messages waiting take turns. After Close, or the
// end of the Router's context, it returns an error that is ErrClosed.
func (r *Router) Recv(ctx context.Context) (Message, error) {
	select {
	case <-r.done:
		return Message{}, r.closedError("receive")
	default:
	}
	m, ok, err := r.queue.recv(ctx, r.done)
	switch {
	case ok:
		return m, nil
	case err != nil:
		return Message{}, &Error{Phase: "receive", Err: err}
	}
	return Message{}, r.closedError("receive")
}

// Send queues a message for a peer; it never blocks. The frames must not be changed afterwards. Errors:
// ErrNoFrames, ErrUnknownPeer (not connected, or no longer under that generation), ErrClosed, and
// ErrQueueFull: the peer reads too slowly and was dropped. A nil error does not say that the peer got it.
func (r *Router) Send(to Peer, frames ...[]byte) error {
	if len(frames) == 0 {
		return &Error{Phase: "send", Peer: fmt.Sprintf("%q", to.Identity), Err: ErrNoFrames}
	}
	l, err := r.find(to)
	if err != nil {
		return err
	}
	switch err := l.out.push(frames); {
	case errors.Is(err, ErrQueueFull):
		l.kill("send", err)
		return l.errorf("send", err)
	case err != nil: // it is being killed
		return l.errorf("send", ErrUnknownPeer)
	}
	return nil
}

// Drop ends a peer's connection and forgets what waits to be sent to it. It is false if there is none.
func (r *Router) Drop(p Peer) bool {
	l, err := r.find(p)
	if err != nil {
		return false
	}
	l.kill("receive", fmt.Errorf("%w: dropped by its owner", ErrClosed))
	return true
}

// Close ends all connections and waits for every goroutine. What waits to be sent is lost.
func (r *Router) Close() error {
	r.stop()
	r.shut(ErrClosed)
	r.running.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.lnErr
}

func (r *Router) find(p Peer) (*link, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return nil, &Error{Phase: "send", Err: r.mu.reason}
	}
	l := r.mu.names[p.Identity]
	if l == nil || p.Generation != 0 && p.Generation != l.peer.Generation {
		return nil, &Error{Phase: "send", Peer: fmt.Sprintf("%q", p.Identity), Err: ErrUnknownPeer}
	}
	return l, nil
}

func (r *Router) closedError(phase string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Error{Phase: phase, Err: r.mu.reason}
}

// shut begins the end, once, without waiting for it.
func (r *Router) shut(reason error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return
	}
	r.mu.closed, r.mu.reason = true, reason
	close(r.done)
	r.mu.lnErr = r.ln.Close()
	for l := range r.mu.links {
		l.kill("receive", ErrClosed)
	}
}

// accept is the listener's goroutine.
func (r *Router) accept() {
	defer r.running.Done()
	backoff := acceptBackoffMin
	for {
		conn, err := r.ln.Accept()
		if err == nil {
			backoff = acceptBackoffMin
			r.admit(conn)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			r.shut(fmt.Errorf("%w: its listener was closed", ErrClosed))
			return
		}
		pause := time.NewTimer(backoff)
		select {
		case <-pause.C:
		case <-r.done:
			pause.Stop()
			return
		}
		backoff = min(2*backoff, acceptBackoffMax)
	}
}

// admit makes a link of a new connection, or closes it.
func (r *Router) admit(conn net.Conn) {
	l := newLink(conn, typeRouter, &r.opts)
	t := &tenant{host: hostOf(conn.RemoteAddr())}
	s := newShare(&r.opts.Limits, func(cost int, last bool) {
		_ = r.tenants.charge(t, -cost)
		if last {
			r.tenants.leave(t)
		}
	})
	t.evict = func(err error) {
		l.kill("receive", err)
		r.queue.discard(s)
	}
	r.wire(l, t, s)
	if err := r.tenants.enter(t, time.Now()); err != nil {
		_ = conn.Close()
		if r.opts.OnEnd != nil {
			r.opts.OnEnd(Peer{}, l.addr, l.errorf("handshake", err))
		}
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		_ = conn.Close()
		r.tenants.leave(t)
		return
	}
	r.mu.links[l] = struct{}{}
	r.running.Add(1)
	l.start()
}

// wire connects a link to the router.
func (r *Router) wire(l *link, t *tenant, s *share) {
	partial := 0 // bytes charged for the message being read; the reader goroutine's
	l.rd.onRead = func() { r.tenants.touch(t, time.Now()) }
	l.rd.grew = func(n int) error {
		partial += n
		return r.tenants.charge(t, n)
	}
	l.accept = func(theirs ready, ourReady []byte) error {
		if err := r.register(l, theirs.identity, ourReady); err != nil {
			return err
		}
		r.tenants.settle(t)
		return nil
	}
	l.deliver = func(frames [][]byte) error {
		if err := r.tenants.charge(t, messageCost(frames)-partial); err != nil {
			return err
		}
		partial = 0
		r.queue.push(s, Message{Peer: l.peer, Host: t.host, Frames: frames})
		r.queue.room(s, l.done)
		return nil
	}
	l.onEnd = func(err error) {
		_ = r.tenants.charge(t, -partial)
		r.forget(l)
		r.queue.end(s)
		if r.opts.OnEnd != nil {
			r.opts.OnEnd(l.peer, l.addr, err)
		}
		r.running.Done()
	}
}

// register gives a link its name and generation, and queues READY before anybody can send to it.
// A name in use is waited for a moment: its connection may be ending.
func (r *Router) register(l *link, identity string, ourReady []byte) error {
	var grace *time.Timer
	for {
		holder := r.claim(l, identity, ourReady)
		if holder == nil {
			return nil
		}
		if grace == nil {
			grace = time.NewTimer(duplicateGrace)
			defer grace.Stop()
		}
		select {
		case <-holder.ended:
		case <-grace.C:
			return fmt.Errorf("%w: %q, of the connection from %s", ErrIdentityInUse, identity, holder.addr)
		case <-l.done:
			return net.ErrClosed
		}
	}
}

// claim registers the link, or returns who has the name.
func (r *Router) claim(l *link, identity string, ourReady []byte) (holder *link) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for identity == "" {
		r.mu.invented++
		id := string(binary.BigEndian.AppendUint32([]byte{0}, r.mu.invented))
		if r.mu.names[id] == nil {
			identity = id
		}
	}
	if holder := r.mu.names[identity]; holder != nil {
		return holder
	}
	r.mu.generation++
	l.peer = Peer{Identity: identity, Generation: r.mu.generation}
	l.out.pushRaw(ourReady)
	r.mu.names[identity] = l
	return nil
}

// forget gives a link's name back.
func (r *Router) forget(l *link) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.mu.links, l)
	delete(r.mu.names, l.peer.Identity) // "" for a link that never had a name: nobody's
}
