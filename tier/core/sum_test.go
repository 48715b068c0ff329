package core

import (
	"testing"

	"github.com/kvferry/kvferry/kv"
)

type nobody struct{}

func (nobody) Probe(int, kv.RequestID, Key) Verdict { return Miss }

// What is known of a block's content goes with it to everybody who reads it, and ends with it.
func TestSumsStayWithBlocks(t *testing.T) {
	m, err := New(Config{Slots: 2, Tiers: 1})
	if err != nil {
		t.Fatal(err)
	}
	a, b := SumOf([]byte("a")), SumOf([]byte("b"))
	if a == b || !a.Known {
		t.Fatal(a, b)
	}
	m.Begin("r", RequestSpec{})
	res, _ := m.Reserve("r", []Key{"a", "b"})
	m.SetSums(res.ID, []Sum{a, b})
	m.Commit(res.ID, true)
	stored := m.Actions()[0].(Store).Job
	if len(stored.Sums) != 2 || stored.Sums[0] != a || stored.Sums[1] != b {
		t.Errorf("stored with %v", stored.Sums)
	}
	m.StoreEnded(stored.ID, true)
	if s := m.Serve(0, []Key{"b"}, 1, nobody{}); s[0].Sum != b {
		t.Errorf("served with %v", s[0].Sum)
	} else {
		m.Unpin([]PinID{s[0].Pin})
	}
	lease, _, _ := m.Use([]Key{"b", "a"})
	if _, sums := m.Blocks(lease); sums[0] != b || sums[1] != a {
		t.Errorf("used with %v", sums)
	}
	// A damaged block is found no more; who reads it goes on, and its slot is free afterwards.
	m.Forget([]Key{"a", "unknown"})
	if _, _, ok := m.Use([]Key{"a"}); ok {
		t.Error("a damaged block is used")
	}
	m.EndUse(lease)
	m.Forget([]Key{"b"})
	if st := m.Stats(); st.Free != 2 || st.Damaged != 2 || st.Ready != 0 {
		t.Errorf("%+v", st)
	}
	// Another content of the key has no sum before one is set.
	res, _ = m.Reserve("r", []Key{"a"})
	m.Commit(res.ID, true)
	lease, _, _ = m.Use([]Key{"a"})
	if _, sums := m.Blocks(lease); sums[0].Known {
		t.Error("the old sum")
	}
}
