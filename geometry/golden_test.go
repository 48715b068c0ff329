package geometry

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/kv"
)

// golden is the part of a capture of two stock engines that this package is compared with.
type golden struct {
	Handshake []struct {
		Engine   string `json:"engine"`
		Metadata struct {
			Bases     []uint64 `json:"kv_caches_base_addr"`
			Device    uint32   `json:"device_id"`
			Lens      []uint64 `json:"block_lens"`
			Strides   []uint64 `json:"block_strides"`
			Order     string   `json:"kv_cache_layout"`
			BlockSize int      `json:"block_size"`
			Ratio     int      `json:"physical_blocks_per_logical_kv_block"`
			NumBlocks []int    `json:"region_num_blocks"`
			Names     []string `json:"region_names"`
		} `json:"metadata"`
	} `json:"handshake_metadata"`
	Lists []struct {
		Name string      `json:"name"`
		Rows [][3]uint64 `json:"rows_addr_len_dev"`
	} `json:"descriptor_lists"`
	Cases []struct {
		Name        string `json:"name"`
		Allocations []struct {
			Engine  string `json:"engine"`
			Request string `json:"request_id"`
			Prompt  int    `json:"num_prompt_tokens"`
		} `json:"scheduler_allocations"`
		Inputs []struct {
			Request      string       `json:"P_request"`
			Blocks       [][]uint32   `json:"P_logical_blocks"`
			Registration registration `json:"registration"`
		} `json:"inputs"`
		Posted []struct {
			LocalIdx  []uint32 `json:"local_idx"`
			RemoteIdx []uint32 `json:"remote_idx"`
			Notif     string   `json:"notif"`
		} `json:"posted"`
	} `json:"cases"`
}

type registration struct {
	Request string     `json:"request_id"`
	Blocks  [][]uint32 `json:"local_block_ids"`
}

// The one request of the capture in which the stock pair gave a wrong answer: P computed past the
// prompt and its last block, which holds no prompt token, was paired with D's (H4).
const stockWrong = "P_max_tokens_8_crosses_block"

func loadGolden(t *testing.T) golden {
	t.Helper()
	raw, err := os.ReadFile("testdata/geometry-push-tp1-tp1-block32.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(raw, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g golden) layout(t *testing.T, engine string) Layout {
	t.Helper()
	for _, h := range g.Handshake {
		if h.Engine != engine {
			continue
		}
		m := h.Metadata
		l := Layout{TP: 1, PP: 1, BlockSize: m.BlockSize, Ratio: m.Ratio, Order: m.Order}
		for i := range m.Bases {
			l.Regions = append(l.Regions, kv.Region{Base: m.Bases[i], BlockLen: m.Lens[i], Stride: m.Strides[i],
				NumBlocks: m.NumBlocks[i], Name: m.Names[i], Device: m.Device})
		}
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		return l
	}
	t.Fatalf("no metadata of %s", engine)
	return Layout{}
}

// Every descriptor list that the stock engines prepared, row by row.
func TestGoldenDescriptorRows(t *testing.T) {
	g := loadGolden(t)
	compared := 0
	for name, owner := range map[string]string{
		"engined.r0.local0": "engined", "engined.r0.remote0": "enginep",
		"enginep.r0.local0": "enginep", "enginep.r0.remote0": "engined",
	} {
		for _, l := range g.Lists {
			if l.Name != name {
				continue
			}
			var want []kv.Descriptor
			for _, r := range l.Rows {
				want = append(want, kv.Descriptor{Addr: r[0], Length: r[1], Device: uint32(r[2])})
			}
			if d := cmp.Diff(want, g.layout(t, owner).Rows()); d != "" {
				t.Errorf("%s: %s", name, d)
			}
			compared++
		}
	}
	if compared != 4 || len(g.Lists) != 4 {
		t.Errorf("compared %d lists, the capture has %d, want 4", compared, len(g.Lists))
	}
}

// Every WRITE that the stock P posted, index by index, as a stock registration and as one of ours.
func TestGoldenIndices(t *testing.T) {
	g := loadGolden(t)
	p, d := g.layout(t, "enginep"), g.layout(t, "engined")
	if err := Check(p, d, true); err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, c := range g.Cases {
		posted := 0
		seen := map[string]bool{}
		for _, in := range c.Inputs {
			key := in.Request + in.Registration.Request
			if seen[key] {
				continue // the same registration again after its handshake
			}
			seen[key] = true
			tokens := 0
			for _, a := range c.Allocations {
				if a.Engine == "enginep" && a.Request == in.Request {
					tokens = a.Prompt
				}
			}
			have := Have{Blocks: blockIDs(in.Blocks[0]), NumTokens: tokens}
			want := Want{Blocks: blockIDs(in.Registration.Blocks[0])}
			plan, err := PlanWrite(p, d, have, want)
			if err != nil {
				t.Errorf("%s: %v", c.Name, err)
				continue
			}
			all := (tokens + p.BlockSize - 1) / p.BlockSize
			want.Positioned = true
			want.StartToken = (all - len(want.Blocks)) * p.BlockSize
			want.NumTokens = tokens - want.StartToken
			ours, err := PlanWrite(p, d, have, want)
			if err != nil {
				t.Errorf("%s, positioned: %v", c.Name, err)
			}
			if d := cmp.Diff(plan, ours); d != "" {
				t.Errorf("%s: positioned and stock registration differ: %s", c.Name, d)
			}
			for _, w := range c.Posted {
				if !strings.HasPrefix(w.Notif, in.Registration.Request+":") {
					continue
				}
				posted++
				same := cmp.Equal(w.LocalIdx, plan.Local) && cmp.Equal(w.RemoteIdx, plan.Remote)
				switch {
				case c.Name == stockWrong && same:
					t.Errorf("%s: planned as the stock engine did, which is wrong", c.Name)
				case c.Name != stockWrong && !same:
					t.Errorf("%s: local %s remote %s", c.Name, cmp.Diff(w.LocalIdx, plan.Local), cmp.Diff(w.RemoteIdx, plan.Remote))
				}
			}
		}
		if posted != len(c.Posted) {
			t.Errorf("%s: compared %d of %d transfers", c.Name, posted, len(c.Posted))
		}
		compared += posted
	}
	if compared < 25 {
		t.Errorf("compared only %d transfers", compared)
	}
}

// For the request on which the stock pair fails, the block that holds the prompt is the one moved.
func TestGoldenStockFault(t *testing.T) {
	g := loadGolden(t)
	p, d := g.layout(t, "enginep"), g.layout(t, "engined")
	plan, err := PlanWrite(p, d, Have{Blocks: []kv.BlockID{23, 24}, NumTokens: 30}, Want{Blocks: []kv.BlockID{20}})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]uint32{23, 63, 103, 143}, plan.Local); d != "" {
		t.Error(d)
	}
}

func blockIDs(in []uint32) []kv.BlockID {
	out := make([]kv.BlockID, len(in))
	for i, b := range in {
		out[i] = kv.BlockID(b)
	}
	return out
}
