package engine

import (
	"bytes"
	"testing"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// testCache is a cache in which every byte tells where it is, in each layout.
func testCache(t *testing.T, layout model.Layout) (*model.Cache, []byte) {
	shape := tiny().Config()
	mem := make([]byte, model.CacheBytes(shape, 4, 6))
	c, err := model.NewCache(shape, model.CacheShape{Layout: layout, BlockSize: 4, NumBlocks: 6}, mem)
	if err != nil {
		t.Fatal(err)
	}
	for l := range shape.Layers {
		for b := range kv.BlockID(6) {
			for i, block := 0, c.Block(l, b); i < len(block); i++ {
				block[i] = byte(1 + l*7 + int(b)*31 + i%5)
			}
		}
	}
	return c, mem
}

func TestFaults(t *testing.T) {
	received := []kv.BlockID{4, 1, 3}
	for _, layout := range []model.Layout{model.LBHNC, model.LBNHC} {
		for _, fault := range KVFaults {
			t.Run(layout.String()+"/"+string(fault), func(t *testing.T) {
				before, _ := testCache(t, layout)
				after, _ := testCache(t, layout)
				f := &faults{turn: []KVFault{fault}, model: tiny().Config(), cache: after}
				if got := f.damage(received); got != fault {
					t.Fatalf("did %q", got)
				}
				middle := tiny().Config().Layers / 2
				for l := range tiny().Config().Layers {
					for b := range kv.BlockID(6) {
						want := bytes.Clone(before.Block(l, b))
						switch {
						case fault == SwapBlocks && b == 4, fault == StaleBlock && b == 1:
							want = before.Block(l, 5-b)
							if fault == StaleBlock {
								want = before.Block(l, 4)
							}
						case fault == SwapBlocks && b == 1:
							want = before.Block(l, 4)
						case fault == ZeroLayer && l == middle && (b == 4 || b == 1 || b == 3):
							clear(want)
						case fault == ZeroHead && l == middle && (b == 4 || b == 1 || b == 3):
							checkZeroHead(t, before, after, b)
							continue
						}
						if !bytes.Equal(after.Block(l, b), want) {
							t.Errorf("layer %d block %d is wrong", l, b)
						}
					}
				}
			})
		}
	}
}

func checkZeroHead(t *testing.T, before, after *model.Cache, b kv.BlockID) {
	shape := tiny().Config()
	for head := range shape.KVHeads {
		for token := range 4 {
			want := bytes.Clone(before.HeadToken(shape.Layers/2, b, head, token))
			if head == 0 {
				clear(want)
			}
			if !bytes.Equal(after.HeadToken(shape.Layers/2, b, head, token), want) {
				t.Errorf("block %d head %d token %d is wrong", b, head, token)
			}
		}
	}
}

// Faults come in turn; with one block those that need two are passed over.
func TestFaultsInTurn(t *testing.T) {
	c, _ := testCache(t, model.LBHNC)
	f := &faults{turn: KVFaults, model: tiny().Config(), cache: c}
	var got []KVFault
	for _, blocks := range [][]kv.BlockID{{1, 2}, {1}, {1}, {1}, {1, 2}, {}} {
		got = append(got, f.damage(blocks))
	}
	want := []KVFault{SwapBlocks, ZeroLayer, ZeroHead, ZeroLayer, ZeroHead, ""}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}
