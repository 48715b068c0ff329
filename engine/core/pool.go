package core

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
)

// Pool hands out the blocks of one KV cache and remembers what full blocks hold.
//
//	        Alloc, Share                 Release (last reference)
//	free ─────────────────> referenced ─────────────────────────> free
//	 least recently used first                 with contents: at the end; without: at the front
//
// A block is free when nobody refers to it. A free block that was given a Hash by Cache can be
// found and shared until Alloc hands it out as a new one. All blocks are usable, block 0 included.
// A Pool belongs to its Machine's owner.
type Pool struct {
	blocks     []block
	head, tail int // the free list; none = empty
	free       int
	cache      map[Hash]kv.BlockID
	caching    bool
}

type block struct {
	refs       int
	hash       Hash
	cached     bool // the cache maps hash to this block
	prev, next int  // in the free list; meaningless while referenced
}

const none = -1

// NewPool makes a pool of n free blocks. Without caching, Cache does nothing.
func NewPool(n int, caching bool) *Pool {
	p := &Pool{blocks: make([]block, n), head: none, tail: none, cache: map[Hash]kv.BlockID{}, caching: caching}
	for i := range n {
		p.pushBack(i)
	}
	return p
}

// Total is the number of blocks.
func (p *Pool) Total() int { return len(p.blocks) }

// Free is the number of blocks that nobody refers to.
func (p *Pool) Free() int { return p.free }

// Cached is the number of blocks that Find can find.
func (p *Pool) Cached() int { return len(p.cache) }

// Find gives the longest run of blocks, from the first hash on, whose contents are known. It
// changes nothing: only Take protects them.
func (p *Pool) Find(hashes []Hash) []kv.BlockID {
	var found []kv.BlockID
	for _, h := range hashes {
		id, ok := p.cache[h]
		if !ok {
			break
		}
		found = append(found, id)
	}
	return found
}

// Take refers once more to each of shared and once to n other free blocks, which it returns behind
// shared as one list of its own. If there are not enough, it changes nothing.
func (p *Pool) Take(shared []kv.BlockID, n int) ([]kv.BlockID, bool) {
	need := n
	for _, id := range shared {
		if p.blocks[id].refs == 0 {
			need++
		}
	}
	if need > p.free {
		return nil, false
	}
	out := make([]kv.BlockID, 0, len(shared)+n)
	p.Share(shared)
	out = append(out, shared...)
	for range n {
		i := p.head
		b := &p.blocks[i]
		p.unlink(i)
		p.forget(b)
		b.refs = 1
		out = append(out, kv.BlockID(i))
	}
	return out, true
}

// Share refers once more to each block. A block that is free must be one that Find gave.
func (p *Pool) Share(ids []kv.BlockID) {
	for _, id := range ids {
		b := &p.blocks[id]
		if b.refs == 0 {
			if !b.cached {
				panic(fmt.Sprintf("engine core: block %d is shared but free and without contents", id))
			}
			p.unlink(int(id))
		}
		b.refs++
	}
}

// Release drops one reference of each block. What becomes free is ordered so that the end of a
// list of contents is reused before its beginning, which more prompts can share.
func (p *Pool) Release(ids []kv.BlockID) {
	for i := len(ids) - 1; i >= 0; i-- {
		id := int(ids[i])
		b := &p.blocks[id]
		if b.refs == 0 {
			panic(fmt.Sprintf("engine core: block %d is released but free", id))
		}
		if b.refs--; b.refs > 0 {
			continue
		}
		if b.cached {
			p.pushBack(id)
		} else {
			p.pushFront(id)
		}
	}
}

// Cache tells what a referenced, full block holds, which nobody writes any more. If another block
// is known to hold the same, that one stays the known one.
func (p *Pool) Cache(id kv.BlockID, h Hash) {
	if !p.caching {
		return
	}
	b := &p.blocks[id]
	if b.refs == 0 {
		panic(fmt.Sprintf("engine core: block %d is given contents but free", id))
	}
	if _, known := p.cache[h]; known || b.cached {
		return
	}
	p.cache[h] = id
	b.hash, b.cached = h, true
}

// Forget makes all contents unknown and tells of how many blocks they were. Blocks in use stay so.
func (p *Pool) Forget() int {
	n := len(p.cache)
	clear(p.cache)
	for i := range p.blocks {
		p.blocks[i].cached = false
	}
	return n
}

func (p *Pool) forget(b *block) {
	if b.cached {
		delete(p.cache, b.hash)
		b.cached = false
	}
}

func (p *Pool) pushBack(i int) {
	b := &p.blocks[i]
	b.prev, b.next = p.tail, none
	if p.tail == none {
		p.head = i
	} else {
		p.blocks[p.tail].next = i
	}
	p.tail = i
	p.free++
}

func (p *Pool) pushFront(i int) {
	b := &p.blocks[i]
	b.prev, b.next = none, p.head
	if p.head == none {
		p.tail = i
	} else {
		p.blocks[p.head].prev = i
	}
	p.head = i
	p.free++
}

func (p *Pool) unlink(i int) {
	b := &p.blocks[i]
	if b.prev == none {
		p.head = b.next
	} else {
		p.blocks[b.prev].next = b.next
	}
	if b.next == none {
		p.tail = b.prev
	} else {
		p.blocks[b.next].prev = b.prev
	}
	p.free--
}

// Check reports the first broken invariant. refs is how many references each block should have;
// blocks that it does not name should be free. It is for tests: it visits every block.
func (p *Pool) Check(refs map[kv.BlockID]int) error {
	for i := range p.blocks {
		if got, want := p.blocks[i].refs, refs[kv.BlockID(i)]; got != want {
			return fmt.Errorf("block %d has %d references, its users are %d", i, got, want)
		}
	}
	listed, last := 0, none
	for i := p.head; i != none; i = p.blocks[i].next {
		b := &p.blocks[i]
		switch {
		case b.refs != 0:
			return fmt.Errorf("block %d is in the free list with %d references", i, b.refs)
		case b.prev != last:
			return fmt.Errorf("block %d follows %d in the free list but points back to %d", i, last, b.prev)
		}
		last = i
		if listed++; listed > len(p.blocks) {
			return fmt.Errorf("the free list is a circle")
		}
	}
	unreferenced := 0
	for i := range p.blocks {
		if p.blocks[i].refs == 0 {
			unreferenced++
		}
	}
	if listed != unreferenced || listed != p.free || last != p.tail {
		return fmt.Errorf("%d blocks are unreferenced, %d in the free list, %d counted; the list ends at %d, not %d",
			unreferenced, listed, p.free, last, p.tail)
	}
	for h, id := range p.cache {
		if b := &p.blocks[id]; !b.cached || b.hash != h {
			return fmt.Errorf("the prefix cache names block %d, which holds something else", id)
		}
	}
	known := 0
	for i := range p.blocks {
		if p.blocks[i].cached {
			known++
		}
	}
	if known != len(p.cache) {
		return fmt.Errorf("%d blocks say that they are cached, the cache names %d", known, len(p.cache))
	}
	return nil
}
