package core

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/kv"
)

// dumbPool is the pool as one would explain it: a list of free blocks in the order of reuse, and a
// note on every block.
type dumbPool struct {
	free []kv.BlockID
	refs map[kv.BlockID]int
	note map[kv.BlockID]Hash
}

func (d *dumbPool) share(id kv.BlockID) {
	if i := slices.Index(d.free, id); i >= 0 {
		d.free = slices.Delete(d.free, i, i+1)
	}
	d.refs[id]++
}

func (d *dumbPool) take(shared []kv.BlockID, n int) ([]kv.BlockID, bool) {
	fresh := slices.DeleteFunc(slices.Clone(d.free), func(id kv.BlockID) bool { return slices.Contains(shared, id) })
	if len(fresh) < n {
		return nil, false
	}
	for _, id := range shared {
		d.share(id)
	}
	for _, id := range fresh[:n] {
		d.share(id)
		delete(d.note, id)
	}
	return slices.Concat(shared, fresh[:n]), true
}

func (d *dumbPool) release(ids []kv.BlockID) {
	for _, id := range slices.Backward(ids) {
		if d.refs[id]--; d.refs[id] > 0 {
			continue
		}
		delete(d.refs, id)
		if _, known := d.note[id]; known {
			d.free = append(d.free, id)
		} else {
			d.free = slices.Insert(d.free, 0, id)
		}
	}
}

func (d *dumbPool) find(h Hash) (kv.BlockID, bool) {
	for id, x := range d.note {
		if x == h {
			return id, true
		}
	}
	return 0, false
}

func TestPoolAgainstDumbPool(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 9).Draw(t, "blocks")
		p := NewPool(n, true)
		d := &dumbPool{refs: map[kv.BlockID]int{}, note: map[kv.BlockID]Hash{}}
		for i := range n {
			d.free = append(d.free, kv.BlockID(i))
		}
		var tables [][]kv.BlockID // what users hold
		hash := func(i int) Hash { return Hash{byte(i)} }
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				var hashes []Hash
				for i := range rapid.IntRange(0, 3).Draw(t, "chain") {
					hashes = append(hashes, hash(i))
				}
				hits := p.Find(hashes)
				for i, id := range hits {
					if want, ok := d.find(hashes[i]); !ok || want != id {
						t.Fatalf("hash %d is in block %d, not %d", i, want, id)
					}
				}
				if len(hits) < len(hashes) {
					if id, ok := d.find(hashes[len(hits)]); ok {
						t.Fatalf("hash %d is in block %d and was not found", len(hits), id)
					}
				}
				k := rapid.IntRange(0, n).Draw(t, "fresh")
				got, ok := p.Take(hits, k)
				want, wantOK := d.take(hits, k)
				if ok != wantOK || !slices.Equal(got, want) {
					t.Fatalf("take %v + %d: %v %v, want %v %v", hits, k, got, ok, want, wantOK)
				}
				if len(got) > 0 {
					tables = append(tables, got)
				}
			},
			"release": func(t *rapid.T) {
				if len(tables) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(tables)-1).Draw(t, "table")
				p.Release(tables[i])
				d.release(tables[i])
				tables = slices.Delete(tables, i, i+1)
			},
			"share": func(t *rapid.T) {
				if len(tables) == 0 {
					t.Skip()
				}
				table := slices.Clone(tables[rapid.IntRange(0, len(tables)-1).Draw(t, "table")])
				p.Share(table)
				for _, id := range table {
					d.share(id)
				}
				tables = append(tables, table)
			},
			"cache": func(t *rapid.T) {
				if len(tables) == 0 {
					t.Skip()
				}
				table := tables[rapid.IntRange(0, len(tables)-1).Draw(t, "table")]
				id := table[rapid.IntRange(0, len(table)-1).Draw(t, "block")]
				h := hash(rapid.IntRange(0, 4).Draw(t, "hash"))
				p.Cache(id, h)
				_, known := d.find(h)
				if _, noted := d.note[id]; !known && !noted {
					d.note[id] = h
				}
			},
			"": func(t *rapid.T) {
				if err := p.Check(d.refs); err != nil {
					t.Fatal(err)
				}
				if p.Free() != len(d.free) || p.Cached() != len(d.note) || p.Total() != n {
					t.Fatalf("free %d, cached %d of %d; want %d, %d of %d", p.Free(), p.Cached(), p.Total(), len(d.free), len(d.note), n)
				}
			},
		})
	})
}

func TestPoolRefusesMisuse(t *testing.T) {
	for name, misuse := range map[string]func(*Pool){
		"release of a free block": func(p *Pool) { p.Release([]kv.BlockID{0}) },
		"share of a free block":   func(p *Pool) { p.Share([]kv.BlockID{0}) },
		"contents of a free one":  func(p *Pool) { p.Cache(0, Hash{}) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			misuse(NewPool(2, true))
		})
	}
}

// A hash stands for the tokens, their place and the keys: any change changes it.
func TestHashesTellApart(t *testing.T) {
	seen := map[Hash]string{}
	note := func(name string, h Hash) {
		if other, ok := seen[h]; ok {
			t.Errorf("%s and %s have one hash", name, other)
		}
		seen[h] = name
	}
	root := Keys{}.root("")
	note("root", root)
	note("seeded root", Keys{}.root("a"))
	note("salted root", Keys{Salt: "a"}.root(""))
	note("adapter root", Keys{Adapter: "a"}.root(""))
	note("extra", Keys{Extras: []string{"a"}}.root(""))
	note("extras", Keys{Extras: []string{"a", "b"}}.root(""))
	note("other order of extras", Keys{Extras: []string{"b", "a"}}.root(""))
	note("joined extras", Keys{Extras: []string{"ab"}}.root(""))
	note("empty extra", Keys{Extras: []string{""}}.root(""))
	note("shifted keys", Keys{Salt: "ab", Adapter: "c"}.root(""))
	note("shifted keys 2", Keys{Salt: "a", Adapter: "bc"}.root(""))
	note("block", chain(root, []kv.Token{1, 2}))
	note("order", chain(root, []kv.Token{2, 1}))
	note("negative", chain(root, []kv.Token{-1, 2}))
	note("second block", chain(chain(root, []kv.Token{1, 2}), []kv.Token{1, 2}))
	note("digest", Hash(Digest([]kv.Token{1, 2}, Keys{})))
	note("digest of more", Hash(Digest([]kv.Token{1, 2, 0}, Keys{})))
	note("digest with extra", Hash(Digest([]kv.Token{1, 2}, Keys{Extras: []string{"a"}})))
	note("digest with salt", Hash(Digest([]kv.Token{1, 2}, Keys{Salt: "a"})))
	note("digest with adapter", Hash(Digest([]kv.Token{1, 2}, Keys{Adapter: "a"})))
	if a, b := Digest([]kv.Token{5}, Keys{Salt: "s"}), Digest([]kv.Token{5}, Keys{Salt: "s"}); a != b {
		t.Error("a digest is not a function")
	}
}
