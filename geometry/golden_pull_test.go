package geometry

import (
	"encoding/json"
	"errors"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/kv"
)

// goldenPull is the part of a capture of two stock engines that pull which this package is compared
// with.
type goldenPull struct {
	golden
	Cases []struct {
		Name        string `json:"name"`
		Allocations []struct {
			Engine  string `json:"engine"`
			Request string `json:"request_id"`
			Prompt  int    `json:"num_prompt_tokens"`
		} `json:"scheduler_allocations"`
		Inputs []struct {
			Request  string     `json:"D_request"`
			Blocks   [][]uint32 `json:"D_logical_blocks"`
			Computed []int      `json:"D_num_computed_blocks"`
			Remote   struct {
				Blocks [][]uint32 `json:"block_ids"`
				Tokens int        `json:"num_tokens"`
			} `json:"remote"`
		} `json:"inputs"`
		Posted []struct {
			Op        string   `json:"op"`
			LocalIdx  []uint32 `json:"local_idx"`
			RemoteIdx []uint32 `json:"remote_idx"`
		} `json:"posted"`
	} `json:"cases"`
}

func loadGoldenPull(t *testing.T) goldenPull {
	t.Helper()
	raw, err := os.ReadFile("testdata/geometry-pull-tp1-tp1-block32.json")
	if err != nil {
		t.Fatal(err)
	}
	var g goldenPull
	if err := json.Unmarshal(raw, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

// Every READ that the stock D posted, index by index, aligned at the end and by position. The capture
// has P's metadata only; D's regions are those of its own prepared list.
func TestGoldenReads(t *testing.T) {
	g := loadGoldenPull(t)
	p := g.layout(t, "enginep")
	d := p
	for _, l := range g.Lists {
		if l.Name != "engined.r0.local0" {
			continue
		}
		d.Regions = append([]kv.Region(nil), p.Regions...)
		per := len(l.Rows) / len(d.Regions)
		for i := range d.Regions {
			d.Regions[i].Base, d.Regions[i].NumBlocks = l.Rows[i*per][0], per
		}
		var want []kv.Descriptor
		for _, r := range l.Rows {
			want = append(want, kv.Descriptor{Addr: r[0], Length: r[1], Device: uint32(r[2])})
		}
		if diff := cmp.Diff(want, d.Rows()); diff != "" {
			t.Fatal(diff)
		}
	}
	compared := 0
	for _, c := range g.Cases {
		done := map[string]bool{}
		posted := c.Posted
		for _, in := range c.Inputs {
			if done[in.Request] {
				continue // the same request again after its handshake
			}
			done[in.Request] = true
			prompt := 0
			for _, a := range c.Allocations {
				if a.Request == in.Request {
					prompt = a.Prompt
				}
			}
			have := Have{Blocks: blockIDs(in.Remote.Blocks[0]), NumTokens: min(prompt, in.Remote.Tokens)}
			start := in.Computed[0] * p.BlockSize
			positioned, err := PlanRead(d, p, Want{Blocks: blockIDs(in.Blocks[0]), Positioned: true, StartToken: start, NumTokens: prompt - start}, have)
			if err != nil {
				t.Errorf("%s: %v", c.Name, err)
				continue
			}
			atEnd, err := PlanRead(d, p, Want{Blocks: blockIDs(in.Blocks[0])}, have)
			if diff := cmp.Diff(positioned, atEnd); diff != "" || err != nil {
				t.Errorf("%s: by position and at the end: %v %s", c.Name, err, diff)
			}
			if len(posted) == 0 || posted[0].Op != "READ" {
				t.Errorf("%s: no READ for %s", c.Name, in.Request)
				continue
			}
			r := posted[0]
			posted = posted[1:]
			same := cmp.Equal(r.LocalIdx, positioned.Local) && cmp.Equal(r.RemoteIdx, positioned.Remote)
			switch {
			case c.Name == stockWrong && same:
				t.Errorf("%s: planned as the stock engine did, which is wrong", c.Name)
			case c.Name != stockWrong && !same:
				t.Errorf("%s: local %s remote %s", c.Name, cmp.Diff(r.LocalIdx, positioned.Local), cmp.Diff(r.RemoteIdx, positioned.Remote))
			}
			compared++
		}
		if len(posted) > 0 {
			t.Errorf("%s: %d READs were not compared", c.Name, len(posted))
		}
	}
	if compared < 18 {
		t.Errorf("compared only %d READs", compared)
	}
}

// A READ refuses what a stock D trusts: P's blocks beyond its regions (H7), too few of them (H22).
func TestReadRefusals(t *testing.T) {
	g := loadGoldenPull(t)
	p := g.layout(t, "enginep")
	want := Want{Blocks: []kv.BlockID{1, 2, 3}, Positioned: true, NumTokens: 70}
	var rangeErr *RangeError
	if _, err := PlanRead(p, p, want, Have{Blocks: []kv.BlockID{1, 40, 2}, NumTokens: 70}); !errors.As(err, &rangeErr) || rangeErr.Side != Prefill {
		t.Errorf("beyond the region: %v", err)
	}
	var pairErr *PairError
	if _, err := PlanRead(p, p, want, Have{Blocks: []kv.BlockID{36, 39}, NumTokens: 70}); !errors.As(err, &pairErr) {
		t.Errorf("too few blocks: %v", err)
	}
	if _, err := PlanRead(p, p, Want{Blocks: []kv.BlockID{1, 2, 36 + 4}, Positioned: true, NumTokens: 70}, Have{Blocks: []kv.BlockID{1, 2, 3}, NumTokens: 70}); !errors.As(err, &rangeErr) || rangeErr.Side != Decode {
		t.Errorf("our own block: %v", err)
	}
}
