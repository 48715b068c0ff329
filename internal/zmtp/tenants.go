package zmtp

import (
	"net"
	"sync"
	"time"
)

// tenants is a Router's account of what its connections occupy: places and bytes. When either runs out, the
// host that occupies most pays, so a host that opens a thousand connections shuts out nobody but itself.
// Any goroutine may call it; it never blocks.
type tenants struct {
	maxPlaces int
	maxHeld   int
	mu        struct {
		sync.Mutex
		all  map[*tenant]struct{}
		held int
	}
}

// tenant is one connection's entry, kept until it has ended and its messages are received. It is guarded by tenants.mu apart from host and evict.
type tenant struct {
	host  string
	evict func(error) // ends the connection, frees what it holds and drops what waits; does not block
	up    bool        // handshake done
	seen  time.Time   // when bytes last came
	held  int         // bytes waiting or incomplete
	gone  bool        // out of the account
}

func newTenants(maxPlaces, maxHeld int) *tenants {
	t := &tenants{maxPlaces: maxPlaces, maxHeld: maxHeld}
	t.mu.all = make(map[*tenant]struct{})
	return t
}

// hostOf is what a connection is accounted to.
func hostOf(a net.Addr) string {
	if a == nil {
		return ""
	}
	if host, _, err := net.SplitHostPort(a.String()); err == nil {
		return host
	}
	return a.String()
}

// enter takes a place, or says that there is none. It may evict another connection.
func (t *tenants) enter(n *tenant, now time.Time) error {
	t.mu.Lock()
	var victim *tenant
	if len(t.mu.all) >= t.maxPlaces {
		if victim = t.placeVictim(n.host); victim == nil {
			t.mu.Unlock()
			return ErrTooManyConnections
		}
		t.remove(victim)
	}
	n.seen = now
	t.mu.all[n] = struct{}{}
	t.mu.Unlock()
	if victim != nil {
		victim.evict(ErrEvicted)
	}
	return nil
}

// placeVictim chooses who makes room for a connection of host: a connection of the host with the most
// places, if that is at least two more than the newcomer's; otherwise only a half-open one of its own host,
// so that working connections are not exchanged for new ones. Call with mu held.
func (t *tenants) placeVictim(host string) *tenant {
	places := make(map[string]int)
	for e := range t.mu.all {
		places[e.host]++
	}
	greedy := host
	for h, n := range places {
		if n > places[greedy] || n == places[greedy] && greedy != host && h < greedy {
			greedy = h
		}
	}
	own := places[greedy] < places[host]+2
	if own {
		greedy = host
	}
	var victim *tenant
	for e := range t.mu.all {
		if e.host == greedy && (!own || !e.up) && (victim == nil || e.cheaperThan(victim)) {
			victim = e
		}
	}
	return victim
}

// cheaperThan orders connections by how little is lost with them: half-open first, then the longest silent.
func (e *tenant) cheaperThan(other *tenant) bool {
	if e.up != other.up {
		return !e.up
	}
	return e.seen.Before(other.seen)
}

// charge adds n bytes (negative to give back) to what a connection holds. If all together hold too much, the
// connection that holds most of the host that holds most is evicted; the error says that it was this one.
func (t *tenants) charge(e *tenant, n int) error {
	t.mu.Lock()
	if e.gone {
		t.mu.Unlock()
		return ErrEvicted
	}
	e.held += n
	t.mu.held += n
	var victims []*tenant
	for n > 0 && t.mu.held > t.maxHeld {
		v := t.heldVictim()
		t.remove(v)
		victims = append(victims, v)
	}
	gone := e.gone
	t.mu.Unlock()
	for _, v := range victims {
		v.evict(ErrEvicted)
	}
	if gone {
		return ErrEvicted
	}
	return nil
}

// heldVictim is called with mu held and only when something is held.
func (t *tenants) heldVictim() *tenant {
	held := make(map[string]int)
	for e := range t.mu.all {
		held[e.host] += e.held
	}
	var victim *tenant
	for e := range t.mu.all {
		switch {
		case victim == nil,
			held[e.host] > held[victim.host],
			held[e.host] == held[victim.host] && e.host < victim.host,
			e.host == victim.host && e.held > victim.held:
			victim = e
		}
	}
	return victim
}

// settle notes the end of a handshake.
func (t *tenants) settle(e *tenant) {
	t.mu.Lock()
	e.up = true
	t.mu.Unlock()
}

// touch notes that bytes came.
func (t *tenants) touch(e *tenant, now time.Time) {
	t.mu.Lock()
	e.seen = now
	t.mu.Unlock()
}

// leave gives the place back.
func (t *tenants) leave(e *tenant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !e.gone {
		t.remove(e)
	}
}

// remove takes an entry out of the account. Call with mu held.
func (t *tenants) remove(e *tenant) {
	delete(t.mu.all, e)
	t.mu.held -= e.held
	e.held, e.gone = 0, true
}
