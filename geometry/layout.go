package geometry

import (
	"fmt"
	"math"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Layout is what one engine rank's memory looks like. It is a value: share it freely, change none
// of its slices.
type Layout struct {
	TP        int    // tensor-parallel size of the engine
	PP        int    // pipeline stages of the engine
	BlockSize int    // tokens per kernel block
	Ratio     int    // kernel blocks per logical block
	Order     string // memory order, "LBHNC" and so on
	Regions   []kv.Region
}

// FromMetadata is the layout that a rank announces; tp and pp, which metadata does not carry, come
// from the request that named the engine. Typed errors: *wire.DecodeError for metadata that cannot
// be addressed, *LayoutError for what this package does not cover.
func FromMetadata(m *wire.AgentMetadata, tp, pp int) (Layout, error) {
	regions, err := m.Regions()
	if err != nil {
		return Layout{}, err
	}
	switch {
	case m.SSMSizes != [2]int{}:
		return Layout{}, &LayoutError{fmt.Sprintf("state-space layers (ssm_sizes %d and %d)", m.SSMSizes[0], m.SSMSizes[1])}
	case m.DCPSize != 1 || m.PCPSize != 1:
		return Layout{}, &LayoutError{fmt.Sprintf("context parallelism (dcp_size %d, pcp_size %d)", m.DCPSize, m.PCPSize)}
	case m.PLEBlockLen != nil:
		return Layout{}, &LayoutError{fmt.Sprintf("a short-convolution page (ple_block_len %d)", *m.PLEBlockLen)}
	}
	l := Layout{TP: tp, PP: pp, BlockSize: m.BlockSize, Ratio: m.PhysicalBlocksPerLogical, Order: m.KVCacheLayout, Regions: regions}
	return l, l.Validate()
}

// Validate reports a layout that this package cannot work with. Typed error: *LayoutError.
func (l Layout) Validate() error {
	bad := func(format string, args ...any) error { return &LayoutError{fmt.Sprintf(format, args...)} }
	switch {
	case l.TP < 1 || l.PP < 1:
		return bad("tensor-parallel size %d, pipeline size %d", l.TP, l.PP)
	case l.BlockSize < 1 || l.Ratio < 1:
		return bad("%d tokens per kernel block, %d kernel blocks per logical block", l.BlockSize, l.Ratio)
	case l.BlockSize > math.MaxInt32/l.Ratio:
		return bad("%d tokens per kernel block times %d", l.BlockSize, l.Ratio)
	case len(l.Regions) == 0:
		return bad("no regions")
	}
	rows := 0
	for i, r := range l.Regions {
		if err := r.Validate(); err != nil {
			return bad("region %d: %v", i, err)
		}
		if r.Group != l.Regions[0].Group || r.Group < 0 {
			return bad("regions of several KV-cache groups (region 0 is of group %d, region %d of %d)", l.Regions[0].Group, i, r.Group)
		}
		if r.NumBlocks > MaxRows-rows {
			return bad("more than %d descriptors in all regions", MaxRows)
		}
		rows += r.NumBlocks
	}
	return nil
}

// LogicalTokens is the number of tokens per logical block.
func (l Layout) LogicalTokens() int { return l.BlockSize * l.Ratio }

// Bytes is what one kernel block has in all regions together.
func (l Layout) Bytes() int64 {
	n := int64(0)
	for _, r := range l.Regions {
		n += int64(r.BlockLen)
	}
	return n
}

// Rows is the prepared descriptor list: for each region in order, for each kernel block in order
// (nixl-connector.md, section 3.3).
func (l Layout) Rows() []kv.Descriptor {
	n := 0
	for _, r := range l.Regions {
		n += r.NumBlocks
	}
	rows := make([]kv.Descriptor, 0, n)
	for _, r := range l.Regions {
		for b := range uint64(r.NumBlocks) {
			rows = append(rows, kv.Descriptor{Addr: r.Base + b*r.Stride, Length: r.BlockLen, Device: r.Device})
		}
	}
	return rows
}

// Kernel expands logical blocks and checks each against every region. side names the owner in
// errors. Typed error: *RangeError.
func (l Layout) Kernel(blocks []kv.BlockID, side Side) ([]kv.KernelBlockID, error) {
	for _, b := range blocks {
		// The last kernel block of b is the highest one; computed in 64 bits, where it cannot wrap.
		last := uint64(b)*uint64(l.Ratio) + uint64(l.Ratio) - 1
		for i, r := range l.Regions {
			if last >= uint64(r.NumBlocks) {
				return nil, &RangeError{Side: side, Block: last, Region: i, Blocks: r.NumBlocks}
			}
		}
	}
	return kv.Expand(blocks, l.Ratio), nil
}

// Ranges is the memory of some logical blocks in all regions, region-major: what a grant for them
// covers. Typed error: *RangeError.
func (l Layout) Ranges(blocks []kv.BlockID, side Side) ([]kv.Descriptor, error) {
	kernel, err := l.Kernel(blocks, side)
	if err != nil {
		return nil, err
	}
	out := make([]kv.Descriptor, 0, len(kernel)*len(l.Regions))
	for _, r := range l.Regions {
		for _, b := range kernel {
			out = append(out, kv.Descriptor{Addr: r.Base + uint64(b)*r.Stride, Length: r.BlockLen, Device: r.Device})
		}
	}
	return out, nil
}

// indices are the rows of some kernel blocks that were checked: region-major, off[region] + block
// (nixl-connector.md, section 3.4).
func (l Layout) indices(blocks []kv.KernelBlockID) []uint32 {
	out := make([]uint32, 0, len(blocks)*len(l.Regions))
	off := uint32(0)
	for _, r := range l.Regions {
		for _, b := range blocks {
			out = append(out, off+uint32(b))
		}
		off += uint32(r.NumBlocks)
	}
	return out
}
