package core

import (
	"testing"
)

// The hazards of p2p-tier.md, section 13, that are the book's.

// A job that is reported twice, or that never was, is counted and changes nothing.
func TestHazardP2P_H13_StrayEnds(t *testing.T) {
	m, err := New(Config{Slots: 2, Tiers: 1})
	if err != nil {
		t.Fatal(err)
	}
	m.Begin("r", RequestSpec{})
	res, _ := m.Reserve("r", []Key{"a"})
	m.Commit(res.ID, true)
	store := m.Actions()[0].(Store).Job.ID
	m.StoreEnded(store, true)
	for i, again := range []func(){
		func() { m.StoreEnded(store, false) },
		func() { m.StoreEnded(1<<40, true) },
		func() { m.LoadEnded(store, []bool{true}, true) },
		func() { m.LoadStopped(store) },
		func() { m.Commit(res.ID, false) },
		func() { m.EndUse(res.ID) },
		func() { m.Unpin([]PinID{7}) },
	} {
		again()
		if s := m.Stats(); s.Strays != uint64(i+1) || s.Ready != 1 || s.Pinned != 0 || s.Stores != 0 {
			t.Fatalf("after stray %d: %+v", i, s)
		}
	}
	m.Reset() // with nothing left over it has nothing to wait for
	if s := m.Stats(); s.Free != 2 {
		t.Errorf("%+v", s)
	}
}
