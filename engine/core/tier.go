package core

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry/kv"
)

// TierSpec says what a request may have of the CPU tier, and gives to it.
type TierSpec struct {
	// MaxLoad and MaxStore bound the tokens, from the first of the prompt on, whose blocks are looked
	// for in the tier and given to it; nil: all (p2p-tier.md, section 9).
	MaxLoad, MaxStore *int
	// Whole: the tier is given every block of the request, not only what is computed here
	// (p2p-tier.md, section 8.5).
	Whole bool
}

// Actions for who has the tier. They are to be carried out in the order given, and never to be waited
// for. Each TierLook is answered by a TierFound, each TierLoad by a TierLoaded and each TierStore by
// a TierStored, with its ticket, which is never used again.
type (
	// TierBegin makes a request known. Seq is its own; ids come back.
	TierBegin struct {
		ID  kv.RequestID
		Seq uint64
	}
	// TierLook asks how many blocks, from the first of Keys on, the tier can give.
	TierLook struct {
		Seq, Ticket uint64
		Keys        []Hash
	}
	// TierForget says that nobody waits for the answer of a TierLook any more.
	TierForget struct{ Seq, Ticket uint64 }
	// TierLoad asks for a copy of what Keys name into Blocks.
	TierLoad struct {
		Seq, Ticket uint64
		Keys        []Hash
		Blocks      []kv.BlockID
	}
	// TierStore gives blocks to the tier. They stay as they are until TierStored.
	TierStore struct {
		Seq, Ticket uint64
		Keys        []Hash
		Blocks      []kv.BlockID
	}
	// TierEnd says that a request looks for nothing and stores nothing more. Keys is all blocks that it
	// has used, wherever they came from.
	TierEnd struct {
		Seq  uint64
		Keys []Hash
	}
	// TierReset asks the tier to forget all blocks in its memory.
	TierReset struct{}
)

func (TierBegin) coreAction()  {}
func (TierLook) coreAction()   {}
func (TierForget) coreAction() {}
func (TierLoad) coreAction()   {}
func (TierStore) coreAction()  {}
func (TierEnd) coreAction()    {}
func (TierReset) coreAction()  {}

// Events of the tier.
type (
	// TierFound answers a TierLook: the first Blocks keys can be loaded, for now.
	TierFound struct {
		Ticket uint64
		Blocks int
	}
	// TierProgress says that the first Blocks keys of a TierLook have come, and more may: the request waits on.
	TierProgress struct {
		Ticket uint64
		Blocks int
	}
	// TierLoaded ends a TierLoad: the first Blocks blocks are whole, and nobody writes any of them
	// any more.
	TierLoaded struct {
		Ticket uint64
		Blocks int
	}
	// TierStored ends a TierStore, well or not: nobody reads its blocks any more.
	TierStored struct{ Ticket uint64 }
)

func (TierFound) coreEvent()    {}
func (TierProgress) coreEvent() {}
func (TierLoaded) coreEvent()   {}
func (TierStored) coreEvent()   {}

// tiered is what a request has to do with the tier.
type tiered struct {
	seq     uint64 // 0: the tier does not know the request
	look    uint64 // ticket of the answer that it waits for; 0: none
	until   time.Time
	have    int    // blocks in the pool when it was looked for the rest
	found   int    // blocks from the first on that are in the pool or the tier, as far as was known
	stored  int    // first blocks that the tier was given or need not be given
	loading uint64 // ticket
}

// copying is a load or store under way. It has references of its own on its blocks.
type copying struct {
	r      *request // of a load; nil for a store
	blocks []kv.BlockID
	from   int // place of the first of them in the request's blocks
}

// tierBook is the machine's side of the tier.
type tierBook struct {
	ticket  uint64
	looking []*request // in the order of their deadlines
	copies  map[uint64]*copying
	loading int // requests in state loading
}

func (m *Machine) nextTicket() uint64 {
	m.tier.ticket++
	return m.tier.ticket
}

// tierBegin makes a new request known to the tier and looks for its blocks at once, wherever it stands
// in the queue. KV that a peer hands over is not looked for.
func (m *Machine) tierBegin(now time.Time, r *request) {
	if !m.cfg.Tier {
		return
	}
	r.tier.seq = r.arrival
	m.do(TierBegin{ID: r.ID, Seq: r.tier.seq})
	if r.Params == nil || !r.Params.DoRemotePrefill {
		m.tierLook(now, r)
	}
}

// tierLook asks for the blocks behind those in the pool. The last token is always left to compute.
func (m *Machine) tierLook(now time.Time, r *request) {
	r.tier.found = 0
	limit := (len(r.tokens) - 1) / m.cfg.BlockSize
	if most := r.Tier.MaxLoad; most != nil {
		limit = min(limit, *most/m.cfg.BlockSize)
	}
	have := len(m.lookup(r))
	if r.tier.seq == 0 || have >= limit {
		return
	}
	keys := m.hashTo(r, limit)[have:]
	r.tier.look, r.tier.have, r.tier.found, r.tier.until = m.nextTicket(), have, have, now.Add(m.cfg.TierTimeout)
	m.tier.looking = append(m.tier.looking, r)
	m.stats.TierQueries += uint64(len(keys) * m.cfg.BlockSize)
	m.do(TierLook{Seq: r.tier.seq, Ticket: r.tier.look, Keys: slices.Clone(keys)})
}

// tierFound lets a request go on that waited for the answer.
func (m *Machine) tierFound(e TierFound) {
	i := slices.IndexFunc(m.tier.looking, func(r *request) bool { return r.tier.look == e.Ticket })
	if i < 0 {
		return // it has ended, or waited long enough
	}
	r := m.tier.looking[i]
	r.tier.found = r.tier.have + e.Blocks
	m.tierLooked(i)
}

// tierProgress renews a request's patience: it bounds silence. What has come is used if the rest does not.
func (m *Machine) tierProgress(now time.Time, e TierProgress) {
	i := slices.IndexFunc(m.tier.looking, func(r *request) bool { return r.tier.look == e.Ticket })
	if i < 0 {
		return
	}
	r := m.tier.looking[i]
	r.tier.found, r.tier.until = r.tier.have+e.Blocks, now.Add(m.cfg.TierTimeout)
	m.tier.looking = append(slices.Delete(m.tier.looking, i, i+1), r)
}

func (m *Machine) tierLooked(i int) {
	m.tier.looking[i].tier.look = 0
	m.tier.looking = slices.Delete(m.tier.looking, i, i+1)
}

// tierExpire ends the waits that are over: what has not come by now is computed.
func (m *Machine) tierExpire(now time.Time) {
	for len(m.tier.looking) > 0 && !now.Before(m.tier.looking[0].tier.until) {
		r := m.tier.looking[0]
		m.do(TierForget{Seq: r.tier.seq, Ticket: r.tier.look})
		m.stats.TierTimeouts++
		m.tierLooked(0)
	}
}

// tierRoom reports whether one more request may have blocks before it is in the batch.
func (m *Machine) tierRoom() bool {
	ready := 0
	for _, r := range m.waiting {
		if r.blocks != nil && r.state == waiting { // one that has just joined the batch is still listed
			ready++
		}
	}
	return len(m.running)+ready+m.tier.loading < m.cfg.MaxRunning
}

// admitTier gives a request blocks for the first n behind hits, which the tier is to fill, and for what
// its first step can compute behind them.
func (m *Machine) admitTier(now time.Time, r *request, hits []kv.BlockID, n int) bool {
	from, to := len(hits), len(hits)+n
	if !m.allocate(now, r, hits, min(m.blocksFor(len(r.tokens)), to+m.blocksFor(m.cfg.MaxBatchTokens)), 0) {
		return false
	}
	blocks := slices.Clone(r.blocks[from:to])
	m.pool.Share(blocks)
	r.tier.found, r.tier.loading = 0, m.nextTicket()
	m.tier.copies[r.tier.loading] = &copying{r: r, blocks: blocks, from: from}
	r.state = loading
	m.tier.loading++
	keys := slices.Clone(m.hashTo(r, to)[from:])
	m.do(TierLoad{Seq: r.tier.seq, Ticket: r.tier.loading, Keys: keys, Blocks: slices.Clone(blocks)})
	return true
}

// tierLoaded lets a request go on with what the tier has brought. The rest is computed.
func (m *Machine) tierLoaded(e TierLoaded) {
	c := m.tier.copies[e.Ticket]
	if c == nil || c.r == nil {
		return
	}
	delete(m.tier.copies, e.Ticket)
	e.Blocks = min(e.Blocks, len(c.blocks))
	if r := c.r; r.state == loading && r.tier.loading == e.Ticket {
		m.detach(r)
		r.tier.loading = 0
		r.computed = (c.from + e.Blocks) * m.cfg.BlockSize
		tokens := e.Blocks * m.cfg.BlockSize
		if r.usage.Preemptions == 0 {
			r.usage.Tier = tokens
		}
		m.stats.TierTokens += uint64(tokens)
		if short := len(c.blocks) - e.Blocks; short > 0 {
			m.stats.TierShort += uint64(short * m.cfg.BlockSize)
		}
		if !r.Tier.Whole {
			r.tier.stored = max(r.tier.stored, c.from+e.Blocks)
		}
		m.offer(r)
		m.tierStore(r)
		m.enqueue(r)
	}
	m.pool.Release(c.blocks)
}

// tierStore gives the tier the blocks of a request that have become full: those that were computed
// here, or came from a peer, or, if it wants the whole request, all.
func (m *Machine) tierStore(r *request) {
	if r.tier.seq == 0 || r.stale {
		return
	}
	full := r.computed / m.cfg.BlockSize
	if most := r.Tier.MaxStore; most != nil {
		full = min(full, *most/m.cfg.BlockSize)
	}
	from := r.tier.stored
	if from >= full {
		return
	}
	r.tier.stored = full
	blocks := slices.Clone(r.blocks[from:full])
	m.pool.Share(blocks)
	ticket := m.nextTicket()
	m.tier.copies[ticket] = &copying{blocks: blocks}
	keys := slices.Clone(m.hashTo(r, full)[from:])
	m.stats.TierStored += uint64(len(blocks) * m.cfg.BlockSize)
	m.do(TierStore{Seq: r.tier.seq, Ticket: ticket, Keys: keys, Blocks: slices.Clone(blocks)})
}

// tierStored gives the blocks of a store back.
func (m *Machine) tierStored(e TierStored) {
	if c := m.tier.copies[e.Ticket]; c != nil && c.r == nil {
		delete(m.tier.copies, e.Ticket)
		m.pool.Release(c.blocks)
	}
}

// tierEnd tells the tier that a request is over.
func (m *Machine) tierEnd(r *request) {
	if r.tier.seq == 0 {
		return
	}
	if i := slices.Index(m.tier.looking, r); i >= 0 {
		m.tierLooked(i)
	}
	m.do(TierEnd{Seq: r.tier.seq, Keys: slices.Clip(r.hashes[:min(len(r.hashes), r.computed/m.cfg.BlockSize)])})
	r.tier.seq = 0
}

// tierDeadline is the earliest end of a wait for the tier's answer.
func (m *Machine) tierDeadline() (time.Time, bool) {
	if len(m.tier.looking) == 0 {
		return time.Time{}, false
	}
	return m.tier.looking[0].tier.until, true
}
