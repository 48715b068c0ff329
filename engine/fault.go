package engine

import (
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// KVFault is a way to damage received KV.
type KVFault string

const (
	SwapBlocks KVFault = "swap-blocks" // the first two received blocks change places
	ZeroLayer  KVFault = "zero-layer"  // the middle layer of all received blocks is zero
	ZeroHead   KVFault = "zero-head"   // the first KV head of the middle layer of all received blocks is zero
	StaleBlock KVFault = "stale-block" // the second received block was not written: it holds what the first does
)

// KVFaults is every known fault.
var KVFaults = []KVFault{SwapBlocks, ZeroLayer, ZeroHead, StaleBlock}

// faults applies the configured faults in turn. The loop owns it.
type faults struct {
	turn  []KVFault
	next  int
	model model.Config
	cache *model.Cache
}

// damage applies the next fault that these blocks are enough for, and names it; "" if there is none.
// Nothing else may use the blocks.
func (f *faults) damage(blocks []kv.BlockID) KVFault {
	for range f.turn {
		fault := f.turn[f.next%len(f.turn)]
		f.next++
		if len(blocks) == 0 || len(blocks) < 2 && (fault == SwapBlocks || fault == StaleBlock) {
			continue
		}
		f.apply(fault, blocks)
		return fault
	}
	return ""
}

func (f *faults) apply(fault KVFault, blocks []kv.BlockID) {
	middle := f.model.Layers / 2
	switch fault {
	case SwapBlocks:
		for l := range f.model.Layers {
			a, b := f.cache.Block(l, blocks[0]), f.cache.Block(l, blocks[1])
			for i := range a {
				a[i], b[i] = b[i], a[i]
			}
		}
	case StaleBlock:
		for l := range f.model.Layers {
			copy(f.cache.Block(l, blocks[1]), f.cache.Block(l, blocks[0]))
		}
	case ZeroLayer:
		for _, b := range blocks {
			clear(f.cache.Block(middle, b))
		}
	case ZeroHead:
		for _, b := range blocks {
			for token := range f.cache.Shape().BlockSize {
				clear(f.cache.HeadToken(middle, b, 0, token))
			}
		}
	}
}
