package model

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// Each adapter gives tokens of its own, the same alone and beside sequences with others.
func TestAdapters(t *testing.T) {
	m := Tiny()
	shape := m.Config()
	var seqs []Sequence
	for i, name := range []string{"", "a", "b", "a"} {
		s := Sequence{Blocks: []kv.BlockID{kv.BlockID(2 * i), kv.BlockID(2*i + 1)}, Logits: true}
		for j := range 20 {
			s.Tokens = append(s.Tokens, kv.Token(40+j*3%50))
		}
		if name != "" {
			a, err := SeededAdapter(shape, name)
			if err != nil {
				t.Fatal(err)
			}
			s.Adapter = a
		}
		seqs = append(seqs, s)
	}
	run := func(seqs []Sequence) (rows [][]float32) {
		cache, err := NewCache(shape, CacheShape{BlockSize: 16, NumBlocks: 8}, make([]byte, CacheBytes(shape, 16, 8)))
		if err != nil {
			t.Fatal(err)
		}
		var out Logits
		if err := NewRunner(m, 2).Forward(cache, seqs, &out); err != nil {
			t.Fatal(err)
		}
		for i := range seqs {
			rows = append(rows, slices.Clone(out.Row(i)))
		}
		return rows
	}
	together := run(seqs)
	for i := range seqs {
		if alone := run(seqs[i : i+1]); !slices.Equal(alone[0], together[i]) {
			t.Errorf("sequence %d differs with its company", i)
		}
	}
	if !slices.Equal(together[1], together[3]) {
		t.Error("one adapter gives two results")
	}
	best := func(row []float32) int { return slices.Index(row, slices.Max(row)) }
	for _, p := range [][2]int{{0, 1}, {0, 2}, {1, 2}} {
		if best(together[p[0]]) == best(together[p[1]]) {
			t.Errorf("sequences %v choose the same token", p)
		}
	}
}

func TestAdapterRefusals(t *testing.T) {
	shape := Tiny().Config()
	for _, name := range []string{"", strings.Repeat("x", MaxAdapterName+1)} {
		if _, err := SeededAdapter(shape, name); err == nil {
			t.Errorf("a name of %d bytes is taken", len(name))
		}
	}
	if _, err := SeededAdapter(Config{}, "a"); err == nil {
		t.Error("no shape is taken")
	}
	other := shape
	other.Layers = 2
	a, err := SeededAdapter(other, "a")
	if err != nil {
		t.Fatal(err)
	}
	cache, err := NewCache(shape, CacheShape{BlockSize: 16, NumBlocks: 1}, make([]byte, CacheBytes(shape, 16, 1)))
	if err != nil {
		t.Fatal(err)
	}
	err = NewRunner(Tiny(), 1).Forward(cache, []Sequence{{Tokens: []kv.Token{65}, Blocks: []kv.BlockID{0}, Adapter: a}}, new(Logits))
	if err == nil || !strings.Contains(err.Error(), "another model") {
		t.Errorf("an adapter of another shape: %v", err)
	}
}
