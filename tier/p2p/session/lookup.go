package session

import (
	"container/heap"
	"maps"
	"slices"

	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// lookup is one LookupMsg that is being answered.
type lookup struct {
	no       uint64
	k        roundKey
	by       *serverRole
	keys     []core.Key // as asked, in order
	missing  []core.Key // those without a verdict, each once; during a pass those of what was served
	portion  []core.Key // being served, and
	rest     []core.Key // to be served in the same pass
	room     int        // what the peer may still get in this pass
	at       map[core.Key]int
	filed    places                // of its hits that are kept and may give way, the last one first
	later    map[core.Key]struct{} // misses that are due to the bounds of the moment
	serving  bool                  // a pass is under way: a Served is due
	retry    bool                  // the tier has changed meanwhile
	expired  bool                  // what is still pending is a miss
	over     bool
	deadline *timer
}

func (r *serverRole) onLookup(m *wire.P2PLookup) {
	if len(m.Keys) == 0 {
		return
	}
	k := roundKey{m.ID, m.Round}
	delete(r.expired, k) // it begins anew
	if len(r.lookups) >= maxLookups || r.asked+len(m.Keys) > maxKeys || len(r.rounds) >= maxRounds {
		r.s.send(&wire.P2PLookupResp{ID: m.ID, Keys: m.Keys, Hits: make([]bool, len(m.Keys))})
		return
	}
	h := r.s.h
	l := &lookup{no: h.nextID(), k: k, by: r, keys: m.Keys, at: make(map[core.Key]int, len(m.Keys)), later: map[core.Key]struct{}{}}
	x := r.rounds[k]
	if x != nil && x.looked && !x.fetched {
		x.keep()
	}
	for i, key := range m.Keys {
		if _, twice := l.at[key]; twice || x != nil && x.avail[key] != nil {
			continue
		}
		l.at[key] = i
		l.missing = append(l.missing, key)
	}
	r.lookups[l.no], h.lookups[l.no] = l, l
	r.asked += len(l.keys)
	l.deadline = h.after(h.cfg.PendingTimeout, func() {
		l.expired = true
		if !l.serving {
			l.answer()
		}
	})
	l.serve()
}

// serve asks the tier for what has no verdict yet, in a pass over all of it.
func (l *lookup) serve() {
	if len(l.missing) == 0 {
		l.answer()
		return
	}
	l.serving, l.retry = true, false
	l.rest, l.missing, l.room = l.missing, nil, l.share()
	l.next()
}

// share is how many blocks the peer may get, with those that may give way to others of this lookup.
func (l *lookup) share() int { return max(0, l.by.s.h.cfg.PeerPins-l.by.pins+len(l.filed)) }

// next asks for a portion: others come between, so that a long lookup holds nobody up.
func (l *lookup) next() {
	h := l.by.s.h
	n := min(len(l.rest), h.cfg.Portion)
	l.portion, l.rest = l.rest[:n], l.rest[n:]
	h.emit(Serve{Peer: l.by.s.peer, Lookup: l.no, Keys: l.portion, Most: min(l.room, l.share())})
}

// again is serve after a change of the tier.
func (l *lookup) again() {
	if l.serving {
		l.retry = true
		return
	}
	l.serve()
}

// served takes the tier's answer. Its hits are pinned: they are filed, or given back.
func (h *Hub) served(ev Served) {
	l := h.lookups[ev.Lookup]
	if l == nil {
		for _, a := range ev.Answers {
			if a.Verdict == core.Hit {
				h.emit(Unpin{Pins: []core.PinID{a.Pin}})
			}
		}
		return
	}
	for i, a := range ev.Answers {
		k := l.portion[i]
		if a.Promoted {
			l.room--
		}
		switch a.Verdict {
		case core.Hit:
			l.room--
			l.file(k, a)
		case core.Pending:
			l.missing = append(l.missing, k)
		default:
			if a.Later {
				l.later[k] = struct{}{}
			}
		}
	}
	if x := l.by.rounds[l.k]; x != nil && x.looked && !x.fetched {
		x.keep()
	}
	if len(l.rest) > 0 {
		l.next()
		return
	}
	l.serving = false
	switch {
	case len(l.missing) == 0 || l.expired:
		l.answer()
	case l.retry:
		l.serve()
	}
}

// file keeps a hit for the round's fetch, within the peer's share. When that is used up, a hit that stands
// behind this one gives way: what counts is the beginning of a prompt, also if it is ready last.
func (l *lookup) file(key core.Key, a core.Served) {
	r, h := l.by, l.by.s.h
	x := r.rounds[l.k]
	taken := x != nil && (x.avail[key] != nil || x.fetched)
	if !taken && r.pins >= h.cfg.PeerPins && !l.yield(key) {
		taken = true
		l.later[key] = struct{}{}
	}
	if taken {
		h.emit(Unpin{Pins: []core.PinID{a.Pin}})
		return
	}
	heap.Push(&l.filed, l.at[key])
	x = r.round(l.k)
	x.looked = true
	r.pins++
	x.avail[key] = &supply{key: key, slot: a.Slot, sum: a.Sum, pin: a.Pin, by: r}
}

// yield gives the last of this lookup's hits back, if it stands behind key. One that an answer to another lookup of the
// round has named stays.
func (l *lookup) yield(key core.Key) bool {
	x := l.by.rounds[l.k]
	for x != nil && len(l.filed) > 0 && l.filed[0] > l.at[key] {
		k := l.keys[heap.Pop(&l.filed).(int)]
		if u := x.avail[k]; u != nil && !u.told {
			l.later[k] = struct{}{}
			l.by.s.h.drop(u, false)
			delete(x.avail, k)
			return true
		}
	}
	return false
}

// places is a heap of places in a lookup, the last one first: what is kept may be many blocks, and each hit before them
// takes one out.
type places []int

func (p places) Len() int           { return len(p) }
func (p places) Less(i, j int) bool { return p[i] > p[j] }
func (p places) Swap(i, j int)      { p[i], p[j] = p[j], p[i] }
func (p *places) Push(x any)        { *p = append(*p, x.(int)) }

func (p *places) Pop() any {
	last := (*p)[len(*p)-1]
	*p = (*p)[:len(*p)-1]
	return last
}

// answer sends the verdicts: a hit is what is kept for the round at this moment.
func (l *lookup) answer() {
	m := &wire.P2PLookupResp{ID: l.k.id, Keys: l.keys, Hits: make([]bool, len(l.keys))}
	if x := l.by.rounds[l.k]; x != nil && !x.fetched {
		for i, key := range l.keys {
			if u := x.avail[key]; u != nil {
				m.Hits[i], u.told = true, true
			}
		}
		if x.looked {
			x.keep()
		}
	}
	if len(l.later) > 0 && l.by.s.theirs.Extension.Has(wire.CapP2PLater) {
		m.Later = make([]bool, len(l.keys))
		for i, key := range l.keys {
			_, later := l.later[key]
			m.Later[i] = later && !m.Hits[i]
		}
	}
	l.end()
	l.by.s.send(m)
	l.by.s.h.count(l.by.s.peer, func(c *Counts) { c.LookupsServed++ })
}

func (l *lookup) end() {
	if l.over {
		return
	}
	h := l.by.s.h
	l.over = true
	if l.serving {
		h.emit(Forgo{Peer: l.by.s.peer, Lookup: l.no})
	}
	h.stop(l.deadline)
	delete(h.lookups, l.no)
	delete(l.by.lookups, l.no)
	l.by.asked -= len(l.keys)
}

// byAge is the peer's lookups, oldest first.
func (r *serverRole) byAge() []*lookup {
	var out []*lookup
	for _, no := range slices.Sorted(maps.Keys(r.lookups)) {
		out = append(out, r.lookups[no])
	}
	return out
}
