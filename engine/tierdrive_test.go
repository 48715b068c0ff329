package engine

import (
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	tiercore "github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// undecided is a tier that never knows.
type undecided struct{}

func (undecided) Name() string                                      { return "undecided" }
func (undecided) Start(tier.Host) error                             { return nil }
func (undecided) Begin(tier.Request) tier.Interest                  { return tier.Interest{Load: true} }
func (undecided) End(kv.RequestID)                                  {}
func (undecided) Probe(kv.RequestID, tiercore.Key) tiercore.Verdict { return tiercore.Pending }
func (undecided) Unwanted(kv.RequestID, []tiercore.Key)             {}
func (undecided) Flush(kv.RequestID)                                {}
func (undecided) Load(tiercore.Job)                                 {}
func (undecided) Store(tiercore.Job)                                {}
func (undecided) Changed()                                          {}
func (undecided) Close() error                                      { return nil }

// The machine is told of each further block that has come, once.
func TestTierProgressIsTold(t *testing.T) {
	m, err := tier.New(tier.Config{Memory: make([]byte, 64), BlockLen: 16, Secondaries: []tier.Secondary{undecided{}}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }() // it never fails
	if err := m.Begin(tier.Request{ID: "1"}); err != nil {
		t.Fatal(err)
	}
	d := newTierDriver(16, slog.New(slog.DiscardHandler))
	d.m = m
	d.requests[1] = &tierRequest{id: "1"}
	l := &look{TierLook: core.TierLook{Seq: 1, Ticket: 7}, keys: []tiercore.Key{"a", "b", "c"}}
	for come, want := range [][]tierEvent{nil, {{event: core.TierProgress{Ticket: 7, Blocks: 1}}}, {{event: core.TierProgress{Ticket: 7, Blocks: 2}}}} {
		if come > 0 {
			res, _ := m.Reserve("1", l.keys[come-1:come])
			m.Commit(res.ID, true)
		}
		for range 2 {
			if d.try(l) {
				t.Fatal("decided")
			}
		}
		if d := cmp.Diff(want, d.events.take(), cmp.AllowUnexported(tierEvent{})); d != "" {
			t.Errorf("%d have come: %s", come, d)
		}
	}
}

// holed is a tier that has all blocks but one, and notes what it is to do.
type holed struct {
	undecided
	hole             tiercore.Key
	loaded, unwanted []tiercore.Key
}

func (h *holed) Probe(_ kv.RequestID, k tiercore.Key) tiercore.Verdict {
	if k == h.hole {
		return tiercore.Miss
	}
	return tiercore.Hit
}

func (h *holed) Unwanted(_ kv.RequestID, ks []tiercore.Key) { h.unwanted = append(h.unwanted, ks...) }
func (h *holed) Load(j tiercore.Job)                        { h.loaded = append(h.loaded, j.Keys...) }

// Of what an engine's prompt consists, no tier brings what it cannot use: what stands behind a hole.
func TestNothingIsLoadedBehindAHole(t *testing.T) {
	h := &holed{hole: "c"}
	m, err := tier.New(tier.Config{Memory: make([]byte, 128), BlockLen: 16, Secondaries: []tier.Secondary{h}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }() // it never fails
	req := tierRequestOf(1, &wire.P2PParams{})
	if err := m.Begin(req); err != nil {
		t.Fatal(err)
	}
	d := newTierDriver(16, slog.New(slog.DiscardHandler))
	d.m = m
	d.requests[1] = &tierRequest{id: req.ID}
	l := &look{TierLook: core.TierLook{Seq: 1, Ticket: 7}, keys: []tiercore.Key{"a", "b", "c", "d", "e"}}
	for range 2 {
		if d.try(l) {
			t.Fatal("decided")
		}
	}
	if diff := cmp.Diff([]tiercore.Key{"a", "b"}, h.loaded); diff != "" {
		t.Errorf("loaded: %s", diff)
	}
	if diff := cmp.Diff([]tiercore.Key{"d", "e"}, h.unwanted); diff != "" {
		t.Errorf("unwanted: %s", diff)
	}
}
