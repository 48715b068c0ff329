package wire

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

// metadataOf builds metadata from a value of the vectors, without the decoder. Go's maps have no
// order, so the packed layouts are sorted; the vectors have them sorted too.
func metadataOf(t testing.TB, v any) *AgentMetadata {
	m := v.(map[string]any)
	ssm := numList(t, m["ssm_sizes"])
	out := &AgentMetadata{
		EngineID:                 kv.EngineID(m["engine_id"].(string)),
		AgentMetadata:            m["agent_metadata"].([]byte),
		KVCachesBaseAddr:         []uint64{},
		DeviceID:                 num(t, m["device_id"]),
		NumBlocks:                num(t, m["num_blocks"]),
		BlockLens:                numList(t, m["block_lens"]),
		BlockStrides:             numList(t, m["block_strides"]),
		KVCacheLayout:            m["kv_cache_layout"].(string),
		BlockSize:                num(t, m["block_size"]),
		SSMSizes:                 [2]int{ssm[0], ssm[1]},
		AttnBackendName:          m["attn_backend_name"].(string),
		PhysicalBlocksPerLogical: num(t, m["physical_blocks_per_logical_kv_block"]),
		RegionNumBlocks:          numList(t, m["region_num_blocks"]),
		RegionGroupIDs:           numList(t, m["region_group_ids"]),
		RegionNames:              strList(m["region_names"]),
		RegionMemTypes:           strList(m["region_mem_types"]),
		DCPSize:                  num(t, m["dcp_size"]),
		PCPSize:                  num(t, m["pcp_size"]),
	}
	for _, a := range m["kv_caches_base_addr"].([]any) {
		out.KVCachesBaseAddr = append(out.KVCachesBaseAddr, addr(t, a))
	}
	if m["ple_block_len"] != nil {
		n := num(t, m["ple_block_len"])
		out.PLEBlockLen = &n
	}
	for _, layers := range m["region_members"].([]any) {
		out.RegionMembers = append(out.RegionMembers, strList(layers))
	}
	for layer, pair := range m["packed_member_layouts"].(map[string]any) {
		p := numList(t, pair)
		out.PackedMemberLayouts = append(out.PackedMemberLayouts, PackedMemberLayout{layer, p[0], p[1]})
	}
	slices.SortFunc(out.PackedMemberLayouts, func(a, b PackedMemberLayout) int { return strings.Compare(a.Layer, b.Layer) })
	return out
}

func addr(t testing.TB, v any) uint64 {
	var a uint64
	for _, c := range v.(interface{ String() string }).String() {
		if c < '0' || c > '9' {
			t.Fatalf("address %v", v)
		}
		a = a*10 + uint64(c-'0')
	}
	return a
}

func TestMetadataVectors(t *testing.T) {
	for _, v := range codecVectors(t, "codec-valid", "NixlAgentMetadata") {
		want := metadataOf(t, value(t, v.Value))
		b, err := AppendAgentMetadata(nil, want, ConnectorVersion)
		if err != nil {
			t.Fatal(err)
		}
		v.expectBytes(t, b)
		got, err := DecodeAgentMetadata(b)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v %s", v.Name, err, d)
		}
	}
}

func TestMetadataAcceptsWhatStockAccepts(t *testing.T) {
	for _, v := range codecVectors(t, "codec-invalid", "NixlAgentMetadata") {
		got, err := DecodeAgentMetadata(*v.Hex)
		if (err == nil) != v.Accepted {
			t.Errorf("%s: %v, stock says %q", v.Name, err, v.Error)
			continue
		}
		if v.Accepted {
			if d := cmp.Diff(metadataOf(t, value(t, v.Decoded)), got); d != "" {
				t.Errorf("%s: %s", v.Name, d)
			}
		}
	}
}

func TestMetadataNamesTheMissingKey(t *testing.T) {
	for _, v := range codecVectors(t, "codec-invalid", "NixlAgentMetadata") {
		key, ok := strings.CutPrefix(v.Name, "agent_missing_")
		if !ok {
			continue
		}
		_, err := DecodeAgentMetadata(*v.Hex)
		var de *DecodeError
		if !errors.As(err, &de) || de.Field != key || !errors.Is(err, ErrMissing) {
			t.Errorf("%s: %v", v.Name, err)
		}
	}
}

// The header of each version, and the keys that it lacks (nixl-connector.md, section 0.1).
func TestMetadataVersions(t *testing.T) {
	m := sampleMetadata()
	for version, want := range map[int]struct {
		header   string
		ple, pkd bool
	}{
		12: {"\xde\x00\x13", false, false},
		13: {"\xde\x00\x14", false, true},
		14: {"\xde\x00\x15", true, true},
	} {
		b, err := AppendAgentMetadata(nil, m, version)
		if err != nil || !strings.HasPrefix(string(b), want.header) {
			t.Errorf("version %d: header % x, %v", version, b[:3], err)
		}
		if bytes.Contains(b, []byte("ple_block_len")) != want.ple || bytes.Contains(b, []byte("packed_member_layouts")) != want.pkd {
			t.Errorf("version %d has the wrong keys", version)
		}
		got, err := DecodeAgentMetadata(b)
		if d := cmp.Diff(m, got); d != "" || err != nil {
			t.Errorf("version %d: %v %s", version, err, d)
		}
		withExt := *m
		withExt.Extension = &Extension{Version: 1, Instance: "i"}
		if b, err := AppendAgentMetadata(nil, &withExt, version); err != nil || b[2] != want.header[2]+1 {
			t.Errorf("version %d with extension: header % x, %v", version, b[:3], err)
		}
	}
}

func TestMetadataVersionCannotLoseValues(t *testing.T) {
	ple := 512
	withPLE, packed := *sampleMetadata(), *sampleMetadata()
	withPLE.PLEBlockLen = &ple
	packed.PackedMemberLayouts = []PackedMemberLayout{{"a", 0, 1}}
	for _, c := range []struct {
		m       *AgentMetadata
		version int
		ok      bool
	}{
		{&withPLE, 12, false}, {&withPLE, 13, false}, {&withPLE, 14, true},
		{&packed, 12, false}, {&packed, 13, true}, {&packed, 14, true},
		{sampleMetadata(), 11, false}, {sampleMetadata(), 15, false},
	} {
		if b, err := AppendAgentMetadata(nil, c.m, c.version); (err == nil) != c.ok || !c.ok && len(b) != 0 {
			t.Errorf("version %d: %v", c.version, err)
		}
	}
}

func sampleMetadata() *AgentMetadata {
	return &AgentMetadata{
		EngineID: "engine-p", AgentMetadata: []byte{1, 2, 3},
		KVCachesBaseAddr: []uint64{0x7f0000000000, 0x7f0000100000},
		NumBlocks:        40, BlockLens: []int{65536, 65536}, BlockStrides: []int{65536, 131072},
		KVCacheLayout: "LBHNC", BlockSize: 32, AttnBackendName: "CPU_ATTN", PhysicalBlocksPerLogical: 1,
		DCPSize: 1, PCPSize: 1,
	}
}

func TestMetadataRegions(t *testing.T) {
	m := sampleMetadata()
	m.DeviceID = 3
	m.RegionNumBlocks = []int{40, 7}
	m.RegionGroupIDs = []int{0, -1}
	m.RegionNames = []string{"a", "b"}
	m.RegionMemTypes = []string{"VRAM", "DRAM"}
	got, err := m.Regions()
	want := []kv.Region{
		{Base: 0x7f0000000000, BlockLen: 65536, Stride: 65536, NumBlocks: 40, Group: 0, Name: "a", Device: 3},
		{Base: 0x7f0000100000, BlockLen: 65536, Stride: 131072, NumBlocks: 7, Group: -1, Name: "b", Device: 3},
	}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
}

func TestMetadataValidate(t *testing.T) {
	if err := sampleMetadata().Validate(); err != nil {
		t.Fatal(err)
	}
	for field, mutations := range map[string][]func(*AgentMetadata){
		"engine_id": {
			func(m *AgentMetadata) { m.EngineID = "" },
			func(m *AgentMetadata) { m.EngineID = kv.EngineID(strings.Repeat("e", MaxIDLen+1)) }},
		"kv_caches_base_addr": {
			func(m *AgentMetadata) { m.KVCachesBaseAddr = nil },
			func(m *AgentMetadata) { m.KVCachesBaseAddr[1] = 0 },
			func(m *AgentMetadata) { m.KVCachesBaseAddr[1] = 1<<64 - 1 },
			func(m *AgentMetadata) { m.BlockStrides[0] = 1 << 62 },
			func(m *AgentMetadata) { m.BlockStrides[0]-- },
			func(m *AgentMetadata) { m.RegionNumBlocks = []int{40, 0} },
			func(m *AgentMetadata) { m.RegionNumBlocks = []int{40, 1 << 62} }},
		"device_id": {
			func(m *AgentMetadata) { m.DeviceID = -1 },
			func(m *AgentMetadata) { m.DeviceID = 1 << 32 }},
		"num_blocks": {
			func(m *AgentMetadata) { m.NumBlocks = 0 },
			func(m *AgentMetadata) { m.NumBlocks = -40 },
			func(m *AgentMetadata) { m.NumBlocks = 1 << 32 },
			func(m *AgentMetadata) {
				m.RegionNumBlocks = []int{40, 1 << 32}
				m.BlockLens[1], m.BlockStrides[1] = 1, 1
			}},
		"block_lens": {
			func(m *AgentMetadata) { m.BlockLens = m.BlockLens[:1] },
			func(m *AgentMetadata) { m.BlockLens[0] = 0 },
			func(m *AgentMetadata) { m.BlockLens[0] = -1 },
			func(m *AgentMetadata) { m.BlockStrides[0] = -65536 }},
		"block_strides":                        {func(m *AgentMetadata) { m.BlockStrides = append(m.BlockStrides, 1) }},
		"block_size":                           {func(m *AgentMetadata) { m.BlockSize = 0 }},
		"ssm_sizes":                            {func(m *AgentMetadata) { m.SSMSizes[0] = -1 }, func(m *AgentMetadata) { m.SSMSizes[1] = -1 }},
		"physical_blocks_per_logical_kv_block": {func(m *AgentMetadata) { m.PhysicalBlocksPerLogical = 0 }},
		"region_num_blocks":                    {func(m *AgentMetadata) { m.RegionNumBlocks = []int{} }},
		"region_group_ids": {
			func(m *AgentMetadata) { m.RegionGroupIDs = []int{0} },
			func(m *AgentMetadata) { m.RegionGroupIDs = []int{0, -2} },
			func(m *AgentMetadata) { m.RegionGroupIDs = []int{0, MaxGroups} }},
		"region_names": {func(m *AgentMetadata) { m.RegionNames = []string{"a", "b", "c"} }},
		"region_mem_types": {
			func(m *AgentMetadata) { m.RegionMemTypes = []string{"DRAM"} },
			func(m *AgentMetadata) { m.RegionMemTypes = []string{"DRAM", "FILE"} }},
		"region_members": {func(m *AgentMetadata) { m.RegionMembers = [][]string{{"a"}} }},
		"dcp_size":       {func(m *AgentMetadata) { m.DCPSize = 0 }},
		"pcp_size":       {func(m *AgentMetadata) { m.PCPSize = MaxRanks + 1 }},
		"ple_block_len":  {func(m *AgentMetadata) { m.PLEBlockLen = new(int) }},
		"packed_member_layouts": {
			func(m *AgentMetadata) { m.PackedMemberLayouts = []PackedMemberLayout{{"a", -1, 1}} },
			func(m *AgentMetadata) { m.PackedMemberLayouts = []PackedMemberLayout{{"a", 0, 0}} },
			func(m *AgentMetadata) { m.PackedMemberLayouts = []PackedMemberLayout{{"a", 1<<63 - 1, 1}} }},
	} {
		for i, mutate := range mutations {
			m := sampleMetadata()
			mutate(m)
			err := m.Validate()
			var de *DecodeError
			if !errors.As(err, &de) || de.Field != field {
				t.Errorf("%s mutation %d: %v", field, i, err)
			}
		}
	}
}

// Metadata that announces more than it has makes the decoder allocate next to nothing.
func TestMetadataHostileSizes(t *testing.T) {
	inputs := map[string][]byte{
		"map":  []byte("\xdf\xff\xff\xff\xff"),
		"skip": append([]byte("\x81\xa1x"), bytes.Repeat([]byte{0xdd, 0xff, 0xff, 0xff, 0xff}, 100)...),
		"deep": append([]byte("\x81\xa1x"), bytes.Repeat([]byte{0x91}, 100000)...),
	}
	for _, k := range metadataKeys {
		head := msgp.AppendString([]byte{0x81}, k)
		for name, header := range map[string]string{"str": "\xdb", "bin": "\xc6", "array": "\xdd", "map": "\xdf"} {
			inputs[k+" as "+name] = append(slices.Clone(head), header+"\xff\xff\xff\xff"...)
		}
	}
	inputs["region_members"] = append([]byte("\x81\xaeregion_members\xdd\x00\x00\xff\xff"), bytes.Repeat([]byte{0x90}, 65535)...)
	packed := []byte("\x81\xb5packed_member_layouts\xdf\x00\x01\x00\x00")
	for i := range 65536 {
		packed = msgp.AppendString(packed, string([]byte{'a' + byte(i>>12), 'a' + byte(i>>8&15), 'a' + byte(i>>4&15), 'a' + byte(i&15)}))
		packed = append(packed, 0x92, 0, 1)
	}
	inputs["packed"] = packed
	for name, b := range inputs {
		expectAllocated(t, name, len(b), func() {
			if _, err := DecodeAgentMetadata(b); err == nil {
				t.Errorf("%s: accepted", name)
			}
		})
	}
}

func drawMetadata(t *rapid.T) *AgentMetadata {
	ints := rapid.SliceOfN(rapid.Int(), 0, 20)
	strs := rapid.SliceOfN(rapid.String(), 0, 5)
	m := &AgentMetadata{
		EngineID:                 kv.EngineID(rapid.String().Draw(t, "engine")),
		AgentMetadata:            rapid.SliceOf(rapid.Byte()).Draw(t, "blob"),
		KVCachesBaseAddr:         rapid.SliceOfN(rapid.Uint64(), 0, 20).Draw(t, "base"),
		DeviceID:                 rapid.Int().Draw(t, "device"),
		NumBlocks:                rapid.Int().Draw(t, "blocks"),
		BlockLens:                ints.Draw(t, "lens"),
		BlockStrides:             ints.Draw(t, "strides"),
		KVCacheLayout:            rapid.String().Draw(t, "layout"),
		BlockSize:                rapid.Int().Draw(t, "size"),
		SSMSizes:                 [2]int{rapid.Int().Draw(t, "conv"), rapid.Int().Draw(t, "ssm")},
		AttnBackendName:          rapid.String().Draw(t, "backend"),
		PhysicalBlocksPerLogical: rapid.Int().Draw(t, "ratio"),
		DCPSize:                  rapid.Int().Draw(t, "dcp"),
		PCPSize:                  rapid.Int().Draw(t, "pcp"),
	}
	if rapid.Bool().Draw(t, "optional") {
		m.RegionNumBlocks, m.RegionGroupIDs = ints.Draw(t, "nums"), ints.Draw(t, "groups")
		m.RegionNames, m.RegionMemTypes = strs.Draw(t, "names"), strs.Draw(t, "types")
		n := rapid.Int().Draw(t, "ple")
		m.PLEBlockLen = &n
		if members := rapid.SliceOfN(strs, 0, 5).Draw(t, "members"); len(members) > 0 {
			m.RegionMembers = members
		}
		for _, layer := range rapid.SliceOfNDistinct(rapid.String(), 0, 5, rapid.ID).Draw(t, "layers") {
			m.PackedMemberLayouts = append(m.PackedMemberLayouts, PackedMemberLayout{layer, rapid.Int().Draw(t, "at"), rapid.Int().Draw(t, "page")})
		}
		m.Extension = drawExtension(t)
	}
	return m
}

func TestMetadataRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawMetadata(t)
		b, err := AppendAgentMetadata(nil, m, ConnectorVersion)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeAgentMetadata(b)
		if d := cmp.Diff(m, got); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
	})
}

func FuzzDecodeAgentMetadata(f *testing.F) {
	for _, v := range codecVectors(f, "codec-invalid", "NixlAgentMetadata") {
		f.Add([]byte(*v.Hex))
	}
	for _, v := range codecVectors(f, "codec-valid", "NixlAgentMetadata") {
		if v.Hex != nil {
			f.Add([]byte(*v.Hex))
		}
	}
	m := sampleMetadata()
	m.Extension = sampleExtension()
	seed, err := AppendAgentMetadata(nil, m, 13)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeAgentMetadata(b)
		if err != nil {
			return
		}
		_ = m.Validate()
		once, err := AppendAgentMetadata(nil, m, ConnectorVersion)
		if err != nil {
			t.Fatal(err)
		}
		again, err := DecodeAgentMetadata(once)
		if d := cmp.Diff(m, again); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
	})
}
