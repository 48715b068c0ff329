package session

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// serverRole is what one peer asks of this node.
type serverRole struct {
	s       *session
	rounds  map[roundKey]*round
	lookups map[uint64]*lookup
	pins    int // supplies from lookups that it holds
	asked   int // keys in lookups
	wanted  int // keys in rounds that were fetched
	// expired remembers rounds whose pins were given back, oldest first.
	expired      map[roundKey]struct{}
	expiredOrder []roundKey
}

type roundKey struct {
	id  string
	seq uint64
}

func (r *serverRole) init(s *session) {
	r.s, r.rounds, r.lookups, r.expired = s, map[roundKey]*round{}, map[uint64]*lookup{}, map[roundKey]struct{}{}
}

func (r *serverRole) busy() bool { return len(r.rounds) > 0 || len(r.lookups) > 0 }

// supply is one block that is kept for a peer: pinned by a lookup, or part of a store.
type supply struct {
	key  core.Key
	slot core.Slot
	sum  core.Sum
	pin  core.PinID
	job  *storeJob // nil for a pin
	by   *serverRole
	told bool // an answer to a lookup has named it
	// deadline ends the wait for a peer that has not asked yet.
	deadline *timer
	id       string
}

// storeJob is one Supply: it ends when its last block has.
type storeJob struct {
	id     core.JobID
	left   int
	failed bool
}

// drop gives a supply back.
func (h *Hub) drop(u *supply, delivered bool) {
	h.stop(u.deadline)
	if u.job == nil {
		u.by.pins--
		h.emit(Unpin{Pins: []core.PinID{u.pin}})
		return
	}
	u.job.left--
	u.job.failed = u.job.failed || !delivered
	if u.job.left == 0 {
		h.emit(StoreEnded{Job: u.job.id, OK: !u.job.failed})
	}
}

// round is one round of an id: what is kept for it, what is wanted, and what is under way.
type round struct {
	k      roundKey
	by     *serverRole
	looked bool // its supply comes from lookups: what is not here will not come
	avail  map[core.Key]*supply
	demand map[core.Key][]place
	grant  agent.GrantID
	sums   []uint32 // of what was fetched, in its order, as far as it has been posted
	unsure bool     // a sum is not known

	fetched   bool
	remaining int // blocks wanted that have not arrived
	moving    map[uint64]struct{}
	timer     *timer
	// How it is to end once nothing moves:
	failed, aborting, silent, finishing bool
	over                                bool
}

// place is where a key of a fetch is to be written.
type place struct {
	block uint32 // of the peer's memory
	at    int    // in the fetch
}

func (r *serverRole) round(k roundKey) *round {
	x := r.rounds[k]
	if x == nil {
		x = &round{k: k, by: r, avail: map[core.Key]*supply{}, demand: map[core.Key][]place{}, moving: map[uint64]struct{}{}}
		r.rounds[k] = x
	}
	return x
}

// onFetch begins the writes that a fetch asks for.
func (r *serverRole) onFetch(m *wire.P2PFetch) {
	k := roundKey{m.ID, m.Round}
	if len(m.Keys) == 0 {
		r.terminal(m.ID)
		return
	}
	x := r.rounds[k]
	if x != nil && x.fetched {
		r.s.end(Protocol, fmt.Sprintf("it fetched round %d of %q twice", m.Round, m.ID))
		return
	}
	if why := r.badFetch(m, x); why != "" {
		r.s.h.note(r.s.peer, "fetch_refused", "%s", why)
		if x == nil {
			r.failed(k)
			return
		}
		x.fetched, x.failed = true, true
		x.check()
		return
	}
	if x == nil {
		x = r.round(k)
	}
	x.fetched, x.remaining, x.grant = true, len(m.Keys), m.Grant
	x.sums = make([]uint32, len(m.Keys))
	r.wanted += len(x.sums)
	for i, key := range m.Keys {
		x.demand[key] = append(x.demand[key], place{block: uint32(m.Indexes[i]), at: i})
	}
	x.match()
	if x.looked { // a round is fetched once: what is not in it is of no use
		x.release()
		x.failed = x.failed || len(x.demand) > 0
	}
	if !x.looked && !x.over && !x.failed {
		x.wait()
		r.s.h.bound(x)
	}
	x.check()
}

// badFetch says why a fetch cannot be served.
func (r *serverRole) badFetch(m *wire.P2PFetch, x *round) string {
	seen := make(map[uint64]struct{}, len(m.Indexes))
	for _, i := range m.Indexes {
		if i >= uint64(r.s.theirs.NumBlocks) {
			return fmt.Sprintf("block %d of a memory of %d blocks", i, r.s.theirs.NumBlocks)
		}
		if _, twice := seen[i]; twice {
			return fmt.Sprintf("two keys for block %d", i)
		}
		seen[i] = struct{}{}
	}
	if _, gone := r.expired[roundKey{m.ID, m.Round}]; gone && x == nil {
		return "what was kept for it was given back, as it came too late"
	}
	if x != nil && x.looked {
		for _, key := range m.Keys {
			if x.avail[key] == nil {
				return "a key that was not a hit of its lookups"
			}
		}
		return ""
	}
	if len(r.rounds) >= maxRounds || r.wanted+len(m.Keys) > maxKeys {
		return "it has too many rounds already, or waits for too many blocks"
	}
	return r.s.h.mayBind(m.ID, r.s)
}

// match posts what is both here and wanted.
func (x *round) match() {
	if !x.fetched || x.failed || x.aborting || x.silent {
		return
	}
	s := x.by.s
	var used []*supply
	post := Post{Agent: s.agent, Base: s.theirs.BaseAddr, Grant: x.grant}
	for _, key := range slices.Sorted(maps.Keys(x.avail)) {
		places := x.demand[key]
		if places == nil {
			continue
		}
		u := x.avail[key]
		delete(x.avail, key)
		delete(x.demand, key)
		used = append(used, u)
		for _, p := range places {
			post.Local = append(post.Local, u.slot)
			post.Remote = append(post.Remote, p.block)
			x.sums[p.at] = u.sum.CRC
			x.unsure = x.unsure || !u.sum.Known
		}
	}
	if len(used) == 0 {
		return
	}
	post.Transfer = s.h.nextID()
	x.moving[post.Transfer] = struct{}{}
	s.h.xfers[post.Transfer] = &transfer{x: x, used: used, blocks: len(post.Local)}
	s.h.emit(post)
}

// transfer is one Post. It outlives its session.
type transfer struct {
	x      *round
	used   []*supply
	blocks int
	ended  bool
	ok     bool
}

func (h *Hub) transferEnded(ev TransferEnded) {
	t := h.xfers[ev.Transfer]
	if t == nil || t.ended {
		return
	}
	t.ended, t.ok = true, ev.OK
	x := t.x
	switch {
	case x.over:
	case ev.OK:
		x.remaining -= t.blocks
	default:
		h.note(x.by.s.peer, "transfer_failed", "round %d of %q: %v", x.k.seq, x.k.id, ev.Err)
		x.failed = true
		for _, id := range slices.Sorted(maps.Keys(x.moving)) {
			if id != ev.Transfer {
				h.emit(Cancel{Transfer: id})
			}
		}
	}
}

func (h *Hub) transferStopped(id uint64) {
	t := h.xfers[id]
	if t == nil {
		return
	}
	delete(h.xfers, id)
	for _, u := range t.used {
		h.drop(u, t.ok)
	}
	delete(t.x.moving, id)
	t.x.check()
}

// check ends a round that can end: nothing of it moves any more.
func (x *round) check() {
	if x.over || len(x.moving) > 0 {
		return
	}
	r := x.by
	switch {
	case x.aborting:
		x.close()
		r.s.send(wire.P2PAbortAck{ID: x.k.id, Round: x.k.seq})
	case x.silent:
		x.close()
	case x.failed || x.finishing && x.fetched && x.remaining > 0:
		x.close()
		r.failed(x.k)
	case x.fetched && x.remaining == 0:
		x.close()
		if !x.looked {
			r.s.h.satisfied(x.k.id)
		}
		r.delivered(x)
	}
}

// close takes a round out and gives back what it did not use.
func (x *round) close() {
	h := x.by.s.h
	x.over = true
	h.stop(x.timer)
	delete(x.by.rounds, x.k)
	x.by.wanted -= len(x.sums)
	x.release()
	x.demand = nil
}

func (x *round) release() {
	for _, key := range slices.Sorted(maps.Keys(x.avail)) {
		u := x.avail[key]
		delete(x.avail, key)
		x.by.s.h.drop(u, false)
	}
}

// delivered tells the peer that a round is done, and what it should have got.
func (r *serverRole) delivered(x *round) {
	m := wire.P2PTransferDone{ID: x.k.id, Success: true, Round: x.k.seq}
	if !x.unsure && r.s.theirs.Extension.Has(wire.CapP2PSums) {
		m.Sums = x.sums
	}
	r.s.send(m)
	n := len(x.sums)
	bytes := uint64(n) * r.s.h.cfg.Local.BlockLen
	r.s.h.count(r.s.peer, func(c *Counts) {
		c.FetchesServed++
		c.BlocksOut += uint64(n)
		c.BytesOut += bytes
	})
	r.s.h.report(event.TierServed{Peer: string(r.s.peer), Blocks: n, Bytes: int64(bytes), OK: true})
}

// failed tells it that a round will not be.
func (r *serverRole) failed(k roundKey) {
	r.s.send(wire.P2PTransferDone{ID: k.id, Round: k.seq})
	r.s.h.count(r.s.peer, func(c *Counts) { c.FetchesRefused++ })
	r.s.h.report(event.TierServed{Peer: string(r.s.peer)})
}

// wait bounds how long a fetch waits for the next supply.
func (x *round) wait() {
	h := x.by.s.h
	h.stop(x.timer)
	x.timer = h.after(h.cfg.DemandTimeout, func() {
		if len(x.demand) > 0 {
			x.failed = true
			x.check()
		}
	})
}

// keep bounds how long hits are kept for a fetch. What is given back is forgotten.
func (x *round) keep() {
	h := x.by.s.h
	h.stop(x.timer)
	x.timer = h.after(h.cfg.PinTimeout, func() {
		if x.fetched {
			return
		}
		x.by.expire(x.k)
		x.close()
	})
}

func (r *serverRole) expire(k roundKey) {
	if len(r.expiredOrder) >= maxExpired {
		delete(r.expired, r.expiredOrder[0])
		r.expiredOrder = r.expiredOrder[1:]
	}
	if _, ok := r.expired[k]; !ok {
		r.expired[k] = struct{}{}
		r.expiredOrder = append(r.expiredOrder, k)
	}
}

// terminal ends an id: its client wants nothing more of it.
func (r *serverRole) terminal(id string) {
	for _, l := range r.byAge() {
		if l.k.id == id {
			l.end()
		}
	}
	for _, x := range r.ofID(id) {
		x.silent = true
		x.release()
		x.demand = nil
		x.check()
	}
	r.s.h.declined(id, r.s)
}

func (r *serverRole) onAbort(m wire.P2PAbortFetch) {
	k := roundKey{m.ID, m.Round}
	x := r.rounds[k]
	if x == nil {
		r.s.send(wire.P2PAbortAck(m))
		return
	}
	x.aborting = true
	x.release()
	x.demand = nil
	for _, id := range slices.Sorted(maps.Keys(x.moving)) {
		r.s.h.emit(Cancel{Transfer: id})
	}
	x.check()
}

// ofID is the rounds of an id in order.
func (r *serverRole) ofID(id string) []*round {
	var out []*round
	for k, x := range r.rounds {
		if k.id == id {
			out = append(out, x)
		}
	}
	slices.SortFunc(out, func(a, b *round) int { return cmp.Compare(a.k.seq, b.k.seq) })
	return out
}

// end gives up everything with the session. What moves is asked to end; its pins wait for that.
func (r *serverRole) end() {
	for _, l := range r.byAge() {
		l.end()
	}
	keys := slices.Collect(maps.Keys(r.rounds))
	slices.SortFunc(keys, func(a, b roundKey) int {
		return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.seq, b.seq))
	})
	for _, k := range keys {
		x := r.rounds[k]
		for _, id := range slices.Sorted(maps.Keys(x.moving)) {
			r.s.h.emit(Cancel{Transfer: id})
		}
		x.close()
	}
	r.s.h.unbind(r.s)
}
