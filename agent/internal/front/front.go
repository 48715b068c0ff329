package front

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
	"github.com/kvferry/kvferry/agent/internal/grants"
	"github.com/kvferry/kvferry/agent/internal/lists"
	"github.com/kvferry/kvferry/agent/internal/memory"
	"github.com/kvferry/kvferry/kv"
)

// maxAlloc bounds one Alloc: more than any machine's memory, less than what would overflow sums.
const maxAlloc = 1 << 46

// Front is one agent's tables.
type Front struct {
	Limits agent.Limits
	Memory *memory.Table
	Lists  *lists.Table
	Grants *grants.Table
	Events *events.Queue

	mu struct {
		sync.Mutex
		closed   bool
		segments map[*allocated]struct{} // mapped, not yet freed
	}
}

// New makes the tables. rand gives grant ids.
func New(limits agent.Limits, rand io.Reader) *Front {
	limits = limits.WithDefaults()
	f := &Front{
		Limits: limits,
		Memory: memory.NewTable(limits.Registrations),
		Lists:  lists.NewTable(limits.Lists),
		Grants: grants.NewTable(limits.Grants, rand),
		Events: events.New(limits),
	}
	f.mu.segments = map[*allocated]struct{}{}
	return f
}

// Closed reports whether BeginClose was called.
func (f *Front) Closed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.closed
}

// BeginClose makes every method fail from now on and ends all grants. It reports whether this call
// was the first.
func (f *Front) BeginClose() bool {
	f.mu.Lock()
	first := !f.mu.closed
	f.mu.closed = true
	f.mu.Unlock()
	f.Grants.RevokeAll()
	return first
}

// FinishClose closes the events and unmaps what Alloc gave. The backend has ended every transfer.
func (f *Front) FinishClose() error {
	f.Events.Close()
	f.mu.Lock()
	segments := f.mu.segments
	f.mu.segments = nil
	f.mu.Unlock()
	var first error
	for a := range segments {
		if err := a.seg.Unmap(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// Alloc is Agent.Alloc.
func (f *Front) Alloc(length int) (agent.Memory, error) {
	if length <= 0 || length > maxAlloc {
		return nil, &agent.LimitError{What: "bytes of one allocation", Got: length, Limit: maxAlloc}
	}
	if f.Closed() {
		return nil, agent.ErrClosed
	}
	seg, err := memory.Map(length)
	if err != nil {
		return nil, err
	}
	r, err := f.Memory.Add(seg.Addr(), length, "the agent")
	if err != nil {
		_ = seg.Unmap()
		return nil, err
	}
	a := &allocated{registered: registered{front: f, r: r}, seg: seg}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.closed {
		_ = seg.Unmap()
		return nil, agent.ErrClosed
	}
	f.mu.segments[a] = struct{}{}
	return a, nil
}

// Register is Agent.Register for backends that reach nothing but host memory.
func (f *Front) Register(addr uint64, length int, kind agent.MemoryKind, owner string) (agent.Registration, error) {
	if kind != agent.DRAM {
		return nil, fmt.Errorf("memory of %s is not host memory, which is all that this agent reaches", owner)
	}
	if f.Closed() {
		return nil, agent.ErrClosed
	}
	r, err := f.Memory.Add(addr, length, owner)
	if err != nil {
		return nil, err
	}
	return &registered{front: f, r: r}, nil
}

// BuildList checks a list for owner; the backend inserts it while it knows that the owner is still
// there.
func (f *Front) BuildList(owner agent.PeerID, descs []kv.Descriptor) (*lists.List, error) {
	if f.Closed() {
		return nil, agent.ErrClosed
	}
	if owner == agent.Local {
		return lists.Build(owner, descs, f.Memory, f.Limits.ListDescs)
	}
	return lists.Build(owner, descs, nil, f.Limits.ListDescs)
}

// Grant is Agent.Grant.
func (f *Front) Grant(spec agent.GrantSpec) (agent.GrantID, error) {
	if f.Closed() {
		return agent.GrantID{}, agent.ErrClosed
	}
	g, err := grants.New(spec, f.Limits.GrantRanges)
	if err != nil {
		return agent.GrantID{}, err
	}
	id, err := f.Grants.Add(g)
	if err != nil {
		return agent.GrantID{}, err
	}
	// The memory is checked after the grant is in the table, and is retired before the table is
	// searched for grants on it: so one of the two sees the other.
	for i, d := range spec.Ranges {
		if f.Memory.Find(d.Addr, d.Length) == nil {
			f.Grants.Revoke(id)
			return agent.GrantID{}, fmt.Errorf("grant for %s: range %d (%d bytes at %#x) does not lie in registered memory",
				spec.Peer, i, d.Length, d.Addr)
		}
	}
	if f.Closed() {
		f.Grants.Revoke(id)
		return agent.GrantID{}, agent.ErrClosed
	}
	return id, nil
}

// registered is a Registration.
type registered struct {
	front *Front
	r     *memory.Range
}

func (r *registered) Deregister(ctx context.Context) error {
	r.r.Retire()
	r.front.Grants.RevokeTouching(r.r.Addr, r.r.End)
	return r.r.Wait(ctx)
}

// allocated is a Memory.
type allocated struct {
	registered
	seg *memory.Segment
}

func (a *allocated) Bytes() []byte { return a.seg.Bytes() }
func (a *allocated) Addr() uint64  { return a.seg.Addr() }

func (a *allocated) Free(ctx context.Context) error {
	if err := a.Deregister(ctx); err != nil {
		return err
	}
	a.front.mu.Lock()
	delete(a.front.mu.segments, a)
	a.front.mu.Unlock()
	return a.seg.Unmap()
}
