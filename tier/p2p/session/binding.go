package session

import (
	"maps"
	"slices"

	"github.com/kvferry/kvferry/tier/core"
)

// binding is an id under which this node prefills for a peer. The first peer that fetches under it
// gets its blocks.
type binding struct {
	id    string
	to    *session  // nil: nobody has asked yet
	avail []*supply // what waits for somebody to ask
	live  int       // local requests that may still supply
	// finished: no supply will come. reaped: what there was has been given up, as nobody asked.
	// satisfied, declined: the peer has all it wanted.
	finished, reaped, satisfied, declined bool
	until                                 *timer
}

// binding finds or makes one; nil when there are too many.
func (h *Hub) binding(id string) *binding {
	b := h.bindings[id]
	if b == nil && len(h.bindings) < maxBindings {
		b = &binding{id: id}
		h.bindings[id] = b
	}
	return b
}

// decoding: a local request prefills under an id. An earlier request's end is forgotten.
func (h *Hub) decoding(id string) {
	b := h.binding(id)
	if b == nil {
		return
	}
	if b.live == 0 && (b.finished || b.reaped) {
		b.finished, b.reaped, b.satisfied, b.declined = false, false, false, false
	}
	b.live++
	h.stop(b.until)
}

// decoded: the request is over; a fetch that waits for more than there is will not get it.
func (h *Hub) decoded(id string) {
	b := h.bindings[id]
	if b == nil {
		return
	}
	if b.live--; b.live > 0 {
		return
	}
	b.finished = true
	h.remember(b)
	if b.to == nil {
		return
	}
	for _, x := range b.to.server.ofID(id) {
		if !x.looked {
			x.finishing = true
			x.check()
		}
	}
}

// remember keeps a binding a while for late fetches, then forgets it. What waits for a fetch has
// deadlines of its own, which are not later.
func (h *Hub) remember(b *binding) {
	h.stop(b.until)
	b.until = h.after(h.cfg.RememberFor+h.cfg.UnboundTimeout, func() {
		if b.live == 0 {
			delete(h.bindings, b.id)
		}
	})
}

// supply offers blocks to whoever fetches under the request's id.
func (h *Hub) supply(ev Supply) {
	r := h.requests[ev.Req]
	job := &storeJob{id: ev.Job, left: len(ev.Keys)}
	h.offer(ev.Keys)
	if len(ev.Keys) == 0 || r == nil || !r.decoder || h.shut {
		h.emit(StoreEnded{Job: ev.Job, OK: h.cfg.Store != "" && !h.shut}) // an offer needs nothing to stay
		return
	}
	b := h.binding(r.decodeID)
	if b == nil || b.reaped || b.satisfied || b.declined {
		h.emit(StoreEnded{Job: ev.Job})
		return
	}
	for i, key := range ev.Keys {
		u := &supply{key: key, slot: ev.Slots[i], job: job, id: b.id}
		if i < len(ev.Sums) {
			u.sum = ev.Sums[i]
		}
		b.avail = append(b.avail, u)
		h.unbound = append(h.unbound, u)
		h.slots++
	}
	first := b.avail[len(b.avail)-len(ev.Keys)]
	first.deadline = h.after(h.cfg.UnboundTimeout, func() { h.reap(b) })
	if b.to != nil {
		h.replay(b)
		return
	}
	for h.slots > h.cfg.UnboundSlots {
		h.reap(h.bindings[h.unbound[0].id])
	}
}

// reap gives up what nobody has asked for. A binding with supply that waits has no peer yet.
func (h *Hub) reap(b *binding) {
	b.reaped = true
	h.note("", "supply_reaped", "nobody has fetched under %q: %d blocks are given back", b.id, len(b.avail))
	h.giveUp(b)
	if b.live == 0 {
		h.remember(b)
	}
}

func (h *Hub) giveUp(b *binding) {
	avail := h.take(b)
	for _, u := range avail {
		h.drop(u, false)
	}
}

// take moves a binding's waiting supply out of the common list.
func (h *Hub) take(b *binding) []*supply {
	avail := b.avail
	b.avail = nil
	h.slots -= len(avail)
	if len(avail) == 0 {
		return nil
	}
	h.unbound = slices.DeleteFunc(h.unbound, func(u *supply) bool { return u.id == b.id })
	for _, u := range avail {
		h.stop(u.deadline)
	}
	return avail
}

// mayBind says why a peer may not fetch under an id; "" if it may.
func (h *Hub) mayBind(id string, s *session) string {
	b := h.bindings[id]
	switch {
	case b == nil && len(h.bindings) >= maxBindings:
		return "too many ids are prefilled"
	case b == nil:
		return ""
	case b.to != nil && b.to != s:
		return "another peer fetches under its id"
	case b.reaped:
		return "nobody had fetched in time"
	}
	return ""
}

// bound gives a fetch without lookups what is there for its id, now and later.
func (h *Hub) bound(x *round) {
	b := h.binding(x.k.id)
	if b == nil {
		return
	}
	b.to = x.by.s
	if b.live == 0 {
		h.remember(b)
	}
	h.replay(b)
	if b.finished {
		x.finishing = true
	}
}

// replay hands a binding's supply to its peer's rounds.
func (h *Hub) replay(b *binding) {
	avail := h.take(b)
	rounds := b.to.server.ofID(b.id)
	for _, u := range avail {
		if x := wants(rounds, u.key); x != nil {
			x.avail[u.key] = u
		} else {
			h.drop(u, false)
		}
	}
	for _, x := range rounds {
		if !x.looked && len(x.avail) > 0 {
			x.wait()
			x.match()
			x.check()
		}
	}
}

// wants finds the round that waits for a key.
func wants(rounds []*round, key core.Key) *round {
	for _, x := range rounds {
		if !x.looked && x.demand[key] != nil && x.avail[key] == nil {
			return x
		}
	}
	return nil
}

// satisfied: a peer has got all that it fetched under an id.
func (h *Hub) satisfied(id string) {
	if b := h.bindings[id]; b != nil {
		b.satisfied = true // what it did not want was given back as it came
		if b.live == 0 {
			h.forget(b)
		}
	}
}

// declined: a peer wants nothing under an id, or nothing more.
func (h *Hub) declined(id string, s *session) {
	b := h.bindings[id]
	if b == nil || b.to != nil && b.to != s {
		return
	}
	b.declined = true
	h.giveUp(b)
	if b.live == 0 {
		h.forget(b)
	}
}

func (h *Hub) forget(b *binding) {
	h.stop(b.until)
	delete(h.bindings, b.id)
}

// unbind frees the ids of a session that has ended.
func (h *Hub) unbind(s *session) {
	for _, id := range slices.Sorted(maps.Keys(h.bindings)) {
		b := h.bindings[id]
		if b.to != s {
			continue
		}
		b.to = nil
		if b.live == 0 {
			h.forget(b)
		}
	}
}
