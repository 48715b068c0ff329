package engine

import (
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	tiercore "github.com/kvferry/kvferry/tier/core"
)

// undecided is a tier that never knows.
type undecided struct{}

func (undecided) Name() string                                      { return "undecided" }
func (undecided) Start(tier.Host) error                             { return nil }
func (undecided) Begin(tier.Request) tier.Interest                  { return tier.Interest{Load: true} }
func (undecided) End(kv.RequestID)                                  {}
func (undecided) Probe(kv.RequestID, tiercore.Key) tiercore.Verdict { return tiercore.Pending }
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
