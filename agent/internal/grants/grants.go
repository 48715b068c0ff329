package grants

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/gate"
)

// ErrNone tells a peer that it has no such permission. It is the same for an id that never was, was
// revoked, or is another peer's, so that ids cannot be probed.
var ErrNone = errors.New("no live grant for this")

type span struct{ lo, hi uint64 } // [lo, hi)

// Grant is one live or revoked permission. Its ranges never change.
type Grant struct {
	gate.Gate // shut by Revoke

	peer   agent.Name
	access agent.Access
	spans  []span // sorted, disjoint, not even adjacent
}

// New normalises ranges into a grant. limit bounds their number.
func New(spec agent.GrantSpec, limit int) (*Grant, error) {
	switch {
	case spec.Peer == "":
		return nil, errors.New("grant names no peer")
	case spec.Access > agent.AccessRead:
		return nil, fmt.Errorf("grant for %s has unknown access %d", spec.Peer, spec.Access)
	case len(spec.Ranges) == 0:
		return nil, fmt.Errorf("grant for %s has no ranges", spec.Peer)
	case len(spec.Ranges) > limit:
		return nil, &agent.LimitError{What: "ranges in a grant", Got: len(spec.Ranges), Limit: limit}
	}
	spans := make([]span, len(spec.Ranges))
	for i, d := range spec.Ranges {
		if d.Length == 0 || d.Addr == 0 || d.Addr > math.MaxUint64-d.Length {
			return nil, fmt.Errorf("grant for %s: range %d (%d bytes at %#x) is not a range",
				spec.Peer, i, d.Length, d.Addr)
		}
		spans[i] = span{d.Addr, d.Addr + d.Length}
	}
	return &Grant{peer: spec.Peer, access: spec.Access, spans: merge(spans)}, nil
}

// merge sorts spans and joins those that touch.
func merge(spans []span) []span {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.lo, b.lo) })
	out := spans[:1]
	for _, s := range spans[1:] {
		if last := &out[len(out)-1]; s.lo <= last.hi {
			last.hi = max(last.hi, s.hi)
		} else {
			out = append(out, s)
		}
	}
	return slices.Clip(out)
}

// at is the index of the last span that begins at or before addr, or -1.
func (g *Grant) at(addr uint64) int {
	i, found := slices.BinarySearchFunc(g.spans, addr, func(s span, a uint64) int { return cmp.Compare(s.lo, a) })
	if found {
		return i
	}
	return i - 1
}

// Covers reports whether the grant includes every byte of [addr, addr+length).
func (g *Grant) Covers(addr, length uint64) bool {
	i := g.at(addr)
	return i >= 0 && addr < g.spans[i].hi && length <= g.spans[i].hi-addr
}

func (g *Grant) touches(lo, hi uint64) bool {
	i := g.at(lo)
	return i >= 0 && g.spans[i].hi > lo || i+1 < len(g.spans) && g.spans[i+1].lo < hi
}

// Table names the live grants of one agent.
type Table struct {
	limit int
	rand  io.Reader
	mu    struct {
		sync.RWMutex
		grants map[agent.GrantID]*Grant
	}
}

// NewTable makes a table of at most limit grants, whose ids come from rand.
func NewTable(limit int, rand io.Reader) *Table {
	t := &Table{limit: limit, rand: rand}
	t.mu.grants = map[agent.GrantID]*Grant{}
	return t
}

// Add names a grant.
func (t *Table) Add(g *Grant) (agent.GrantID, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.mu.grants); n >= t.limit {
		return agent.GrantID{}, &agent.LimitError{What: "live grants", Got: n + 1, Limit: t.limit}
	}
	for {
		var id agent.GrantID
		if _, err := io.ReadFull(t.rand, id[:]); err != nil {
			return agent.GrantID{}, fmt.Errorf("random grant id: %w", err)
		}
		if _, taken := t.mu.grants[id]; !taken && id != (agent.GrantID{}) {
			t.mu.grants[id] = g
			return id, nil
		}
	}
}

// Find is the live grant of this id, if it is for this peer and this access.
func (t *Table) Find(id agent.GrantID, peer agent.Name, access agent.Access) (*Grant, error) {
	t.mu.RLock()
	g := t.mu.grants[id]
	t.mu.RUnlock()
	if g == nil || g.peer != peer || g.access != access {
		return nil, ErrNone
	}
	return g, nil
}

// Revoke ends a grant: when it returns nobody is inside its gate, and nobody enters again. An
// unknown id is ignored.
func (t *Table) Revoke(id agent.GrantID) {
	t.mu.Lock()
	g := t.mu.grants[id]
	delete(t.mu.grants, id)
	t.mu.Unlock()
	if g != nil {
		g.Shut()
	}
}

// RevokeTouching ends every grant that includes a byte of [lo, hi).
func (t *Table) RevokeTouching(lo, hi uint64) {
	var ended []*Grant
	t.mu.Lock()
	for id, g := range t.mu.grants {
		if g.touches(lo, hi) {
			delete(t.mu.grants, id)
			ended = append(ended, g)
		}
	}
	t.mu.Unlock()
	for _, g := range ended {
		g.Shut()
	}
}

// RevokeAll ends every grant.
func (t *Table) RevokeAll() { t.RevokeTouching(0, math.MaxUint64) }
