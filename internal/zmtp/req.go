package zmtp

import (
	"context"
	"sync/atomic"
)

// Req is a REQ socket: one connection to a ROUTER or REP, on which requests and replies alternate.
// Its methods may be called by any goroutine; requests wait for each other.
type Req struct {
	c    *client
	turn chan struct{} // cap 1: held by the request in progress
	open atomic.Bool   // a reply is due
}

// DialReq connects to addr ("host:port") and shakes hands, each bounded by ctx and
// Timeouts.Handshake. Later the ctx means nothing. dial nil means net.Dialer.
func DialReq(ctx context.Context, dial DialFunc, addr string, opts Options) (*Req, error) {
	r := &Req{turn: make(chan struct{}, 1)}
	c, err := dialClient(ctx, dial, addr, typeReq, opts, func(c *client) {
		deliver := c.link.deliver
		c.link.deliver = func(frames [][]byte) error {
			if len(frames) < 2 || len(frames[0]) != 0 {
				return protocolf("a reply of %d frames that does not begin with an empty one", len(frames))
			}
			if !r.open.CompareAndSwap(true, false) {
				return protocolf("a reply without a request")
			}
			return deliver(frames[1:])
		}
	})
	if err != nil {
		return nil, err
	}
	r.c = c
	return r, nil
}

// Request sends one message and returns the reply, both without the empty delimiter frame. If ctx ends
// before the reply came the socket is closed, as a late reply could be taken for that of the next request:
// the error is then the context's, and later ones are ErrAbandoned. The frames must not be changed before
// Request returns; after an error not at all.
func (r *Req) Request(ctx context.Context, frames ...[]byte) ([][]byte, error) {
	l := r.c.link
	if len(frames) == 0 {
		return nil, l.errorf("request", ErrNoFrames)
	}
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-l.done:
		return nil, l.err()
	case <-ctx.Done():
		return nil, l.errorf("request", context.Cause(ctx))
	}
	if ctx.Err() != nil { // nothing was sent: the socket stays good
		return nil, l.errorf("request", context.Cause(ctx))
	}
	r.open.Store(true)
	if err := r.c.send(ctx, "request", append([][]byte{{}}, frames...)); err != nil {
		l.kill("request", ErrAbandoned)
		return nil, err
	}
	reply, err := r.c.recv(ctx, "request")
	if err != nil {
		l.kill("request", ErrAbandoned)
		return nil, err
	}
	return reply, nil
}

// Done is closed when the connection has ended, by either side.
func (r *Req) Done() <-chan struct{} { return r.c.link.done }

// Err is why the connection has ended, or nil.
func (r *Req) Err() error { return r.c.failure() }

// Close ends the connection and waits for its goroutines; a request in progress fails with ErrClosed.
func (r *Req) Close() error {
	r.c.close()
	return nil
}
