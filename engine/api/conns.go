package api

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"sync"
)

// conns bounds the connections of a server. One too many costs the connection its place that has
// been without a request for longest, half a request being none: whoever opens thousands and says
// nothing loses them to clients that ask for something. Its methods may be called from any goroutine.
type conns struct {
	limit int
	mu    struct {
		sync.Mutex
		all   map[net.Conn]*place
		quiet list.List // of *place without a handler, longest first
	}
}

// place is one connection's.
type place struct {
	conn net.Conn
	elem *list.Element // in quiet; nil while a handler runs, and when the place is lost
	lost bool
}

type placeKey struct{}

func newConns(limit int) *conns {
	c := &conns{limit: limit}
	c.mu.all = map[net.Conn]*place{}
	return c
}

// opened is for http.Server.ConnContext.
func (c *conns) opened(ctx context.Context, conn net.Conn) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &place{conn: conn}
	if len(c.mu.all) >= c.limit {
		victim := p // all others are at work
		if front := c.mu.quiet.Front(); front != nil {
			victim = front.Value.(*place)
		}
		c.lose(victim)
	}
	if !p.lost {
		c.mu.all[conn] = p
		p.elem = c.mu.quiet.PushBack(p)
	}
	return context.WithValue(ctx, placeKey{}, p)
}

// changed is for http.Server.ConnState.
func (c *conns) changed(conn net.Conn, state http.ConnState) {
	if state != http.StateClosed && state != http.StateHijacked {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.mu.all[conn]; p != nil {
		c.forget(p)
	}
}

// handle tells that a handler runs for the connection of ctx, and when it has ended.
func (c *conns) handle(ctx context.Context) (ended func()) {
	p, ok := ctx.Value(placeKey{}).(*place)
	if !ok {
		return func() {} // a server of somebody else
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.elem != nil {
		c.mu.quiet.Remove(p.elem)
		p.elem = nil
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !p.lost && p.elem == nil {
			p.elem = c.mu.quiet.PushBack(p)
		}
	}
}

// lose closes a connection. The caller has locked.
func (c *conns) lose(p *place) {
	c.forget(p)
	_ = p.conn.Close() // does not wait: nothing is unsent
}

func (c *conns) forget(p *place) {
	delete(c.mu.all, p.conn)
	if p.elem != nil {
		c.mu.quiet.Remove(p.elem)
		p.elem = nil
	}
	p.lost = true
}
