package wire

import (
	"fmt"
	"math"

	"github.com/kvferry/kvferry/kv"
)

// Validate reports metadata whose regions cannot be addressed or whose lists do not fit together.
// It is stricter than stock, which checks lengths and strides only and only for some peers. What
// depends on the local side (layout, names, sizes) is for package geometry.
func (m *AgentMetadata) Validate() error {
	_, err := m.Regions()
	return err
}

// Regions gives the regions of valid metadata in wire order.
func (m *AgentMetadata) Regions() ([]kv.Region, error) {
	if err := m.checkScalars(); err != nil {
		return nil, err
	}
	if err := m.checkLists(); err != nil {
		return nil, err
	}
	regions := make([]kv.Region, len(m.KVCachesBaseAddr))
	for i := range regions {
		if m.BlockLens[i] <= 0 || m.BlockStrides[i] <= 0 {
			return nil, badMetadata("block_lens", "region %d has block length %d and stride %d", i, m.BlockLens[i], m.BlockStrides[i])
		}
		regions[i] = m.region(i)
		if err := regions[i].Validate(); err != nil {
			return nil, badMetadata("kv_caches_base_addr", "region %d: %v", i, err)
		}
		if n := regions[i].NumBlocks; n > math.MaxUint32 {
			return nil, badMetadata("num_blocks", "region %d has %d blocks, more than ids", i, n)
		}
		if g := regions[i].Group; g < -1 || g >= MaxGroups {
			return nil, badMetadata("region_group_ids", "region %d is in group %d", i, g)
		}
	}
	return regions, nil
}

func (m *AgentMetadata) region(i int) kv.Region {
	r := kv.Region{
		Base:      m.KVCachesBaseAddr[i],
		BlockLen:  uint64(m.BlockLens[i]),
		Stride:    uint64(m.BlockStrides[i]),
		NumBlocks: m.NumBlocks,
		Device:    uint32(m.DeviceID),
	}
	if m.RegionNumBlocks != nil {
		r.NumBlocks = m.RegionNumBlocks[i]
	}
	if m.RegionGroupIDs != nil {
		r.Group = m.RegionGroupIDs[i]
	}
	if m.RegionNames != nil {
		r.Name = m.RegionNames[i]
	}
	return r
}

func (m *AgentMetadata) checkScalars() error {
	if reason, _ := badText(string(m.EngineID), MaxIDLen, false); reason != "" {
		return badMetadata("engine_id", "%s", reason)
	}
	for _, n := range []struct {
		field         string
		value, lo, hi int
	}{
		{"device_id", m.DeviceID, 0, math.MaxUint32},
		{"num_blocks", m.NumBlocks, 1, math.MaxUint32},
		{"block_size", m.BlockSize, 1, MaxTokens},
		{"ssm_sizes", m.SSMSizes[0], 0, math.MaxInt},
		{"ssm_sizes", m.SSMSizes[1], 0, math.MaxInt},
		{"physical_blocks_per_logical_kv_block", m.PhysicalBlocksPerLogical, 1, MaxTokens},
		{"dcp_size", m.DCPSize, 1, MaxRanks},
		{"pcp_size", m.PCPSize, 1, MaxRanks},
	} {
		if n.value < n.lo || n.value > n.hi {
			return badMetadata(n.field, "%d is outside %d…%d", n.value, n.lo, n.hi)
		}
	}
	if p := m.PLEBlockLen; p != nil && *p < 1 {
		return badMetadata("ple_block_len", "%d is below 1", *p)
	}
	return nil
}

func (m *AgentMetadata) checkLists() error {
	n := len(m.KVCachesBaseAddr)
	if n == 0 {
		return badMetadata("kv_caches_base_addr", "there are no regions")
	}
	for _, l := range []struct {
		field    string
		len      int
		optional bool
	}{
		{"block_lens", len(m.BlockLens), false},
		{"block_strides", len(m.BlockStrides), false},
		{"region_num_blocks", len(m.RegionNumBlocks), m.RegionNumBlocks == nil},
		{"region_group_ids", len(m.RegionGroupIDs), m.RegionGroupIDs == nil},
		{"region_names", len(m.RegionNames), m.RegionNames == nil},
		{"region_mem_types", len(m.RegionMemTypes), m.RegionMemTypes == nil},
		{"region_members", len(m.RegionMembers), len(m.RegionMembers) == 0},
	} {
		if l.len != n && !l.optional {
			return badMetadata(l.field, "has %d entries for %d regions", l.len, n)
		}
	}
	for i, t := range m.RegionMemTypes {
		if t != "VRAM" && t != "DRAM" {
			return badMetadata("region_mem_types", "region %d has memory type %q, neither VRAM nor DRAM", i, shorten(t))
		}
	}
	for _, p := range m.PackedMemberLayouts {
		if p.Offset < 0 || p.Page < 1 || p.Offset > math.MaxInt-p.Page {
			return badMetadata("packed_member_layouts", "layer %q has %d bytes at offset %d", shorten(p.Layer), p.Page, p.Offset)
		}
	}
	return nil
}

func badMetadata(field, format string, args ...any) error {
	return &DecodeError{Message: "agent metadata", Field: field, Offset: -1, Reason: fmt.Sprintf(format, args...), Kind: ErrRange}
}
