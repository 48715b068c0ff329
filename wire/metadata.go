package wire

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
)

// Versions of the stock connector that kvferry speaks (nixl-connector.md, section 0.1).
const (
	ConnectorVersion    = 14 // of vLLM 0.32.0
	MinConnectorVersion = 12
)

// CheckVersion reports a connector version that this package cannot encode for.
func CheckVersion(version int) error {
	if version < MinConnectorVersion || version > ConnectorVersion {
		return fmt.Errorf("wire: connector version %d is not one of %d…%d", version, MinConnectorVersion, ConnectorVersion)
	}
	return nil
}

// AgentMetadata is what one rank tells its peers about its agent and its memory (nixl-connector.md,
// section 2.3). Decoding checks types only; Validate checks that the values can be used.
//
// Lists that may be nil on the wire keep nil and empty apart. RegionMembers and PackedMemberLayouts
// are never nil on the wire; decoding an empty one gives nil.
type AgentMetadata struct {
	EngineID                 kv.EngineID
	AgentMetadata            []byte   // opaque blob of the NIXL agent
	KVCachesBaseAddr         []uint64 // per region
	DeviceID                 int
	NumBlocks                int      // kernel blocks per ordinary region
	BlockLens                []int    // bytes moved per kernel block, per region
	BlockStrides             []int    // bytes between the starts of consecutive blocks, per region
	KVCacheLayout            string   // "LBHNC", …
	BlockSize                int      // tokens per kernel block
	SSMSizes                 [2]int   // bytes of conv and ssm state per rank; zero without SSM
	AttnBackendName          string   // first attention backend
	PhysicalBlocksPerLogical int      // kernel blocks per logical block
	RegionNumBlocks          []int    // nil: NumBlocks each
	RegionGroupIDs           []int    // nil: not told; -1: shared by several groups
	RegionNames              []string // nil: not told; first layer of each region
	RegionMemTypes           []string // nil: not told; "VRAM" or "DRAM"
	DCPSize                  int
	PCPSize                  int
	PLEBlockLen              *int                 // since version 14; bytes
	RegionMembers            [][]string           // layers of each region; empty: not tracked
	PackedMemberLayouts      []PackedMemberLayout // since version 13, in wire order
	Extension                *Extension           // nil from a stock peer
}

// PackedMemberLayout says where in its region's block a layer's page lies.
type PackedMemberLayout struct {
	Layer  string
	Offset int // bytes from the start of the block
	Page   int // bytes
}

// Keys of the metadata in wire order of version 14, then the extension.
var metadataKeys = [...]string{"engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks",
	"block_lens", "block_strides", "kv_cache_layout", "block_size", "ssm_sizes", "attn_backend_name",
	"physical_blocks_per_logical_kv_block", "region_num_blocks", "region_group_ids", "region_names",
	"region_mem_types", "dcp_size", "pcp_size", "ple_block_len", "region_members", "packed_member_layouts",
	extensionKey}

const (
	metadataRequired = 12 // the first keys have no default
	metadataPLE      = 18
	metadataPacked   = 20
	metadataExt      = 21
)

// AppendAgentMetadata appends the msgpack form that a stock connector of the given version sends:
// 19, 20 or 21 keys for 12, 13 and 14, and one more if m.Extension is set. A value that the version
// cannot carry is an error, since its loss would change what the peer reads.
func AppendAgentMetadata(dst []byte, m *AgentMetadata, version int) ([]byte, error) {
	if err := CheckVersion(version); err != nil {
		return dst, err
	}
	if version < 14 && m.PLEBlockLen != nil {
		return dst, fmt.Errorf("wire: connector version %d has no ple_block_len", version)
	}
	if version < 13 && len(m.PackedMemberLayouts) > 0 {
		return dst, fmt.Errorf("wire: connector version %d has no packed_member_layouts", version)
	}
	if m.Extension != nil {
		if err := m.Extension.Validate(); err != nil {
			return dst, err
		}
	}
	skip := func(i int) bool {
		return i == metadataPLE && version < 14 || i == metadataPacked && version < 13 || i == metadataExt && m.Extension == nil
	}
	n := uint32(0)
	for i := range metadataKeys {
		if !skip(i) {
			n++
		}
	}
	dst = msgp.AppendMapHeader(dst, n)
	for i, k := range metadataKeys {
		if !skip(i) {
			dst = msgp.AppendString(dst, k)
			dst = m.appendField(dst, i)
		}
	}
	return dst, nil
}

func (m *AgentMetadata) appendField(b []byte, i int) []byte {
	switch i {
	case 0:
		return msgp.AppendString(b, string(m.EngineID))
	case 1:
		return msgp.AppendBytes(b, m.AgentMetadata)
	case 2:
		b = msgp.AppendArrayHeader(b, uint32(len(m.KVCachesBaseAddr)))
		for _, a := range m.KVCachesBaseAddr {
			b = msgp.AppendUint64(b, a)
		}
		return b
	case 3:
		return appendInt(b, m.DeviceID)
	case 4:
		return appendInt(b, m.NumBlocks)
	case 5:
		return appendInts(b, m.BlockLens)
	case 6:
		return appendInts(b, m.BlockStrides)
	case 7:
		return msgp.AppendString(b, m.KVCacheLayout)
	case 8:
		return appendInt(b, m.BlockSize)
	case 9:
		return appendInts(b, m.SSMSizes[:])
	case 10:
		return msgp.AppendString(b, m.AttnBackendName)
	case 11:
		return appendInt(b, m.PhysicalBlocksPerLogical)
	}
	return m.appendDefaulted(b, i)
}

// appendDefaulted appends a field that has a default on the wire.
func (m *AgentMetadata) appendDefaulted(b []byte, i int) []byte {
	switch i {
	case 12:
		return appendOptInts(b, m.RegionNumBlocks)
	case 13:
		return appendOptInts(b, m.RegionGroupIDs)
	case 14:
		return appendOptStrs(b, m.RegionNames)
	case 15:
		return appendOptStrs(b, m.RegionMemTypes)
	case 16:
		return appendInt(b, m.DCPSize)
	case 17:
		return appendInt(b, m.PCPSize)
	case metadataPLE:
		if m.PLEBlockLen == nil {
			return msgp.AppendNil(b)
		}
		return appendInt(b, *m.PLEBlockLen)
	case 19:
		b = msgp.AppendArrayHeader(b, uint32(len(m.RegionMembers)))
		for _, layers := range m.RegionMembers {
			b = appendStrs(b, layers)
		}
		return b
	case metadataPacked:
		b = msgp.AppendMapHeader(b, uint32(len(m.PackedMemberLayouts)))
		for _, p := range m.PackedMemberLayouts {
			b = msgp.AppendString(b, p.Layer)
			b = msgp.AppendArrayHeader(b, 2)
			b = appendInt(b, p.Offset)
			b = appendInt(b, p.Page)
		}
		return b
	}
	return m.Extension.append(b)
}

func appendInts(b []byte, v []int) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(v)))
	for _, x := range v {
		b = appendInt(b, x)
	}
	return b
}

func appendOptInts(b []byte, v []int) []byte {
	if v == nil {
		return msgp.AppendNil(b)
	}
	return appendInts(b, v)
}

func appendStrs(b []byte, v []string) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(v)))
	for _, s := range v {
		b = msgp.AppendString(b, s)
	}
	return b
}

func appendOptStrs(b []byte, v []string) []byte {
	if v == nil {
		return msgp.AppendNil(b)
	}
	return appendStrs(b, v)
}
