package worker

import (
	"container/list"
	"hash/maphash"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/wire"
)

// sender is one D agent: its waiting registrations and those that it has sent before.
type sender struct {
	name    agent.Name
	waiting list.List // of *registration, oldest first
	blocks  int       // in waiting
	gone    bool
	via     agent.PeerID // the connection by which it registered last

	active map[wire.RegistrationRef]*registration // that have not ended: waiting or paired
	void   recent[wire.Token]                     // of registrations that were cancelled: one that comes later is a copy
	sent   recent[wire.Token]                     // of registrations that were written whole

	// By generation, for each connection under its name: a stranger who says the name spoils the numbers of
	// his own connection. One that D makes anew may repeat what was lost with the last.
	replays map[agent.PeerID]*replayGuard
	stock   recent[uint64] // hashes of ids without generation
}

// stockSeed makes the hashes of stock ids unguessable.
var stockSeed = maphash.MakeSeed()

// fresh reports whether a registration was not seen before, and remembers it. A kvferry D gives
// every registration a generation. A stock one sends each id once, and its ids are unique as long
// as it adds its random suffix.
func (s *sender) fresh(r *registration) bool {
	if g := r.generation(); g != 0 {
		first := s.guard(r.via).fresh(uint64(g))
		return first && s.registration(r.ref()) == nil && !s.sent.has(r.token()) && !s.void.has(r.token())
	}
	return s.stock.fresh(maphash.String(stockSeed, string(r.key.id)), stockMemory)
}

// guard is the numbers that came by a connection. Beyond the bound another that nothing is waited for by
// makes room.
func (s *sender) guard(via agent.PeerID) *replayGuard {
	if g := s.replays[via]; g != nil {
		return g
	}
	if s.replays == nil {
		s.replays = make(map[agent.PeerID]*replayGuard)
	}
	if len(s.replays) >= maxConnections {
		delete(s.replays, s.unused())
	}
	g := new(replayGuard)
	s.replays[via] = g
	return g
}

// unused is the newest connection by which no live registration came, else the newest.
func (s *sender) unused() (out agent.PeerID) {
	used := make(map[agent.PeerID]bool)
	for _, r := range s.active {
		used[r.via] = true
	}
	for via := range s.replays {
		if out == (agent.PeerID{}) || used[out] && !used[via] || used[out] == used[via] && via.Gen > out.Gen {
			out = via
		}
	}
	return out
}

// senderOf finds or makes the entry of a D agent; nil when there are too many, all of which wait.
func (p *producer) senderOf(name agent.Name) *sender {
	if s := p.senders[name]; s != nil {
		return s
	}
	if len(p.senders) >= maxSenders {
		for _, s := range p.senders {
			if s.waiting.Len() == 0 && len(s.active) == 0 {
				delete(p.senders, s.name)
				break
			}
		}
		if len(p.senders) >= maxSenders {
			return nil
		}
	}
	s := &sender{name: name, active: make(map[wire.RegistrationRef]*registration)}
	p.senders[name] = s
	return s
}

// senderLost drops what a D agent that is gone had registered. Blocks that were paired with it and
// are not being written wait for their lease, or for another registration.
func (m *machine) senderLost(now time.Time, name agent.Name, reason string) {
	s := m.producer.senders[name]
	if s == nil {
		return
	}
	s.gone = true
	delete(m.producer.senders, name)
	for s.waiting.Len() > 0 {
		r := s.waiting.Front().Value.(*registration)
		m.removeRegistration(r)
		m.dropRegistration(r, reason)
	}
	for _, u := range m.producer.pushesInOrder() {
		if u.reg.sender != s || u.state == writing || u.state == posting {
			continue
		}
		h := u.hold
		m.dropRegistration(u.reg, reason)
		m.endPush(u)
		m.offer(now, h)
	}
}

// registrationsLost drops what was registered by one connection that is gone, and tells whether anything
// was. The sender is forgotten if nothing else of it is left; else another connection under its name may
// be its own.
func (m *machine) registrationsLost(now time.Time, via agent.PeerID, reason string) (any bool) {
	s := m.producer.senders[via.Name]
	if s == nil {
		return false
	}
	for e := s.waiting.Front(); e != nil; {
		r := e.Value.(*registration)
		if e = e.Next(); r.via == via {
			any = true
			m.removeRegistration(r)
			m.dropRegistration(r, reason)
		}
	}
	left := s.waiting.Len() > 0
	for _, u := range m.producer.pushesInOrder() {
		if u.reg.sender != s {
			continue
		}
		if u.reg.via != via {
			left = true
			continue
		}
		any = true
		if u.state == writing || u.state == posting {
			u.reg.gone, left = true, true
			continue
		}
		h := u.hold
		m.dropRegistration(u.reg, reason)
		m.endPush(u)
		m.offer(now, h)
	}
	if any = any || s.via == via; any && !left {
		s.gone = true
		delete(m.producer.senders, via.Name)
	}
	return any
}

// forget drops a registration that has ended.
func (s *sender) forget(r *registration) {
	if s.active[r.ref()] == r {
		delete(s.active, r.ref())
	}
}

// wrote remembers a registration whose KV was written whole.
func (s *sender) wrote(r *registration) {
	if r.generation() != 0 {
		s.sent.fresh(r.token(), replayWindow)
	}
}

// replayGuard remembers which of a sender's recent generations were seen. The zero value has seen
// none.
type replayGuard struct {
	newest uint64
	seen   [replayWindow / 64]uint64 // bit g % replayWindow, for the replayWindow generations up to newest
}

// fresh reports whether g was not seen, and remembers it. What is behind the window counts as seen.
func (w *replayGuard) fresh(g uint64) bool {
	if g > w.newest {
		if g-w.newest >= replayWindow {
			w.seen = [replayWindow / 64]uint64{}
		} else {
			for x := w.newest + 1; x < g; x++ {
				w.seen[x%replayWindow/64] &^= 1 << (x % 64)
			}
		}
		w.newest = g
	} else if w.newest-g >= replayWindow || w.seen[g%replayWindow/64]&(1<<(g%64)) != 0 {
		return false
	}
	w.seen[g%replayWindow/64] |= 1 << (g % 64)
	return true
}
