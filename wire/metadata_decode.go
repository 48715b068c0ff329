package wire

import (
	"math"

	"github.com/kvferry/kvferry/kv"
)

// DecodeAgentMetadata decodes metadata of connector versions 12 to 14 and of kvferry; keys that are
// absent take the stock defaults. Call Validate before using the values.
//
// Stricter than stock: ints must fit 64 bits with sign (base addresses: without), a malformed
// "kvferry" value is an error, and the limits of this package hold.
func DecodeAgentMetadata(b []byte) (*AgentMetadata, error) {
	r := newReader("agent metadata", b, MaxHandshakePayload)
	m := &AgentMetadata{DCPSize: 1, PCPSize: 1}
	var seen keySet
	for range r.mapLen() {
		key := r.key()
		if i := metadataIndex(key); i >= 0 {
			seen.add(i)
			m.decodeField(r, i)
		} else {
			r.skip()
		}
		if r.err != nil {
			break
		}
	}
	r.require(seen, metadataKeys[:metadataRequired]...)
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

func metadataIndex(key []byte) int {
	for i, k := range metadataKeys {
		if string(key) == k {
			return i
		}
	}
	return -1
}

func (m *AgentMetadata) decodeField(r *reader, i int) {
	switch i {
	case 0:
		m.EngineID = kv.EngineID(r.str(MaxText))
	case 1:
		m.AgentMetadata = r.bin(MaxHandshakePayload)
	case 2:
		m.KVCachesBaseAddr = r.addrs()
	case 3:
		m.DeviceID = r.int()
	case 4:
		m.NumBlocks = r.int()
	case 5:
		m.BlockLens = r.anyInts()
	case 6:
		m.BlockStrides = r.anyInts()
	case 7:
		m.KVCacheLayout = r.str(MaxText)
	case 8:
		m.BlockSize = r.int()
	case 9:
		m.SSMSizes[0], m.SSMSizes[1] = r.pair()
	case 10:
		m.AttnBackendName = r.str(MaxText)
	case 11:
		m.PhysicalBlocksPerLogical = r.int()
	default:
		m.decodeDefaulted(r, i)
	}
}

// decodeDefaulted decodes a field that has a default on the wire.
func (m *AgentMetadata) decodeDefaulted(r *reader, i int) {
	switch i {
	case 12:
		m.RegionNumBlocks = r.optInts()
	case 13:
		m.RegionGroupIDs = r.optInts()
	case 14:
		m.RegionNames = r.optStrs()
	case 15:
		m.RegionMemTypes = r.optStrs()
	case 16:
		m.DCPSize = r.int()
	case 17:
		m.PCPSize = r.int()
	case metadataPLE:
		m.PLEBlockLen = nil
		if !r.isNil() {
			v := r.int()
			m.PLEBlockLen = &v
		}
	case 19:
		m.RegionMembers = r.regionMembers()
	case metadataPacked:
		m.PackedMemberLayouts = r.packedLayouts()
	case metadataExt:
		m.Extension = r.extension()
	}
}

func (r *reader) addrs() []uint64 {
	n := r.arrayLen(MaxRegions)
	out := make([]uint64, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		out = append(out, r.uint())
	}
	return out
}

func (r *reader) anyInts() []int { return r.ints(MaxRegions, math.MinInt, math.MaxInt) }

func (r *reader) optInts() []int {
	if r.isNil() {
		return nil
	}
	return r.anyInts()
}

func (r *reader) optStrs() []string {
	if r.isNil() {
		return nil
	}
	return r.strs(MaxRegions, MaxText)
}

// pair reads an array of exactly two ints.
func (r *reader) pair() (a, b int) {
	if n := r.arrayLen(math.MaxInt); r.err == nil && n != 2 {
		r.fail(ErrType, "has %d elements instead of 2", n)
	}
	return r.int(), r.int()
}

func (r *reader) regionMembers() [][]string {
	n := r.arrayLen(MaxRegions)
	if n == 0 {
		return nil
	}
	out, left := make([][]string, 0, n), MaxRegionMembers
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		m := r.arrayLen(left)
		left -= m
		layers := make([]string, 0, m)
		for j := 0; j < m && r.err == nil; j++ {
			layers = append(layers, r.str(MaxText))
		}
		out = append(out, layers)
	}
	return out
}

// packedLayouts keeps the order of the map. A layer that comes twice keeps its first place and takes
// its last value, as in Python.
func (r *reader) packedLayouts() []PackedMemberLayout {
	n := r.mapLen()
	if n > MaxRegionMembers {
		r.fail(ErrLimit, "has %d layers, more than %d", n, MaxRegionMembers)
	}
	if n == 0 || r.err != nil {
		return nil
	}
	out := make([]PackedMemberLayout, 0, n)
	place := make(map[string]int, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		p := PackedMemberLayout{Layer: r.str(MaxText)}
		p.Offset, p.Page = r.pair()
		if at, twice := place[p.Layer]; twice {
			out[at] = p
			continue
		}
		place[p.Layer] = len(out)
		out = append(out, p)
	}
	return out
}
