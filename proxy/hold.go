package proxy

import (
	"context"
	"net/http/httptrace"
	"sync"
	"time"
)

// hold puts a cancel of D's leg off until D has had the time to take the hand-off in it, if P itself cannot
// be told to let go: a D that has it and is told to stop lets P know, while P keeps the KV of a leg that
// never came until its lease ends.
//
// The leg's goroutine ends it; cancelled has a goroutine of its own that is over when the leg is.
type hold struct {
	cut     context.CancelFunc
	needed  bool
	written chan struct{} // the request is on its way
	over    chan struct{}
	once    struct{ written, over sync.Once }
}

func newHold(needed bool, cut context.CancelFunc) *hold {
	return &hold{cut: cut, needed: needed, written: make(chan struct{}), over: make(chan struct{})}
}

// trace watches a request being sent.
func (h *hold) trace(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		WroteRequest: func(httptrace.WroteRequestInfo) { h.once.written.Do(func() { close(h.written) }) },
	})
}

// end is called when D answers or the leg is over.
func (h *hold) end() { h.once.over.Do(func() { close(h.over) }) }

// cancelled ends the leg: at once, or when D has it.
func (h *hold) cancelled() {
	defer h.cut()
	if !h.needed {
		return
	}
	limit := time.NewTimer(handTimeout)
	defer limit.Stop()
	select {
	case <-h.over:
		return
	case <-limit.C:
		return
	case <-h.written:
	}
	grace := time.NewTimer(handGrace)
	defer grace.Stop()
	select {
	case <-h.over:
	case <-grace.C:
	}
}
