package memory

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/agent"
)

// Table is the registered memory of one agent: ranges that never overlap.
type Table struct {
	limit int
	mu    struct {
		sync.RWMutex
		ranges []*Range // by address
	}
}

// Range is one registered range [Addr, End).
type Range struct {
	Addr, End uint64
	Owner     string

	table *Table
	// Guarded by table.mu.
	holds   int
	retired bool
	gone    bool
	idle    chan struct{} // made by a waiter, closed when retired and no longer held
}

// NewTable makes a table of at most limit ranges.
func NewTable(limit int) *Table { return &Table{limit: limit} }

// Add registers a range. It may not be empty, leave the address space or overlap another.
func (t *Table) Add(addr uint64, length int, owner string) (*Range, error) {
	if length <= 0 || addr == 0 || addr+uint64(length) < addr {
		return nil, fmt.Errorf("memory of %s: %d bytes at %#x is not a range", owner, length, addr)
	}
	r := &Range{Addr: addr, End: addr + uint64(length), Owner: owner, table: t}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.mu.ranges); n >= t.limit {
		return nil, &agent.LimitError{What: "registered memory ranges", Got: n + 1, Limit: t.limit}
	}
	i := t.after(addr)
	if i > 0 && t.mu.ranges[i-1].End > addr {
		return nil, overlap(r, t.mu.ranges[i-1])
	}
	if i < len(t.mu.ranges) && t.mu.ranges[i].Addr < r.End {
		return nil, overlap(r, t.mu.ranges[i])
	}
	t.mu.ranges = slices.Insert(t.mu.ranges, i, r)
	return r, nil
}

func overlap(r, other *Range) error {
	return fmt.Errorf("memory of %s at [%#x, %#x) overlaps that of %s at [%#x, %#x), which is registered",
		r.Owner, r.Addr, r.End, other.Owner, other.Addr, other.End)
}

// after is the index of the first range that begins behind addr. The caller holds mu.
func (t *Table) after(addr uint64) int {
	i, _ := slices.BinarySearchFunc(t.mu.ranges, addr, func(r *Range, a uint64) int {
		if r.Addr <= a {
			return -1
		}
		return cmp.Compare(r.Addr, a)
	})
	return i
}

// Find is the range in use that contains all of [addr, addr+length), or nil.
func (t *Table) Find(addr, length uint64) *Range {
	t.mu.RLock()
	defer t.mu.RUnlock()
	i := t.after(addr)
	if i == 0 {
		return nil
	}
	r := t.mu.ranges[i-1]
	if r.retired || addr >= r.End || length > r.End-addr {
		return nil
	}
	return r
}

// Hold marks ranges as in use by one transfer, all or none: it returns the first that is retired.
func (t *Table) Hold(ranges []*Range) (retired *Range) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range ranges {
		if r.retired {
			return r
		}
	}
	for _, r := range ranges {
		r.holds++
	}
	return nil
}

// Unhold ends what Hold began.
func (t *Table) Unhold(ranges []*Range) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range ranges {
		r.holds--
		r.settle()
	}
}

// settle wakes waiters when the last transfer has let go. The caller holds table.mu.
func (r *Range) settle() {
	if r.retired && r.holds == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// Retire refuses new holds and look-ups from now on. The range stays in the table, so that nothing
// else can be registered there, until Wait has succeeded.
func (r *Range) Retire() {
	r.table.mu.Lock()
	defer r.table.mu.Unlock()
	r.retired = true
}

// Wait returns when a retired range is no longer held, and removes it from the table; or with ctx's
// error. It may be called again, and by several at once.
func (r *Range) Wait(ctx context.Context) error {
	for {
		idle := r.tryRemove()
		if idle == nil {
			return nil
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return fmt.Errorf("memory of %s is still used by a transfer: %w", r.Owner, ctx.Err())
		}
	}
}

func (r *Range) tryRemove() <-chan struct{} {
	t := r.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.gone {
		return nil
	}
	if r.holds > 0 {
		if r.idle == nil {
			r.idle = make(chan struct{})
		}
		return r.idle
	}
	r.gone = true
	i := t.after(r.Addr) - 1
	t.mu.ranges = slices.Delete(t.mu.ranges, i, i+1)
	return nil
}
