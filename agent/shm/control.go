package shm

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/grants"
	"github.com/kvferry/kvferry/agent/internal/memory"
)

// maxControl bounds a peer's control page: words for a million transfers and grants.
const maxControl = 8 << 20

// control is this agent's control page: words that it alone writes. A word's value never comes
// back: a slot that is used again goes on counting.
type control struct {
	seg   *memory.Segment
	words []atomic.Uint64

	mu struct {
		sync.Mutex
		next int
		free []uint32
	}
}

func newControl(words int) (*control, error) {
	seg, err := mapOwn(8 * min(words, maxControl/8))
	if err != nil {
		return nil, err
	}
	data := seg.Bytes()
	p := (*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(data)))
	return &control{seg: seg, words: unsafe.Slice(p, len(data)/8)}, nil
}

// begin takes a slot and gives its word's value, which stands until end.
func (c *control) begin() (slot uint32, word uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := len(c.mu.free); k > 0 {
		slot = c.mu.free[k-1]
		c.mu.free = c.mu.free[:k-1]
	} else if c.mu.next < len(c.words) {
		slot = uint32(c.mu.next)
		c.mu.next++
	} else {
		return 0, 0, false
	}
	return slot, c.words[slot].Add(1), true
}

// end changes the word: from now on nobody who looks at it counts a copy as done.
func (c *control) end(slot uint32) { c.words[slot].Add(1) }

// put gives an ended slot back.
func (c *control) put(slot uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.free = append(c.mu.free, slot)
}

// watch is a word in a peer's control page, and the value it must keep.
type watch struct {
	page *mapping
	word *atomic.Uint64
	want uint64
}

// watchWord finds a word in a peer's control page. The caller holds the page while it watches.
func watchWord(page *mapping, slot uint32, want uint64) (watch, bool) {
	if uint64(slot) >= uint64(len(page.data))/8 {
		return watch{}, false
	}
	p := unsafe.Add(unsafe.Pointer(unsafe.SliceData(page.data)), 8*uintptr(slot))
	return watch{page: page, word: (*atomic.Uint64)(p), want: want}, true
}

// holds reports whether the word stands.
func (w watch) holds() bool { return w.word.Load() == w.want }

// held reports whether the word still stands after a copy. fence is a variable of the caller's
// own: adding to it keeps the copy's loads before that of the word on machines that would reorder
// them.
func (w watch) held(fence *atomic.Uint32) bool {
	fence.Add(1)
	return w.holds()
}

// leases are the words of read grants that some peer has asked for. Any goroutine may use them.
type leases struct {
	control *control
	mu      struct {
		sync.Mutex
		open map[agent.GrantID]lease
	}
}

type lease struct {
	grant *grants.Grant
	slot  uint32
	word  uint64
}

// word gives the word of a live read grant; false if it was revoked or there are too many.
func (l *leases) word(id agent.GrantID, g *grants.Grant) (slot uint32, word uint64, ok bool) {
	if !g.Enter() {
		return 0, 0, false
	}
	defer g.Leave()
	l.mu.Lock()
	defer l.mu.Unlock()
	e, known := l.mu.open[id]
	if !known {
		if e.slot, e.word, ok = l.control.begin(); !ok {
			return 0, 0, false
		}
		e.grant = g
		l.mu.open[id] = e
	}
	return e.slot, e.word, true
}

// revoked ends the word of a grant whose gate is shut.
func (l *leases) revoked(id agent.GrantID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e, known := l.mu.open[id]; known {
		l.end(id, e)
	}
}

// sweep ends the words of all grants whose gate is shut.
func (l *leases) sweep() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, e := range l.mu.open {
		if e.grant.Enter() {
			e.grant.Leave()
		} else {
			l.end(id, e)
		}
	}
}

// end is called with mu held.
func (l *leases) end(id agent.GrantID, e lease) {
	l.control.end(e.slot)
	l.control.put(e.slot)
	delete(l.mu.open, id)
}

// mapOwn maps zeroed memory that peers may map too, but never write.
func mapOwn(length int) (*memory.Segment, error) {
	seg, err := memory.Map(length)
	if err != nil {
		return nil, err
	}
	_, err = unix.FcntlInt(uintptr(seg.FD()), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	if err != nil {
		_ = seg.Unmap()
		return nil, err
	}
	return seg, nil
}
