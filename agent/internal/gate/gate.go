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
