package proxy

import "sync"

// gate counts the requests that are being served, so that the router's end can wait for the last of them
// and nothing that a request starts comes behind it. The zero value is open. Any goroutine.
type gate struct {
	mu struct {
		sync.Mutex
		inside int
		empty  chan struct{} // not nil: no more are let in; closed when the last has left
	}
}

// enter lets a request in, unless the router ends; leave is its end.
func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.empty != nil {
		return false
	}
	g.mu.inside++
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.inside--
	if g.mu.inside == 0 && g.mu.empty != nil {
		close(g.mu.empty)
	}
}

// shut lets nobody in any more; the channel is closed when nobody is left. It may be called again.
func (g *gate) shut() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.empty == nil {
		g.mu.empty = make(chan struct{})
		if g.mu.inside == 0 {
			close(g.mu.empty)
		}
	}
	return g.mu.empty
}

// errands are goroutines that no request waits for, so that the router's end waits for them and none begins
// behind it. The zero value takes some. Any goroutine.
type errands struct {
	sync.WaitGroup
	mu struct {
		sync.Mutex
		over bool
	}
}

// start runs an errand, unless end was called.
func (e *errands) start(do func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.mu.over {
		e.Go(do)
	}
	return !e.mu.over
}

// end lets none begin any more, and waits for the last. It may be called again.
func (e *errands) end() {
	e.mu.Lock()
	e.mu.over = true
	e.mu.Unlock()
	e.Wait()
}
