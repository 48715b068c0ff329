package lists

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/memory"
	"github.com/kvferry/kvferry/kv"
)

// MaxDescBytes bounds one descriptor: no KV block comes near it, and sums of many cannot overflow.
const MaxDescBytes = 1 << 40

// List is a prepared list: 8 bytes per descriptor when all have one length, which is the rule.
type List struct {
	Owner agent.PeerID

	addrs  []uint64
	length uint64   // of every descriptor, unless lens is set
	lens   []uint64 // nil when all are equal

	ranges  []*memory.Range // registered memory that it lies in; nil for a peer's list
	inRange []uint32        // per descriptor, index into ranges; nil when there is but one
}

// Build checks descriptors. mem is this agent's memory for its own list and nil for a peer's.
func Build(owner agent.PeerID, descs []kv.Descriptor, mem *memory.Table, limit int) (*List, error) {
	if len(descs) == 0 {
		return nil, fmt.Errorf("descriptor list is empty")
	}
	if len(descs) > limit {
		return nil, &agent.LimitError{What: "descriptors in a list", Got: len(descs), Limit: limit}
	}
	l := &List{Owner: owner, addrs: make([]uint64, len(descs)), length: descs[0].Length}
	for i, d := range descs {
		if d.Length == 0 || d.Length > MaxDescBytes || d.Addr == 0 || d.Addr > math.MaxUint64-d.Length {
			return nil, fmt.Errorf("descriptor %d of %d (%d bytes at %#x) is not a range",
				i, len(descs), d.Length, d.Addr)
		}
		l.addrs[i] = d.Addr
		if l.lens == nil && d.Length != l.length {
			l.lens = slices.Repeat([]uint64{l.length}, len(descs))
		}
		if l.lens != nil {
			l.lens[i] = d.Length
		}
	}
	if mem == nil {
		return l, nil
	}
	return l, l.locate(mem)
}

// locate finds the registered range of each descriptor.
func (l *List) locate(mem *memory.Table) error {
	index := map[*memory.Range]uint32{}
	in := make([]uint32, len(l.addrs))
	var last *memory.Range
	for i, addr := range l.addrs {
		n := l.Len(i)
		if last == nil || addr < last.Addr || addr >= last.End || n > last.End-addr {
			last = mem.Find(addr, n)
		}
		if last == nil {
			return fmt.Errorf("descriptor %d of %d (%d bytes at %#x) does not lie in registered memory",
				i, len(l.addrs), n, addr)
		}
		at, known := index[last]
		if !known {
			at = uint32(len(l.ranges))
			index[last] = at
			l.ranges = append(l.ranges, last)
		}
		in[i] = at
	}
	if len(l.ranges) > 1 {
		l.inRange = in
	}
	return nil
}

// Size is the number of descriptors.
func (l *List) Size() int { return len(l.addrs) }

// Addr is the address of descriptor i.
func (l *List) Addr(i int) uint64 { return l.addrs[i] }

// Len is the length of descriptor i in bytes.
func (l *List) Len(i int) uint64 {
	if l.lens == nil {
		return l.length
	}
	return l.lens[i]
}

// Ranges are the registered ranges that the descriptors at idx lie in, each once.
func (l *List) Ranges(idx []uint32) []*memory.Range {
	if l.inRange == nil {
		return l.ranges
	}
	seen := make([]bool, len(l.ranges))
	var out []*memory.Range
	for _, i := range idx {
		if at := l.inRange[i]; !seen[at] {
			seen[at] = true
			out = append(out, l.ranges[at])
		}
	}
	return out
}

// Table names lists.
type Table struct {
	limit int
	mu    struct {
		sync.RWMutex
		next  agent.ListID
		lists map[agent.ListID]*List
	}
}

// NewTable makes a table of at most limit lists.
func NewTable(limit int) *Table {
	t := &Table{limit: limit}
	t.mu.lists = map[agent.ListID]*List{}
	return t
}

// Insert names a list.
func (t *Table) Insert(l *List) (agent.ListID, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.mu.lists); n >= t.limit {
		return 0, &agent.LimitError{What: "prepared lists", Got: n + 1, Limit: t.limit}
	}
	t.mu.next++
	t.mu.lists[t.mu.next] = l
	return t.mu.next, nil
}

// Get is a list by its name, or nil.
func (t *Table) Get(id agent.ListID) *List {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.mu.lists[id]
}

// Remove forgets a list.
func (t *Table) Remove(id agent.ListID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.lists, id)
}

// RemoveOwner forgets all lists of one peer.
func (t *Table) RemoveOwner(owner agent.PeerID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, l := range t.mu.lists {
		if l.Owner == owner {
			delete(t.mu.lists, id)
		}
	}
}
