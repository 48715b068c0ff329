// Package gate makes "no more from now on" exact. Short, bounded pieces of work pass through an
// open gate; Shut closes it and returns when the pieces inside have left, so that after Shut none
// of the work is going on and none can start.
//
//	worker:  if g.Enter() { copy a bounded piece; g.Leave() }
//	owner:   g.Shut()     // waits for one piece at most per worker, never for a peer
//
// Grants, transfers and incoming transfers each have one. Who passes several enters them in the
// order transfer, grant, and never waits for a peer inside.
package gate

import "sync"

// Gate is open when zero. Any goroutine may call its methods.
type Gate struct {
	mu struct {
		sync.RWMutex
		shut bool
	}
}

// Enter reports whether the gate is open; if so, the caller must call Leave soon.
func (g *Gate) Enter() bool {
	g.mu.RLock()
	if g.mu.shut {
		g.mu.RUnlock()
		return false
	}
	return true
}

// Leave ends what Enter began.
func (g *Gate) Leave() { g.mu.RUnlock() }

// Shut closes the gate for good and returns when nobody is inside. It reports whether this call
// closed it.
func (g *Gate) Shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	first := !g.mu.shut
	g.mu.shut = true
	return first
}
