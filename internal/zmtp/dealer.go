package zmtp

import (
	"context"
	"errors"
)

// Dealer is a DEALER socket: one connection to a ROUTER, DEALER or REP. Messages pass as they are, without
// delimiter. Its methods may be called by any goroutine.
type Dealer struct{ c *client }

// DialDealer connects to addr ("host:port") and shakes hands, each bounded by ctx and
// Timeouts.Handshake. Later the ctx means nothing. dial nil means net.Dialer.
func DialDealer(ctx context.Context, dial DialFunc, addr string, opts Options) (*Dealer, error) {
	c, err := dialClient(ctx, dial, addr, typeDealer, opts, nil)
	if err != nil {
		return nil, err
	}
	return &Dealer{c}, nil
}

// Send queues a message. It blocks only while the send queue is full, until ctx ends. The frames must not be
// changed afterwards. A nil error does not say that the peer got it.
func (d *Dealer) Send(ctx context.Context, frames ...[]byte) error {
	return d.c.send(ctx, "send", frames)
}

// TrySend is Send without waiting: ErrQueueFull if there is no room.
func (d *Dealer) TrySend(frames ...[]byte) error {
	if len(frames) == 0 {
		return d.c.link.errorf("send", ErrNoFrames)
	}
	err := d.c.link.out.push(frames)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrClosed):
		return d.c.sealed("send")
	}
	return d.c.link.errorf("send", err)
}

// Ping asks the peer's socket for a sign of life, which it gives whatever its owner does; Options.OnPong is
// called when it has come. It does not block, and reports false, and asks nothing, if the peer knows no PING.
func (d *Dealer) Ping() bool {
	l := d.c.link
	if !l.knowsPing() {
		return false
	}
	l.out.setPing(appendPing(nil, 0))
	return true
}

// Recv waits for the next message. When the connection has ended it returns what had come before, then why.
func (d *Dealer) Recv(ctx context.Context) ([][]byte, error) { return d.c.recv(ctx, "receive") }

// Done is closed when the connection has ended, by either side.
func (d *Dealer) Done() <-chan struct{} { return d.c.link.done }

// Err is why the connection has ended, or nil: io.EOF (for errors.Is) if the peer closed it.
func (d *Dealer) Err() error { return d.c.failure() }

// Shutdown sends what is queued, tells the peer that nothing more comes, waits until it hangs up, and
// closes. When ctx ends first it closes at once and returns the context's error. On a connection that cannot
// be half-closed it does not wait for the peer.
func (d *Dealer) Shutdown(ctx context.Context) error {
	l := d.c.link
	defer d.c.close()
	l.out.seal()
	select {
	case <-l.out.whenFlushed():
	case <-l.wrote:
		return d.c.sealed("send")
	case <-ctx.Done():
		return l.errorf("send", context.Cause(ctx))
	}
	if !l.closeWrite() {
		return nil
	}
	select {
	case <-l.done:
		return nil
	case <-ctx.Done():
		return l.errorf("send", context.Cause(ctx))
	}
}

// Close ends the connection at once and waits for its goroutines. What waits to be sent is lost.
func (d *Dealer) Close() error {
	d.c.close()
	return nil
}
