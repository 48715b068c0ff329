package proxy

import (
	"net/url"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/proxy/core"
)

// pool is the engines of one role.
type pool struct {
	leg     core.Leg
	targets []*target
	mu      struct {
		sync.Mutex
		policy core.Policy
	}
}

// target is one engine. What changes is guarded by mu.
type target struct {
	leg   core.Leg
	url   *url.URL
	name  string // host:port
	fixed *core.Peer
	// keyless: it has answered that it knows no release by key; it is not asked again until an answer shows
	// that it is another engine. Any goroutine.
	keyless atomic.Bool
	mu      struct {
		sync.Mutex
		inFlight  int
		requests  uint64
		failures  uint64
		lastError string
		failing   bool       // its last leg failed by its own fault
		peer      *core.Peer // coordinates, once known
		gen       uint64     // changes with each answer of the engine
		question  *question  // under way
	}
}

func newPool(leg core.Leg, targets []Target, policy core.Policy) *pool {
	p := &pool{leg: leg}
	p.mu.policy = policy
	for _, t := range targets {
		u, err := parseTarget(t.URL)
		if err != nil {
			panic("proxy: a validated address does not parse: " + err.Error())
		}
		nt := &target{leg: leg, url: u, name: u.Host}
		if t.Peer != nil {
			peer, err := checkPeer(leg == core.Decode, *t.Peer, u)
			if err != nil {
				panic("proxy: validated coordinates are not valid: " + err.Error())
			}
			nt.fixed = &peer
		}
		p.targets = append(p.targets, nt)
	}
	return p
}

// take chooses an engine and counts a leg on it; give is its end. It avoids an engine if there is
// another one.
func (p *pool) take(avoid *target) *target {
	p.mu.Lock()
	defer p.mu.Unlock()
	candidates := make([]core.Candidate, 0, len(p.targets))
	index := make([]*target, 0, len(p.targets))
	for _, t := range p.targets {
		if t == avoid && len(p.targets) > 1 {
			continue
		}
		t.mu.Lock()
		candidates = append(candidates, core.Candidate{Name: t.name, InFlight: t.mu.inFlight})
		t.mu.Unlock()
		index = append(index, t)
	}
	t := index[p.mu.policy.Pick(candidates)]
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.inFlight++
	t.mu.requests++
	return t
}

// named is the engine that the router calls so; nil if there is none.
func (p *pool) named(name string) *target {
	for _, t := range p.targets {
		if t.name == name {
			return t
		}
	}
	return nil
}

// giveBack ends a leg that was never sent.
func (t *target) giveBack() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.inFlight--
	t.mu.requests--
}

// give ends a leg. A failure of this engine that was neither the router's doing nor the client's is remembered for
// /status. Only requests in flight count when an engine is chosen: a failure keeps none from it.
func (t *target) give(f *core.Failure) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.inFlight--
	switch {
	case f == nil, f.ByClient && f.Engine == t.name:
		t.mu.failing = false
	case f.Kind != core.Cancelled && f.Engine == t.name:
		t.mu.failing = f.Status >= 500 // one that is full, or takes no hand-off, works
		t.mu.failures++
		t.mu.lastError = f.Message
	}
}
