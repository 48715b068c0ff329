package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
)

// DialFunc opens a connection, as net.Dialer.DialContext does. It must heed ctx.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// client is what Req and Dealer share: one dialled link and a queue of what it received.
type client struct {
	link  *link
	queue *fairQueue
	share *share
}

// dialClient connects and shakes hands. prepare, if not nil, is called before the link starts.
func dialClient(ctx context.Context, dial DialFunc, addr string, kind socketType, opts Options, prepare func(*client)) (*client, error) {
	opts, err := opts.settled()
	if err != nil {
		return nil, &Error{Phase: "dial", Peer: addr, Err: err}
	}
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	dialCtx, cancel := context.WithTimeoutCause(ctx, opts.Timeouts.Handshake,
		fmt.Errorf("%w: no connection within %v", ErrTimeout, opts.Timeouts.Handshake))
	defer cancel()
	conn, err := dial(dialCtx, "tcp", addr)
	if err != nil {
		if dialCtx.Err() != nil {
			err = context.Cause(dialCtx)
		}
		return nil, &Error{Phase: "dial", Peer: addr, Err: err}
	}
	l := newLink(conn, kind, &opts)
	l.addr = addr
	c := &client{link: l, queue: newFairQueue(), share: newShare(&opts.Limits, func(int, bool) {})}
	l.deliver = func(frames [][]byte) error {
		c.queue.push(c.share, Message{Frames: frames})
		c.queue.room(c.share, l.done)
		return nil
	}
	if prepare != nil {
		prepare(c)
	}
	l.start()
	select {
	case <-l.up:
		return c, nil
	case <-l.ended:
		return nil, l.err()
	case <-ctx.Done():
		l.kill("handshake", context.Cause(ctx))
		<-l.ended
		return nil, l.err()
	}
}

// recv takes the next message; at the link's end, what came before it first.
func (c *client) recv(ctx context.Context, phase string) ([][]byte, error) {
	m, ok, err := c.queue.recv(ctx, c.link.ended)
	switch {
	case ok:
		return m.Frames, nil
	case err != nil:
		return nil, c.link.errorf(phase, err)
	}
	return nil, c.link.err()
}

// close ends the link and waits for its goroutines.
func (c *client) close() {
	c.link.kill("receive", ErrClosed)
	<-c.link.ended
}

// failure returns why the link is over, or nil while it is not.
func (c *client) failure() error {
	select {
	case <-c.link.done:
		return c.link.err()
	default:
		return nil
	}
}

// send queues a message, waiting for room.
func (c *client) send(ctx context.Context, phase string, frames [][]byte) error {
	if len(frames) == 0 {
		return c.link.errorf(phase, ErrNoFrames)
	}
	for {
		if ctx.Err() != nil {
			return c.link.errorf(phase, context.Cause(ctx))
		}
		err := c.link.out.push(frames)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, ErrClosed):
			notify(c.link.out.space) // for the next one who waits
			return c.sealed(phase)
		}
		select {
		case <-c.link.out.space:
		case <-c.link.done:
		case <-ctx.Done():
		}
	}
}

// sealed is the error of a send after the end, or after Shutdown.
func (c *client) sealed(phase string) error {
	if err := c.failure(); err != nil {
		return err
	}
	select {
	case <-c.link.wrote:
		if err := c.link.writeErr; err != nil {
			return err
		}
	default:
	}
	return c.link.errorf(phase, ErrClosed)
}
