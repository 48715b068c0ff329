package shm

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/memory"
)

// maxAlloc bounds one Alloc: more than any machine's memory, less than what would overflow sums.
const maxAlloc = 1 << 46

// segment is memory of this agent that peers may map.
type segment struct {
	id        uint32
	addr, end uint64
	seg       *memory.Segment

	mu struct {
		sync.Mutex
		freed bool
	}
}

// dup is a descriptor of the memory for sending it, or an error if it is freed: the number of a
// closed one may already stand for something else.
func (s *segment) dup() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.freed {
		return -1, unix.EBADF
	}
	return unix.FcntlInt(uintptr(s.seg.FD()), unix.F_DUPFD_CLOEXEC, 0)
}

// gone reports whether the memory is freed.
func (s *segment) gone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.freed
}

func closeFD(fd int) { _ = unix.Close(fd) }

func (s *segment) free() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.freed = true
	return s.seg.Unmap()
}

// pool is the segments that Alloc gave. Any goroutine may use it.
type pool struct {
	mu struct {
		sync.RWMutex
		lastID uint32
		closed bool
		sorted []*segment // by address
	}
}

// make maps a segment; it is not in the pool unless added.
func (p *pool) make(length int) (*segment, error) {
	seg, err := mapOwn(length)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.lastID++
	return &segment{id: p.mu.lastID, seg: seg, addr: seg.Addr(), end: seg.Addr() + uint64(length)}, nil
}

func (p *pool) add(s *segment) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return agent.ErrClosed
	}
	p.mu.sorted = slices.Insert(p.mu.sorted, p.after(s.addr), s)
	return nil
}

func (p *pool) remove(s *segment) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.mu.sorted, s); i >= 0 {
		p.mu.sorted = slices.Delete(p.mu.sorted, i, i+1)
	}
}

// after is the index of the first segment that begins behind addr. The caller holds mu.
func (p *pool) after(addr uint64) int {
	i, found := slices.BinarySearchFunc(p.mu.sorted, addr, func(s *segment, a uint64) int { return cmp.Compare(s.addr, a) })
	if found {
		i++
	}
	return i
}

// find is the segment that contains addr, or nil.
func (p *pool) find(addr uint64) *segment {
	p.mu.RLock()
	defer p.mu.RUnlock()
	i := p.after(addr)
	if i == 0 || addr >= p.mu.sorted[i-1].end {
		return nil
	}
	return p.mu.sorted[i-1]
}

// close frees all. It returns the first error.
func (p *pool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.closed = true
	var first error
	for _, s := range p.mu.sorted {
		if err := s.free(); err != nil && first == nil {
			first = err
		}
	}
	p.mu.sorted = nil
	return first
}

// Alloc is Agent.Alloc.
func (a *Agent) Alloc(length int) (agent.Memory, error) {
	if length <= 0 || length > maxAlloc {
		return nil, &agent.LimitError{What: "bytes of one allocation", Got: length, Limit: maxAlloc}
	}
	if a.front.Closed() {
		return nil, agent.ErrClosed
	}
	s, err := a.pool.make(length)
	if err != nil {
		return nil, err
	}
	r, err := a.front.Memory.Add(s.addr, length, "the agent")
	if err != nil {
		_ = s.free()
		return nil, err
	}
	if err := a.pool.add(s); err != nil {
		_ = s.free()
		return nil, err
	}
	return &allocated{registered: registered{a: a, r: r}, s: s}, nil
}

// Register is Agent.Register.
func (a *Agent) Register(addr uint64, length int, kind agent.MemoryKind, owner string) (agent.Registration, error) {
	if kind != agent.DRAM {
		return nil, fmt.Errorf("memory of %s is not host memory, which is all that this agent reaches", owner)
	}
	if a.front.Closed() {
		return nil, agent.ErrClosed
	}
	r, err := a.front.Memory.Add(addr, length, owner)
	if err != nil {
		return nil, err
	}
	a.borrowed.Store(true)
	return &registered{a: a, r: r}, nil
}

// registered is a Registration.
type registered struct {
	a *Agent
	r *memory.Range
}

func (r *registered) Deregister(ctx context.Context) error {
	r.r.Retire()
	r.a.front.Grants.RevokeTouching(r.r.Addr, r.r.End)
	r.a.leases.sweep()
	return r.r.Wait(ctx)
}

// allocated is a Memory.
type allocated struct {
	registered
	s *segment
}

func (m *allocated) Bytes() []byte { return m.s.seg.Bytes() }
func (m *allocated) Addr() uint64  { return m.s.addr }

func (m *allocated) Free(ctx context.Context) error {
	if err := m.Deregister(ctx); err != nil {
		return err
	}
	m.a.pool.remove(m.s)
	err := m.s.free()
	m.a.forget(m.s)
	return err
}
