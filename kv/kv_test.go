package kv

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestExpandKeepsTokenOrder(t *testing.T) {
	got := Expand([]BlockID{3, 4}, 2)
	if d := cmp.Diff([]KernelBlockID{6, 7, 8, 9}, got); d != "" {
		t.Error(d)
	}
}

// The vector of nixl-connector.md section 12, item 8.
func TestExpandGroups(t *testing.T) {
	got := [][]KernelBlockID{Expand([]BlockID{0, 1, 2}, 2), Expand([]BlockID{3, 4}, 2)}
	want := [][]KernelBlockID{{0, 1, 2, 3, 4, 5}, {6, 7, 8, 9}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestCloneIsDeep(t *testing.T) {
	a := BlockIDs{{1, 2}, nil, {3}}
	b := a.Clone()
	a[0][0] = 9
	if b[0][0] != 1 || b.Len() != 3 {
		t.Errorf("clone shares memory: %v", b)
	}
}

func TestRegionValidate(t *testing.T) {
	good := Region{Base: 4096, BlockLen: 64, Stride: 64, NumBlocks: 4}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, mutate := range map[string]func(*Region){
		"no base":        func(r *Region) { r.Base = 0 },
		"no length":      func(r *Region) { r.BlockLen = 0 },
		"short stride":   func(r *Region) { r.Stride = 63 },
		"no blocks":      func(r *Region) { r.NumBlocks = 0 },
		"stride too big": func(r *Region) { r.Stride = 1 << 62 },
		"base too big":   func(r *Region) { r.Base = 1<<63 - 1 },
	} {
		r := good
		mutate(&r)
		if r.Validate() == nil {
			t.Errorf("%s: accepted %+v", name, r)
		}
	}
}

// The base of an id with a suffix is the id before it, whatever the id looks like.
func TestBaseRemovesOneSuffix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.StringMatching(`[a-z0-9_:-]{0,40}`).Draw(t, "id")
		suffix := rapid.StringMatching(`[0-9a-fA-F]{8}`).Draw(t, "suffix")
		if got := RequestID(id + "-" + suffix).Base(); got != BaseRequestID(id) {
			t.Errorf("base of %q-%s is %q", id, suffix, got)
		}
	})
}
