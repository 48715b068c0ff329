package kv

// BlockID is a logical block: the scheduler's unit of block_size tokens. Logical ids are what
// parameters and registrations carry.
type BlockID uint32

// KernelBlockID is a physical block: what a region's base, stride and count address.
type KernelBlockID uint32

// BlockIDs has one list of logical blocks per KV-cache group, in token order.
type BlockIDs [][]BlockID

// Len is the number of blocks in all groups.
func (b BlockIDs) Len() int {
	n := 0
	for _, g := range b {
		n += len(g)
	}
	return n
}

// Clone copies the lists, so that the copy may be kept while the owner changes its own.
func (b BlockIDs) Clone() BlockIDs {
	if b == nil {
		return nil
	}
	c := make(BlockIDs, len(b))
	for i, g := range b {
		c[i] = append([]BlockID(nil), g...)
	}
	return c
}

// Expand turns logical blocks into kernel blocks: block b becomes b*ratio … b*ratio+ratio-1, where
// ratio is kernel blocks per logical block of the engine that owns the blocks (nixl-connector.md,
// section 3.1). It panics if ratio < 1. Ids are not range-checked here: package geometry does it.
func Expand(blocks []BlockID, ratio int) []KernelBlockID {
	if ratio < 1 {
		panic("kv: ratio of kernel to logical blocks below 1")
	}
	out := make([]KernelBlockID, 0, len(blocks)*ratio)
	for _, b := range blocks {
		for i := range ratio {
			out = append(out, KernelBlockID(int(b)*ratio+i))
		}
	}
	return out
}
