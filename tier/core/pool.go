package core

import "container/heap"

type blockState uint8

const (
	writing blockState = iota
	ready
	gone // no longer in the pool's index; its slot may still be held
)

// block is the content of one slot, from its reservation until the slot is free again.
type block struct {
	key    Key
	slot   Slot
	state  blockState
	pins   int
	rank   uint64
	sum    Sum
	at     int // place in the heap of victims, -1 for none
	parked []parked
}

// Pool is the table of blocks. Ranks are given by use; the evictable block with the lowest rank goes
// first.
type Pool struct {
	index    map[Key]*block
	free     []Slot
	victims  victims
	spared   []*block // out of victims until restore, as they were to be kept
	lastRank uint64
	held     int // blocks that left the index while written or pinned, in quarantine or not
	evicted  uint64
}

func newPool(slots int) *Pool {
	p := &Pool{index: map[Key]*block{}, free: make([]Slot, slots)}
	for i := range p.free {
		p.free[i] = Slot(slots - 1 - i) // slot 0 is taken first
	}
	return p
}

// reserve gives n blocks that are being written to keys that the pool does not have, evicting what
// it must but nothing that is to be kept. It gives all or none, and then evicts nothing. Calls with the same
// keep may follow; restore comes after the last.
func (p *Pool) reserve(keys []Key, keep map[Key]struct{}) []*block {
	need := len(keys) - len(p.free)
	if need > 0 && !p.evict(need, keep) {
		return nil
	}
	out := make([]*block, len(keys))
	for i, k := range keys {
		last := len(p.free) - 1
		out[i] = &block{key: k, slot: p.free[last], rank: p.nextRank(), at: -1}
		p.free = p.free[:last]
		p.index[k] = out[i]
	}
	for i := len(out) - 1; i >= 0; i-- { // the head of a prefix ends most recent
		out[i].rank = p.nextRank()
	}
	return out
}

// evict passes each block that is to be kept once, however many calls follow each other: with a memory full of
// them, passing them for each slot anew would take minutes.
func (p *Pool) evict(n int, keep map[Key]struct{}) bool {
	var chosen []*block
	for len(chosen) < n && len(p.victims) > 0 {
		b := heap.Pop(&p.victims).(*block)
		if _, ok := keep[b.key]; ok {
			p.spared = append(p.spared, b)
		} else {
			chosen = append(chosen, b)
		}
	}
	if len(chosen) < n {
		for _, b := range chosen {
			heap.Push(&p.victims, b)
		}
		return false
	}
	for _, b := range chosen {
		p.drop(b)
		p.evicted++
	}
	return true
}

// restore makes what was kept evictable again, as far as nobody uses it.
func (p *Pool) restore() {
	for _, b := range p.spared {
		p.settle(b)
	}
	p.spared = nil
}

// commit makes a written block ready.
func (p *Pool) commit(b *block) {
	if b.state == gone { // dropped by a reset meanwhile
		p.release(b)
		return
	}
	b.state = ready
	p.settle(b)
}

// discard forgets a block that was not written well. With hold its slot stays taken until release.
func (p *Pool) discard(b *block, hold bool) {
	if b.state != gone {
		delete(p.index, b.key)
		b.state = gone
		p.held++
	}
	if !hold {
		p.release(b)
	}
}

// release frees the slot of a block that has left the index.
func (p *Pool) release(b *block) {
	p.held--
	p.free = append(p.free, b.slot)
}

// drop takes an evictable block out.
func (p *Pool) drop(b *block) {
	delete(p.index, b.key)
	b.state = gone
	p.free = append(p.free, b.slot)
}

// forget takes a ready block out; its slot is free once nobody reads it.
func (p *Pool) forget(b *block) {
	if b.pins > 0 {
		delete(p.index, b.key)
		b.state = gone
		p.held++
		return
	}
	heap.Remove(&p.victims, b.at)
	p.drop(b)
}

func (p *Pool) pin(b *block) {
	b.pins++
	if b.at >= 0 {
		heap.Remove(&p.victims, b.at)
	}
}

func (p *Pool) unpin(b *block) {
	b.pins--
	if b.pins > 0 {
		return
	}
	if b.state == gone {
		p.release(b)
		return
	}
	p.settle(b)
}

// settle makes a ready block evictable when nobody uses it.
func (p *Pool) settle(b *block) {
	if b.state == ready && b.pins == 0 && b.at < 0 {
		heap.Push(&p.victims, b)
	}
}

// touch notes the use of keys, given in prefix order.
func (p *Pool) touch(keys []Key) {
	for i := len(keys) - 1; i >= 0; i-- {
		if b := p.index[keys[i]]; b != nil {
			b.rank = p.nextRank()
			if b.at >= 0 {
				heap.Fix(&p.victims, b.at)
			}
		}
	}
}

// reset empties the index. Blocks in use keep their slots until their users are done.
func (p *Pool) reset() {
	for k, b := range p.index {
		delete(p.index, k)
		inUse := b.state == writing || b.pins > 0
		b.state = gone
		if inUse {
			p.held++
		} else {
			p.free = append(p.free, b.slot)
		}
	}
	p.victims = nil
}

func (p *Pool) nextRank() uint64 {
	p.lastRank++
	return p.lastRank
}

// victims is a heap of evictable blocks, least recently used first.
type victims []*block

func (v victims) Len() int           { return len(v) }
func (v victims) Less(i, j int) bool { return v[i].rank < v[j].rank }

func (v victims) Swap(i, j int) {
	v[i], v[j] = v[j], v[i]
	v[i].at, v[j].at = i, j
}

func (v *victims) Push(x any) {
	b := x.(*block)
	b.at = len(*v)
	*v = append(*v, b)
}

func (v *victims) Pop() any {
	old := *v
	b := old[len(old)-1]
	old[len(old)-1] = nil
	*v = old[:len(old)-1]
	b.at = -1
	return b
}
