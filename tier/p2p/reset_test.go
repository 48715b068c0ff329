package p2p

import (
	"testing"

	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
)

// A reset while a fetch is unanswered waits for nobody: the blocks are forgotten at once, and the slot of the
// fetch is nobody else's until it has ended.
func TestHazardP2P_H22_ResetUnderAFetch(t *testing.T) {
	f := local.New(local.Config{Bandwidth: 1}) // nothing ever arrives
	a, b := newNode(t, f, nil), newNode(t, f, nil)
	a.have(keys(0, 1))
	b.have(keys(50, 51))
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.startLoad("r", keys(0, 1))
	b.m.Reset()
	if v := b.m.Lookup("r", keys(50, 51)); v[0] == core.Hit {
		t.Error("a block outlives the reset")
	}
	s := b.m.Stats()
	if s.Loads != 1 || s.Free != testSlots-1 && s.Free != testSlots-2 { // a lookup may have begun a second load
		t.Errorf("%+v", s)
	}
	b.begin(tier.Request{ID: "w"})
	if _, ok := b.m.Reserve("w", keys(100, 100+testSlots)); ok {
		t.Error("the slot of the fetch was given away")
	}
	b.m.Finish("r")
	b.m.Finish("w")
	b.quiet()
	if s := b.m.Stats(); s.Free != testSlots {
		t.Errorf("%+v", s)
	}
}
