package grants

import (
	"crypto/rand"
	"errors"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// Merged spans with binary search against one bool per byte.
func TestCoversAgainstBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var bytes [80]bool
		ranges := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) kv.Descriptor {
			return kv.Descriptor{
				Addr:   rapid.Uint64Range(1, 60).Draw(t, "addr"),
				Length: rapid.Uint64Range(1, 12).Draw(t, "len"),
			}
		}), 1, 12).Draw(t, "ranges")
		for _, r := range ranges {
			for i := r.Addr; i < r.Addr+r.Length; i++ {
				bytes[i] = true
			}
		}
		g, err := New(agent.GrantSpec{Peer: "p", Ranges: ranges}, 12)
		if err != nil {
			t.Fatal(err)
		}
		for lo := range uint64(79) {
			all, any := true, false
			for hi := lo + 1; hi < 80; hi++ {
				all = all && bytes[hi-1]
				any = any || bytes[hi-1]
				if got := g.Covers(lo, hi-lo); got != all {
					t.Fatalf("covers [%d, %d) = %v", lo, hi, got)
				}
				if got := g.touches(lo, hi); got != any {
					t.Fatalf("touches [%d, %d) = %v", lo, hi, got)
				}
			}
		}
		if g.Covers(ranges[0].Addr, math.MaxUint64) || g.Covers(math.MaxUint64, 1) {
			t.Fatal("covers beyond the address space")
		}
	})
}

func TestFindAnswersOnlyTheHolder(t *testing.T) {
	table := NewTable(2, rand.Reader)
	g, err := New(agent.GrantSpec{Peer: "p", Access: agent.AccessRead, Ranges: []kv.Descriptor{{Addr: 10, Length: 10}}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	id, err := table.Add(g)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := table.Find(id, "p", agent.AccessRead); err != nil || got != g {
		t.Fatalf("the holder: %v", err)
	}
	other := id
	other[0]++
	for name, find := range map[string]func() (*Grant, error){
		"other peer":   func() (*Grant, error) { return table.Find(id, "q", agent.AccessRead) },
		"other access": func() (*Grant, error) { return table.Find(id, "p", agent.AccessWrite) },
		"other id":     func() (*Grant, error) { return table.Find(other, "p", agent.AccessRead) },
		"zero id":      func() (*Grant, error) { return table.Find(agent.GrantID{}, "p", agent.AccessRead) },
	} {
		if _, err := find(); !errors.Is(err, ErrNone) {
			t.Errorf("%s: %v", name, err)
		}
	}
	table.RevokeTouching(0, 10)
	table.RevokeTouching(20, 30)
	if !g.Enter() {
		t.Fatal("a grant beside the memory was revoked")
	}
	g.Leave()
	table.RevokeTouching(19, 20)
	if _, err := table.Find(id, "p", agent.AccessRead); !errors.Is(err, ErrNone) || g.Enter() {
		t.Error("the grant outlives its memory")
	}
	table.Revoke(id)
}

func TestNewRefuses(t *testing.T) {
	ok := []kv.Descriptor{{Addr: 1, Length: 1}}
	for name, spec := range map[string]agent.GrantSpec{
		"no peer":         {Ranges: ok},
		"no ranges":       {Peer: "p"},
		"unknown access":  {Peer: "p", Access: 2, Ranges: ok},
		"empty range":     {Peer: "p", Ranges: []kv.Descriptor{{Addr: 1}}},
		"wraps around":    {Peer: "p", Ranges: []kv.Descriptor{{Addr: math.MaxUint64, Length: 2}}},
		"too many ranges": {Peer: "p", Ranges: append(ok[:1:1], ok[0])},
	} {
		if _, err := New(spec, 1); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	table := NewTable(1, rand.Reader)
	g, _ := New(agent.GrantSpec{Peer: "p", Ranges: ok}, 1)
	if _, err := table.Add(g); err != nil {
		t.Fatal(err)
	}
	var le *agent.LimitError
	if _, err := table.Add(g); !errors.As(err, &le) {
		t.Errorf("beyond the limit: %v", err)
	}
}
