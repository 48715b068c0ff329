package tier_test

import (
	"testing"

	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
)

// A block that was damaged in memory is not used, not kept in a file, and not taken from a peer: it is a miss
// that is computed anew.
func TestInjectedFaultIsAMiss(t *testing.T) {
	dir := t.TempDir()
	e := newEngineWith(t, make([]byte, 8*blockLen), func(c *tier.Config) { c.InjectFault = tier.Faults }, files(t, dir))
	e.begin(tier.Request{ID: "w"})
	for i := range 4 {
		e.mustCompute("w", key(i))
	}
	e.settle()
	for i := range 4 {
		if _, _, ok := e.m.Use([]core.Key{key(i)}); ok {
			t.Errorf("block %d is used", i)
		}
	}
	if s := e.m.Stats(); s.Damaged != 4 || e.m.Injected() != 4 {
		t.Errorf("%d injected: %+v", e.m.Injected(), s)
	}
	for i := range 4 {
		if v := e.m.Lookup("w", []core.Key{key(i)}); v[0] != core.Miss {
			t.Errorf("block %d: %v", i, v)
		}
	}
}

// Each fault changes a block, whatever is in it.
func TestFaultsAreSeen(t *testing.T) {
	for _, f := range append([]tier.Fault{tier.Unseen}, tier.Faults...) {
		for name, content := range map[string][]byte{"zero": make([]byte, blockLen), "one": {1}, "some": content(key(1))} {
			before := core.SumOf(content)
			if tier.Apply(f, content); core.SumOf(content) == before {
				t.Errorf("%s does nothing to a block of %s", f, name)
			}
		}
	}
	if (tier.Config{Memory: make([]byte, 10), BlockLen: 1, InjectFault: []tier.Fault{"x"}}).Validate() == nil {
		t.Error("an unknown fault is taken")
	}
}

// Unseen is what no checksum sees: the block is used as it is, in turn with others that are not.
func TestUnseenFault(t *testing.T) {
	e := newEngineWith(t, make([]byte, 8*blockLen), func(c *tier.Config) { c.InjectFault = []tier.Fault{tier.Unseen, tier.FlipBit} })
	e.begin(tier.Request{ID: "w"})
	for i := range 4 {
		e.mustCompute("w", key(i))
	}
	for i := range 4 {
		_, slots, ok := e.m.Use([]core.Key{key(i)})
		if ok != (i%2 == 0) || ok && core.SumOf(e.m.Block(slots[0])) == core.SumOf(content(key(i))) {
			t.Errorf("block %d: used %v", i, ok)
		}
	}
}

// The source's memory is damaged: its peer gets the other blocks, and computes that one.
func TestDamagedSource(t *testing.T) {
	f := local.New(local.Config{})
	a, b := newPeer(t, f, 16), newPeer(t, f, 16)
	a.begin(tier.Request{ID: "w"})
	for i := range 3 {
		a.mustCompute("w", key(i))
	}
	lease, slots, ok := a.m.Use([]core.Key{key(1)})
	if !ok {
		t.Fatal("not there")
	}
	a.m.Block(slots[0])[blockLen/2] ^= 1
	a.m.EndUse(lease)
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	for i, want := range []core.Verdict{core.Hit, core.Miss, core.Hit} {
		if v := b.find("r", key(i)); v != want {
			t.Errorf("block %d: %v", i, v)
		}
	}
	b.mustCompute("r", key(1))
	if v := b.find("r", key(1)); v != core.Hit {
		t.Error(v)
	}
}
