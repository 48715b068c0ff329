package core

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry/kv"
)

// schedule gives blocks and, if no step is in flight, returns the next one. It runs after every
// event, so that a request whose KV comes from a peer gets its blocks at once, whatever the model
// is doing.
//
// Everything goes by arrival. A running request that needs a block takes it from the latest one, which
// then waits and is computed again. Nobody starves: the earliest running request waits for blocks
// only that peers have, and while anybody waits for blocks, no later request gets any.
func (m *Machine) schedule(now time.Time) []Sequence {
	if m.inFlight {
		m.admit(now, nil)
		return nil
	}
	b := &batch{budget: m.cfg.MaxBatchTokens, open: true}
	m.advanceRunning(now, b)
	m.admit(now, b)
	m.inFlight = len(b.sequences) > 0
	return b.sequences
}

// batch is a step that is being put together.
type batch struct {
	sequences []Sequence
	budget    int  // tokens left
	open      bool // requests without blocks may join
}

// advanceRunning schedules the requests that run already.
func (m *Machine) advanceRunning(now time.Time, b *batch) {
	m.stalled = false
	for i := 0; i < len(m.running) && b.budget > 0; i++ {
		r := m.running[i]
		n := min(len(r.tokens)-r.computed, b.budget)
		if n = m.makeRoom(now, r, n, b); n > 0 {
			m.join(b, r, n)
		}
	}
}

// makeRoom gives r blocks for up to n more tokens and returns for how many it has them. Later
// requests lose theirs if need be, unless a peer is writing to them.
func (m *Machine) makeRoom(now time.Time, r *request, n int, b *batch) int {
	for {
		need := m.blocksFor(r.computed+n) - len(r.blocks)
		if need <= 0 {
			return n
		}
		if fresh, ok := m.pool.Take(nil, need); ok {
			r.blocks = append(r.blocks, fresh...)
			return n
		}
		if fit := (len(r.blocks)+m.pool.Free())*m.cfg.BlockSize - r.computed; fit > 0 {
			n = fit // less than n, or Take had succeeded
			continue
		}
		last := m.running[len(m.running)-1]
		if ready := m.latestReady(); last == r && ready != nil && ready.arrival > r.arrival {
			last = ready
		}
		if last != r {
			b.open = false
			m.preempt(now, last)
			continue
		}
		// The other blocks belong to earlier requests or to peers, and come back by themselves.
		m.stalled = true
		if len(m.running) == m.cfg.MaxRunning && m.latestReady() != nil {
			b.open = false
			m.preempt(now, r) // an earlier request needs its place to go on
		}
		return 0
	}
}

// latestReady is the latest request that has its KV from a peer and waits for a place in the batch.
func (m *Machine) latestReady() *request {
	for _, r := range slices.Backward(m.waiting) {
		if r.blocks != nil {
			return r
		}
	}
	return nil
}

// preempt takes a request's blocks. It is computed again later, or loaded if the tier has kept it;
// what a peer brought is not transferred again.
func (m *Machine) preempt(now time.Time, r *request) {
	m.strip(r)
	r.starved = true
	r.usage.Preemptions++
	m.stats.Preemptions++
	m.enqueue(r)
	m.tierLook(now, r)
}

// admit gives blocks to waiting requests. b is nil while a step is in flight: then only those whose
// KV comes from a peer can get any.
func (m *Machine) admit(now time.Time, b *batch) {
	short := m.stalled // an earlier request waits for blocks; what is free is for it
	still := make([]*request, 0, len(m.waiting))
	for _, r := range m.waiting {
		var ok bool
		switch room := b != nil && b.budget > 0 && len(m.running) < m.cfg.MaxRunning; {
		case r.blocks != nil:
			if ok = room; ok {
				m.run(b, r, min(len(r.tokens)-r.computed, b.budget, len(r.blocks)*m.cfg.BlockSize-r.computed))
			}
		case short:
		default:
			ok = m.admitOne(now, b, room, r)
			short = r.starved
		}
		if !ok {
			still = append(still, r)
		}
	}
	m.waiting, m.starved = still, short
}

// admitOne gives a request its first blocks, if it can use them now. It leaves r.starved telling
// whether blocks are what it lacks.
func (m *Machine) admitOne(now time.Time, b *batch, room bool, r *request) bool {
	if r.tier.look != 0 {
		r.starved = false // it waits for the tier's answer, not for blocks
		return false
	}
	handOff := r.Params != nil && !r.admitted
	load := r.tier.found > 0 && m.tierRoom()
	if !handOff && !load && !(room && b.open) {
		return false
	}
	if handOff && len(m.resets) > 0 {
		r.starved = false // it waits for the reset, not for blocks
		return false
	}
	hits := m.lookup(r)
	hit := len(hits) * m.cfg.BlockSize
	if handOff {
		if external := min(m.conn.External(r.ID, hit), len(r.Prompt)-hit); external > 0 {
			return m.admitRemote(now, r, hits, external)
		}
	}
	if n := r.tier.found - len(hits); n > 0 {
		// Without a place it waits for one: those who have them run, or will.
		return load && m.admitTier(now, r, hits, n)
	}
	if !(room && b.open) {
		return false
	}
	n := min(len(r.tokens)-hit, b.budget)
	if !m.allocate(now, r, hits, m.blocksFor(hit+n), 0) {
		return false
	}
	m.run(b, r, n)
	return true
}

// admitRemote gives a request blocks for its whole prompt, and no more, so that both engines count
// the same blocks, and lets it wait for its KV.
func (m *Machine) admitRemote(now time.Time, r *request, hits []kv.BlockID, external int) bool {
	if !m.allocate(now, r, hits, m.blocksFor(len(r.Prompt)), external) {
		return false
	}
	r.external = external
	r.state = remote
	m.remote++
	return true
}

// allocate gives a request hits and fresh blocks, total together.
func (m *Machine) allocate(now time.Time, r *request, hits []kv.BlockID, total, external int) bool {
	blocks, ok := m.pool.Take(hits, total-len(hits))
	r.starved = !ok
	if !ok {
		return false
	}
	r.blocks = blocks
	r.offered = len(hits)
	r.computed = len(hits) * m.cfg.BlockSize
	if !r.Tier.Whole {
		r.tier.stored = max(r.tier.stored, len(hits))
	}
	if !r.counted {
		r.counted = true
		r.usage.Cached = r.computed
		if m.cfg.PrefixCaching {
			m.stats.PrefixQueries += uint64(len(r.Prompt))
			m.stats.PrefixHits += uint64(r.computed)
		}
	}
	if !r.admitted {
		r.admitted = true
		if r.Params != nil {
			m.conn.Allocated(now, r.ID, kv.BlockIDs{slices.Clone(blocks)}, r.computed, external)
		}
	}
	return true
}

// lookup finds the blocks of a request's tokens that the prefix cache has. The last token is always
// left to compute: its logits are not in the cache.
func (m *Machine) lookup(r *request) []kv.BlockID {
	if !m.cfg.PrefixCaching {
		return nil
	}
	return m.pool.Find(m.hashTo(r, (len(r.tokens)-1)/m.cfg.BlockSize))
}

// run makes a waiting request a running one and lets it join the step. The caller takes it out of
// the waiting ones.
func (m *Machine) run(b *batch, r *request, n int) {
	r.state = running
	m.running = insert(m.running, r)
	m.join(b, r, n)
}

// join puts a request's next n tokens, for which it has blocks, into the step.
func (m *Machine) join(b *batch, r *request, n int) {
	blocks := slices.Clone(r.blocks[:m.blocksFor(r.computed+n)])
	m.pool.Share(blocks)
	f := flying{r: r, blocks: blocks, n: n, sample: r.computed+n == len(r.tokens)}
	m.flight = append(m.flight, f)
	b.budget -= n
	b.sequences = append(b.sequences, Sequence{
		ID: r.ID, Tokens: slices.Clone(r.tokens[r.computed : r.computed+n]), Start: r.computed,
		Blocks: slices.Clone(blocks), Sample: f.sample,
	})
}
