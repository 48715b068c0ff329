package core

import "github.com/kvferry/kvferry/kv"

// Use pins the blocks of keys, all or none, so that the engine may read their slots until EndUse. It
// counts as their use.
func (m *Machine) Use(keys []Key) (JobID, []Slot, bool) {
	blocks := make([]*block, len(keys))
	for i, k := range keys {
		if blocks[i] = m.pool.index[k]; blocks[i] == nil || blocks[i].state != ready {
			return 0, nil, false
		}
	}
	slots := make([]Slot, len(blocks))
	for i, b := range blocks {
		m.pool.pin(b)
		slots[i] = b.slot
	}
	m.pool.touch(keys)
	return m.open(jobUse, -1, "", blocks), slots, true
}

// Touch notes the use of those of keys, in prefix order, that are here: the beginning of a prefix, which
// more requests can share, is evicted after its end.
func (m *Machine) Touch(keys []Key) { m.pool.touch(keys) }

// Recent gives the keys of ready blocks, each with a number that is the higher the later it is evicted.
func (m *Machine) Recent() map[Key]uint64 {
	out := make(map[Key]uint64, len(m.pool.index))
	for k, b := range m.pool.index {
		if b.state == ready {
			out[k] = b.rank
		}
	}
	return out
}

// EndUse ends a Use.
func (m *Machine) EndUse(id JobID) {
	if j := m.shut(id, jobUse); j != nil {
		m.release(j.blocks)
	}
}

func (m *Machine) release(blocks []*block) {
	for _, b := range blocks {
		m.pool.unpin(b)
	}
	m.changed = true
}

// Reservation says where the engine is to write: Slots[i] is for keys[Index[i]] of the call. Keys
// that are here already are not in it.
type Reservation struct {
	ID    JobID
	Index []int
	Slots []Slot
}

// Reserve makes room for the engine to write blocks of a request, all or none of those that are not
// here yet. Commit follows. What is here already is stored at once to tiers that want the whole
// request. It reports false, and does nothing, when there is no room or no such request. A
// reservation without slots has no ID and needs no Commit.
func (m *Machine) Reserve(req kv.RequestID, keys []Key) (Reservation, bool) {
	r := m.requests[req]
	if r == nil || r.finished {
		return Reservation{}, false
	}
	var res Reservation
	var fresh []Key
	keep := make(map[Key]struct{}, len(keys))
	for i, k := range keys {
		if _, twice := keep[k]; twice {
			continue
		}
		keep[k] = struct{}{}
		if m.pool.index[k] == nil {
			fresh = append(fresh, k)
			res.Index = append(res.Index, i)
		}
	}
	blocks := m.pool.reserve(fresh, keep)
	m.pool.restore()
	if blocks == nil && len(fresh) > 0 {
		return Reservation{}, false
	}
	isFresh := make(map[Key]struct{}, len(fresh))
	for _, k := range fresh {
		isFresh[k] = struct{}{}
	}
	m.storeResident(req, r, keys, isFresh)
	if len(blocks) == 0 {
		return Reservation{}, true
	}
	r.stores++
	res.ID = m.open(jobReserve, -1, req, blocks)
	for _, b := range blocks {
		res.Slots = append(res.Slots, b.slot)
	}
	return res, true
}

// storeResident gives what is here to the tiers that want whole requests, now or when it is ready.
func (m *Machine) storeResident(req kv.RequestID, r *request, keys []Key, fresh map[Key]struct{}) {
	for t := range m.cfg.Tiers {
		if !at(r.spec.Whole, t) {
			continue
		}
		var now []*block
		seen := map[Key]struct{}{}
		for _, k := range keys {
			if _, ok := seen[k]; ok {
				continue
			}
			seen[k] = struct{}{}
			b := m.pool.index[k]
			if _, ok := fresh[k]; ok || b == nil {
				continue
			}
			if b.state == ready {
				now = append(now, b)
				continue
			}
			b.parked = append(b.parked, parked{req, t})
			r.parked++
		}
		m.store(t, req, now)
	}
}

// Commit ends a reservation. With ok the blocks are ready and are stored to every tier; without, they
// are forgotten and their slots are free, so the writer must have stopped. Tiers with no use for them
// (NoStore) get no job.
func (m *Machine) Commit(id JobID, ok bool) {
	j := m.shut(id, jobReserve)
	if j == nil {
		return
	}
	m.end(j.blocks, ok)
	r := m.requests[j.req] // it waits for this
	for t := range m.cfg.Tiers {
		if ok && !at(r.spec.NoStore, t) {
			m.store(t, j.req, j.blocks)
		}
	}
	r.stores--
	m.retire(j.req, r)
}

// end makes written blocks ready, or forgets them.
func (m *Machine) end(blocks []*block, ok bool) {
	m.changed = true
	for _, b := range blocks {
		if ok {
			m.pool.commit(b)
		} else {
			m.pool.discard(b, false)
		}
		m.unpark(b, ok)
	}
}

// unpark keeps, or drops, a block's promises to whole-request tiers.
func (m *Machine) unpark(b *block, ok bool) {
	waiting := b.parked
	b.parked = nil
	for _, p := range waiting {
		if ok {
			m.store(p.tier, p.req, []*block{b})
		}
		if r := m.requests[p.req]; r != nil {
			r.parked--
			m.retire(p.req, r)
		}
	}
}

// store opens a store job, which pins its blocks. Blocks that a reset has dropped are left out.
func (m *Machine) store(tier int, req kv.RequestID, blocks []*block) {
	var live []*block
	for _, b := range blocks {
		if b.state == ready {
			live = append(live, b)
		}
	}
	if len(live) == 0 {
		return
	}
	if m.inFlight >= MaxJobs {
		m.stats.RefusedStores++
		return
	}
	for _, b := range live {
		m.pool.pin(b)
	}
	id := m.open(jobStore, tier, req, live)
	job := describe(id, req, live)
	_, job.Sums = m.Blocks(id)
	m.out = append(m.out, Store{Tier: tier, Job: job})
}

// StoreEnded ends a store, well or not.
func (m *Machine) StoreEnded(id JobID, ok bool) {
	j := m.shut(id, jobStore)
	if j == nil {
		return
	}
	if !ok {
		m.stats.FailedStores++
	}
	m.release(j.blocks)
}

// LoadEnded ends a load: good[i] says whether the i-th block of the job is whole; a short list means
// that the rest is not. Unless stopped, something may still write into the slots of the others: they
// stay in quarantine until LoadStopped.
func (m *Machine) LoadEnded(id JobID, good []bool, stopped bool) {
	j := m.shut(id, jobLoad)
	if j == nil {
		return
	}
	if j.req == "" {
		m.peerLoads -= len(j.blocks)
	}
	var held, whole []*block
	r := m.requests[j.req]
	for i, b := range j.blocks {
		if at(good, i) {
			m.end([]*block{b}, true)
			whole = append(whole, b)
			continue
		}
		m.stats.FailedLoads++
		if r != nil {
			if r.failed == nil {
				r.failed = map[tierKey]struct{}{}
			}
			r.failed[tierKey{j.tier, b.key}] = struct{}{}
		}
		if stopped {
			m.end([]*block{b}, false)
			continue
		}
		m.pool.discard(b, true)
		m.unpark(b, false)
		m.changed = true
		held = append(held, b)
	}
	if r != nil && r.spec.Through {
		m.storeThrough(j, r, whole)
	}
	if !stopped {
		m.jobs[id] = &job{kind: jobHalted, blocks: held}
		m.parkedIn += len(held)
	}
}

// storeThrough gives what a load has brought to the other tiers.
func (m *Machine) storeThrough(j *job, r *request, blocks []*block) {
	for t := range m.cfg.Tiers {
		if t != j.tier && !at(r.spec.NoStore, t) {
			m.store(t, j.req, blocks)
		}
	}
}

// LoadStopped says that nothing writes any more for a load that has ended without being stopped.
func (m *Machine) LoadStopped(id JobID) {
	j := m.shut(id, jobHalted)
	if j == nil {
		return
	}
	m.parkedIn -= len(j.blocks)
	for _, b := range j.blocks {
		m.pool.release(b)
	}
	m.changed = true
}
