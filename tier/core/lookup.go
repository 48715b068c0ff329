package core

import "github.com/kvferry/kvferry/kv"

// Lookup answers for each key whether the request can have it. What another tier has is given a slot
// and loaded: its verdict is Pending, and Hit after a change. None of the keys is evicted for another
// of them. An unknown request misses everything. Behind its first miss a request with a Prefix has only
// misses: no tier is asked or loads anything there, and those that were asked earlier learn it (Unwanted). The keys of
// such a lookup are distinct.
func (m *Machine) Lookup(req kv.RequestID, keys []Key, p Prober) []Verdict {
	out := make([]Verdict, len(keys))
	r := m.requests[req]
	if r == nil {
		return out
	}
	s := m.newSearch(req, r, -1, keys)
	for i, k := range keys {
		out[i] = s.find(k, p)
		switch out[i] {
		case Hit:
			m.stats.Hits++
		case Miss:
			m.stats.Misses++
		}
		if out[i] == Miss && r.spec.Prefix {
			s.flush()
			m.unwanted(req, r, keys[i+1:])
			return out
		}
	}
	s.flush()
	return out
}

// unwanted tells the tiers of keys that stand behind a miss.
func (m *Machine) unwanted(req kv.RequestID, r *request, keys []Key) {
	if len(keys) == 0 {
		return
	}
	for t := range m.cfg.Tiers {
		if !at(r.spec.NoLoad, t) {
			m.out = append(m.out, Unwanted{Tier: t, Req: req, Keys: keys})
		}
	}
}

// Serve answers a peer's lookup, or a portion of one, that came in by the given tier, which is itself not asked:
// nothing is fetched from one peer for another. Each hit is pinned before the next key is looked at. The peer gets most
// blocks, pinned or loaded from another tier, as far as all peers together leave it those; the rest are misses
// for now. None of keys is evicted for another of them. One of a later portion may be: in a prompt what comes
// first counts, and keeping all of a long lookup would take time that grows with its length for each portion.
func (m *Machine) Serve(tier int, keys []Key, most int, p Prober) []Served {
	out := make([]Served, len(keys))
	s := m.newSearch("", nil, tier, keys)
	given := 0
	for i, k := range keys {
		s.full = given >= most || len(m.pins)+m.peerLoads+s.promoted >= m.cfg.PeerPins
		before := s.promoted
		v := s.find(k, p)
		out[i].Verdict, out[i].Later = v, s.refused
		out[i].Promoted = s.promoted > before
		given += s.promoted - before
		if s.refused {
			m.stats.RefusedPins++
			s.refused = false
		}
		if v == Hit {
			given++
			b := m.pool.index[k]
			m.pool.pin(b)
			out[i].Pin, out[i].Slot, out[i].Sum = PinID(m.nextID()), b.slot, b.sum
			m.pins[out[i].Pin] = b
		}
	}
	s.flush()
	return out
}

// Unpin ends peers' references. Unknown ones are counted.
func (m *Machine) Unpin(pins []PinID) {
	for _, id := range pins {
		b := m.pins[id]
		if b == nil {
			m.stats.Strays++
			continue
		}
		delete(m.pins, id)
		m.pool.unpin(b)
		m.changed = true
	}
}

// search is one Lookup or Serve: it collects promotions, one load for each tier.
type search struct {
	m       *Machine
	req     kv.RequestID
	r       *request // nil for a peer
	exclude int
	keys    []Key
	keep    map[Key]struct{} // keys; made when something is to be evicted
	loads   [MaxTiers][]*block
	// full: a peer gets nothing more. refused: the last key was a miss for that. promoted is how many loads have.
	full, refused bool
	promoted      int
}

func (m *Machine) newSearch(req kv.RequestID, r *request, exclude int, keys []Key) *search {
	return &search{m: m, req: req, r: r, exclude: exclude, keys: keys}
}

func (s *search) find(k Key, p Prober) Verdict {
	if b := s.m.pool.index[k]; b != nil {
		switch {
		case b.state != ready:
			return Pending
		case s.full:
			return s.refuse()
		}
		return Hit
	}
	verdict := Miss
	for t := range s.m.cfg.Tiers {
		if t == s.exclude || s.r != nil && at(s.r.spec.NoLoad, t) || s.failed(t, k) {
			continue
		}
		switch p.Probe(t, s.req, k) {
		case Hit:
			if s.full {
				return s.refuse()
			}
			return s.promote(t, k)
		case Pending:
			verdict = Pending
		}
	}
	return verdict
}

func (s *search) failed(tier int, k Key) bool {
	if s.r == nil {
		return false
	}
	_, ok := s.r.failed[tierKey{tier, k}]
	return ok
}

func (s *search) refuse() Verdict {
	s.refused = true
	return Miss
}

// promote gives a key of another tier a slot.
func (s *search) promote(tier int, k Key) Verdict {
	if s.keep == nil {
		s.keep = make(map[Key]struct{}, len(s.keys))
		for _, k := range s.keys {
			s.keep[k] = struct{}{}
		}
	}
	if s.loads[tier] == nil && s.m.inFlight+s.open() >= MaxJobs {
		s.m.stats.RefusedPromotions++
		return Miss
	}
	blocks := s.m.pool.reserve([]Key{k}, s.keep)
	if blocks == nil {
		s.m.stats.RefusedPromotions++
		return Miss
	}
	s.m.stats.Promotions++
	s.promoted++
	s.loads[tier] = append(s.loads[tier], blocks[0])
	return Pending
}

// open is how many loads flush will make.
func (s *search) open() int {
	n := 0
	for _, l := range s.loads {
		if l != nil {
			n++
		}
	}
	return n
}

func (s *search) flush() {
	s.m.pool.restore()
	for t, blocks := range s.loads {
		if blocks != nil {
			id := s.m.open(jobLoad, t, s.req, blocks)
			if s.req == "" {
				s.m.peerLoads += len(blocks)
			}
			s.m.out = append(s.m.out, Load{Tier: t, Job: describe(id, s.req, blocks)})
		}
	}
}
