package lists

import (
	"errors"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/memory"
	"github.com/kvferry/kvferry/kv"
)

// A built list answers as the descriptors that it was built from, and is refused exactly when one
// of them does not lie in one registered range.
func TestListAgainstDescriptors(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mem := memory.NewTable(10)
		var ranges []*memory.Range
		for i := range rapid.IntRange(1, 4).Draw(t, "ranges") {
			r, err := mem.Add(uint64(1000*(i+1)), 100+100*i, "test")
			if err != nil {
				t.Fatal(err)
			}
			ranges = append(ranges, r)
		}
		descs := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) kv.Descriptor {
			r := rapid.SampledFrom(ranges).Draw(t, "range")
			off := rapid.Uint64Range(0, 98).Draw(t, "off")
			return kv.Descriptor{Addr: r.Addr + off, Length: rapid.SampledFrom([]uint64{1, 1, 2, 90}).Draw(t, "len")}
		}), 1, 20).Draw(t, "descs")
		owners := make([]*memory.Range, len(descs))
		bad := false
		for i, d := range descs {
			for _, r := range ranges {
				if d.Addr >= r.Addr && d.Addr+d.Length <= r.End {
					owners[i] = r
				}
			}
			bad = bad || owners[i] == nil
		}
		l, err := Build(agent.Local, descs, mem, 20)
		if (err != nil) != bad {
			t.Fatalf("build: %v, want refused=%v", err, bad)
		}
		if bad {
			return
		}
		for i, d := range descs {
			if l.Addr(i) != d.Addr || l.Len(i) != d.Length {
				t.Fatalf("descriptor %d is %d+%d, want %v", i, l.Addr(i), l.Len(i), d)
			}
		}
		idx := rapid.SliceOfN(rapid.Uint32Range(0, uint32(len(descs)-1)), 1, 5).Draw(t, "idx")
		got := l.Ranges(idx)
		for _, i := range idx {
			if !slices.Contains(got, owners[i]) {
				t.Fatalf("range of descriptor %d is missing", i)
			}
		}
	})
}

func TestBuildRefuses(t *testing.T) {
	for name, descs := range map[string][]kv.Descriptor{
		"empty list":     {},
		"no length":      {{Addr: 1, Length: 1}, {Addr: 1}},
		"no address":     {{Length: 1}},
		"wraps around":   {{Addr: math.MaxUint64 - 1, Length: 2}},
		"absurd length":  {{Addr: 1, Length: MaxDescBytes + 1}},
		"beyond a limit": make([]kv.Descriptor, 5),
	} {
		if _, err := Build(agent.PeerID{Name: "p", Gen: 1}, descs, nil, 4); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestTableForgetsByOwner(t *testing.T) {
	table := NewTable(3)
	p, q := agent.PeerID{Name: "p", Gen: 1}, agent.PeerID{Name: "p", Gen: 2}
	one := []kv.Descriptor{{Addr: 1, Length: 1}}
	var ids []agent.ListID
	for _, owner := range []agent.PeerID{p, q, p} {
		l, err := Build(owner, one, nil, 1)
		if err != nil {
			t.Fatal(err)
		}
		id, err := table.Insert(l)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	var le *agent.LimitError
	if _, err := table.Insert(&List{}); !errors.As(err, &le) {
		t.Errorf("a fourth list: %v", err)
	}
	table.RemoveOwner(p)
	if table.Get(ids[0]) != nil || table.Get(ids[1]) == nil || table.Get(ids[2]) != nil {
		t.Error("wrong lists forgotten")
	}
	table.Remove(ids[1])
	if table.Get(ids[1]) != nil || table.Get(0) != nil {
		t.Error("a removed list is there")
	}
}
