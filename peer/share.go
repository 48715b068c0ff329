package peer

import (
	"errors"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
)

// errEvicted ends a handshake whose place another one needs.
var errEvicted = errors.New("too many handshakes are in flight, most of them for this one's sender or host: it makes room")

// tenant is who a handshake is accounted to: the agent that asked for an answer, else the host of the engine
// that our own work needs. What strangers make us do takes no place from our own work, and one tenant's
// crowd takes none from another's.
type tenant struct {
	by   agent.Name // "" for our own work
	host string     // of our own work
}

func (t *Target) tenant() tenant {
	if t.By != "" {
		return tenant{by: t.By}
	}
	return tenant{host: t.address().host}
}

func (w tenant) places() int {
	if w.by != "" {
		return maxAsked
	}
	return maxFlights
}

// shares counts the handshakes in flight. Guarded by Table.mu.
type shares struct {
	flights map[*flight]struct{}
	of      map[tenant]int
	asked   int // of tenants with a name
}

func newShares() shares {
	return shares{flights: make(map[*flight]struct{}), of: make(map[tenant]int)}
}

func (s *shares) add(f *flight) {
	s.flights[f] = struct{}{}
	if s.of[f.who]++; f.who.by != "" {
		s.asked++
	}
}

func (s *shares) remove(f *flight) {
	if _, in := s.flights[f]; !in {
		return
	}
	delete(s.flights, f)
	if s.of[f.who]--; s.of[f.who] == 0 {
		delete(s.of, f.who)
	}
	if f.who.by != "" {
		s.asked--
	}
}

// taken is how many of its kind are in flight.
func (s *shares) taken(who tenant) int {
	if who.by != "" {
		return s.asked
	}
	return len(s.flights) - s.asked
}

// victim chooses who makes room for a newcomer when its kind is full: the oldest handshake of the tenant that
// has most, if that is two more than the newcomer has. Else one of equals that has had its time: a healthy
// peer answers in milliseconds. nil: there is no room.
func (s *shares) victim(who tenant, now time.Time) (out *flight) {
	most := 0
	for t, n := range s.of {
		if (t.by != "") == (who.by != "") {
			most = max(most, n)
		}
	}
	for f := range s.flights {
		switch {
		case (f.who.by != "") != (who.by != "") || s.of[f.who] < most:
		case most < s.of[who]+2 && (now.Sub(f.began) < slotPatience || s.of[who] == most && f.who != who):
		case out == nil || f.serial < out.serial:
			out = f
		}
	}
	return out
}

// slots are the handshakes that are active, of which there are few: what waits for one takes turns by tenant.
// All that peers asked for have half of them at most; no tenant has more than half of what its kind may have.
// Guarded by Table.mu.
type slots struct {
	all     int
	active  map[tenant]int
	total   int
	asked   int
	waiting []*slotWait // oldest first
}

type slotWait struct {
	who   tenant
	ready chan struct{} // closed when it has a slot
}

func newSlots(all int) slots { return slots{all: all, active: make(map[tenant]int)} }

func (s *slots) may(who tenant) bool {
	half := max(s.all/2, 1)
	if who.by == "" {
		return s.total < s.all && s.active[who] < half
	}
	return s.total < s.all && s.asked < half && s.active[who] < max(half/2, 1)
}

// wait queues for a slot, which may be there at once.
func (s *slots) wait(who tenant) *slotWait {
	w := &slotWait{who: who, ready: make(chan struct{})}
	s.waiting = append(s.waiting, w)
	s.grant()
	return w
}

// grant gives free slots to those who have fewest, the oldest first.
func (s *slots) grant() {
	for {
		best := -1
		for i, w := range s.waiting {
			if s.may(w.who) && (best < 0 || s.active[w.who] < s.active[s.waiting[best].who]) {
				best = i
			}
		}
		if best < 0 {
			return
		}
		w := s.waiting[best]
		s.waiting = slices.Delete(s.waiting, best, best+1)
		s.active[w.who]++
		if s.total++; w.who.by != "" {
			s.asked++
		}
		close(w.ready)
	}
}

// done gives a slot back, or leaves the queue.
func (s *slots) done(w *slotWait) {
	if i := slices.Index(s.waiting, w); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
		return
	}
	if s.active[w.who]--; s.active[w.who] == 0 {
		delete(s.active, w.who)
	}
	if s.total--; w.who.by != "" {
		s.asked--
	}
	s.grant()
}
