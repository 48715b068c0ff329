package geometry

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// The oracle works on single bytes and shares no code with the package: it writes down, for every
// token of the prompt and every region, which byte belongs to it on either side, moves the bytes of
// the wanted tokens, and compares with what the plan's descriptors move.

// byteAt is the address of byte off of the given token in one region, by first principles: the
// token lies in logical block token/(size*ratio) of the list, in its kernel block
// (token/size)%ratio, at byte off of the kernel block. Bytes of a kernel block are not divided
// among its tokens: a kernel block moves as a whole.
func byteAt(l Layout, region int, blocks []kv.BlockID, token int, off uint64) uint64 {
	logical := blocks[token/(l.BlockSize*l.Ratio)]
	kernel := uint64(logical)*uint64(l.Ratio) + uint64(token/l.BlockSize%l.Ratio)
	return l.Regions[region].Base + kernel*l.Regions[region].Stride + off
}

func oracle(p, d Layout, have Have, want Want, start int) map[uint64]uint64 {
	moves := map[uint64]uint64{}
	for token := start; token < have.NumTokens; token++ {
		for r := range p.Regions {
			for off := range p.Regions[r].BlockLen {
				to := byteAt(d, r, want.Blocks, token-start, off)
				moves[to] = byteAt(p, r, have.Blocks, token, off)
			}
		}
	}
	return moves
}

func moved(t *rapid.T, p, d Layout, plan Plan) map[uint64]uint64 {
	moves := map[uint64]uint64{}
	rows, theirs := p.Rows(), d.Rows()
	if len(plan.Local) != len(plan.Remote) {
		t.Fatalf("%d local and %d remote indices", len(plan.Local), len(plan.Remote))
	}
	for i := range plan.Local {
		from, to := rows[plan.Local[i]], theirs[plan.Remote[i]]
		if from.Length != to.Length {
			t.Fatalf("descriptor %d moves %d bytes into %d", i, from.Length, to.Length)
		}
		for off := range from.Length {
			if _, twice := moves[to.Addr+off]; twice {
				t.Fatalf("byte %#x is written twice", to.Addr+off)
			}
			moves[to.Addr+off] = from.Addr + off
		}
	}
	return moves
}

func drawLayouts(t *rapid.T) (p, d Layout) {
	size := rapid.IntRange(1, 5).Draw(t, "block size")
	p = Layout{TP: 1, PP: 1, BlockSize: size, Ratio: rapid.IntRange(1, 3).Draw(t, "P ratio"), Order: "LBHNC"}
	d = p
	d.Ratio = rapid.IntRange(1, 3).Draw(t, "D ratio")
	n := rapid.IntRange(1, 3).Draw(t, "regions")
	base := uint64(4096)
	for i, side := range []*Layout{&p, &d} {
		for r := range n {
			blocks := rapid.IntRange(6, 9).Draw(t, "blocks") * side.Ratio
			blockLen := uint64(r + 1)
			stride := blockLen + uint64(rapid.IntRange(0, 3).Draw(t, "gap"))
			side.Regions = append(side.Regions, kv.Region{Base: base, BlockLen: blockLen, Stride: stride, NumBlocks: blocks})
			base += uint64(blocks)*stride + uint64(100*(i+1))
		}
	}
	return p, d
}

func drawBlocks(t *rapid.T, l Layout, n int, name string) []kv.BlockID {
	most := l.Regions[0].NumBlocks
	for _, r := range l.Regions {
		most = min(most, r.NumBlocks)
	}
	ids := make([]kv.BlockID, most/l.Ratio)
	for i := range ids {
		ids[i] = kv.BlockID(i)
	}
	return rapid.Permutation(ids).Draw(t, name)[:n]
}

// Whatever the prompt, prefix hit, ratios, strides and ids are: exactly the bytes of the wanted
// tokens' kernel blocks move, each to the place of the same token, for both kinds of registration.
func TestPlanAgainstByteMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, d := drawLayouts(t)
		most := min(6*p.LogicalTokens(), 6*d.LogicalTokens())
		tokens := rapid.IntRange(1, most).Draw(t, "tokens")
		have := Have{NumTokens: tokens}
		have.Blocks = drawBlocks(t, p, ceilBy(tokens, p.LogicalTokens()), "P blocks")
		all := ceilBy(tokens, d.LogicalTokens())
		hit := rapid.IntRange(0, all-1).Draw(t, "prefix hit")
		want := Want{Blocks: drawBlocks(t, d, all-hit, "D blocks"), Positioned: rapid.Bool().Draw(t, "positioned")}
		start := hit * d.LogicalTokens()
		if want.Positioned {
			want.StartToken, want.NumTokens = start, tokens-start
		}
		plan, err := PlanWrite(p, d, have, want)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(oracle(p, d, have, want, start), moved(t, p, d, plan)); diff != "" {
			t.Fatalf("bytes: %s", diff)
		}
		if got := int64(len(moved(t, p, d, plan))); got != plan.Bytes {
			t.Fatalf("plan says %d bytes, moves %d", plan.Bytes, got)
		}
		// P's list may be longer than the prompt; what is beyond never moves.
		if len(have.Blocks) < 6 {
			long := have
			long.Blocks = append(append([]kv.BlockID(nil), have.Blocks...), have.Blocks[0])
			longer, err := PlanWrite(p, d, long, want)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(plan, longer); diff != "" {
				t.Fatalf("a block beyond the prompt changed the plan: %s", diff)
			}
		}
		// Every written byte lies in the ranges that D grants for its blocks.
		ranges, err := d.Ranges(want.Blocks, Decode)
		if err != nil {
			t.Fatal(err)
		}
		granted := map[uint64]bool{}
		for _, r := range ranges {
			for off := range r.Length {
				granted[r.Addr+off] = true
			}
		}
		for to := range moved(t, p, d, plan) {
			if !granted[to] {
				t.Fatalf("byte %#x is outside the grant", to)
			}
		}
	})
}

func ceilBy(n, by int) int {
	c := 0
	for c*by < n {
		c++
	}
	return c
}

func twoRegions(blocks int) Layout {
	return Layout{TP: 1, PP: 1, BlockSize: 4, Ratio: 1, Order: "LBHNC", Regions: []kv.Region{
		{Base: 4096, BlockLen: 8, Stride: 8, NumBlocks: blocks, Name: "layers.0"},
		{Base: 8192, BlockLen: 8, Stride: 8, NumBlocks: blocks, Name: "layers.1"},
	}}
}

func TestPlanRefusesWhatDoesNotFit(t *testing.T) {
	l := twoRegions(10)
	ids := func(n int) []kv.BlockID {
		out := make([]kv.BlockID, n)
		for i := range out {
			out[i] = kv.BlockID(i)
		}
		return out
	}
	for _, c := range []struct {
		name string
		have Have
		want Want
		says []string
	}{
		{"more stock blocks than the prompt has", Have{ids(3), 9}, Want{Blocks: ids(4)}, []string{"4 blocks", "has 3"}},
		{"tokens beyond P's", Have{ids(3), 9}, Want{ids(2), true, 4, 6}, []string{"up to 10", "has 9"}},
		{"tokens short of P's", Have{ids(3), 9}, Want{ids(1), true, 4, 4}, []string{"up to 8", "has 9"}},
		{"start inside a block", Have{ids(3), 9}, Want{ids(2), true, 3, 6}, []string{"token 3", "block of 4"}},
		{"too few D blocks", Have{ids(3), 9}, Want{ids(1), true, 4, 5}, []string{"5 tokens", "1 blocks"}},
		{"too many D blocks", Have{ids(3), 9}, Want{ids(3), true, 4, 5}, []string{"5 tokens", "3 blocks"}},
		{"negative start", Have{ids(3), 9}, Want{ids(3), true, -4, 13}, []string{"-4"}},
		{"nothing wanted into blocks", Have{ids(3), 9}, Want{ids(1), true, 9, 0}, []string{"0 tokens"}},
		{"P short of its own tokens", Have{ids(2), 9}, Want{Blocks: ids(1)}, []string{"2 kernel blocks", "9 tokens"}},
	} {
		_, err := PlanWrite(l, l, c.have, c.want)
		var pair *PairError
		if !errors.As(err, &pair) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, s := range c.says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: %q does not say %q", c.name, err, s)
			}
		}
	}
}

// The reference connector keeps the whole list when it trims to the last 0 blocks (H30).
func TestPlanOfNothingIsEmpty(t *testing.T) {
	l := twoRegions(10)
	for _, want := range []Want{{}, {Blocks: []kv.BlockID{}, Positioned: true, StartToken: 8}} {
		plan, err := PlanWrite(l, l, Have{Blocks: []kv.BlockID{1, 2}, NumTokens: 8}, want)
		if err != nil || len(plan.Local) != 0 || len(plan.Remote) != 0 || plan.Bytes != 0 {
			t.Errorf("%+v: %+v, %v", want, plan, err)
		}
	}
}

// A block id past a region would name a block of the next region (H7).
func TestRangeOfIDs(t *testing.T) {
	l, small := twoRegions(10), twoRegions(10)
	small.Regions[1].NumBlocks = 5
	for name, f := range map[string]func() error{
		"P's": func() error {
			_, err := PlanWrite(l, l, Have{[]kv.BlockID{10}, 4}, Want{Blocks: []kv.BlockID{1}})
			return err
		},
		"D's": func() error {
			_, err := PlanWrite(l, small, Have{[]kv.BlockID{9}, 4}, Want{Blocks: []kv.BlockID{5}})
			return err
		},
		"a grant's": func() error { _, err := small.Ranges([]kv.BlockID{0, 7}, Decode); return err },
		"a huge one": func() error {
			wide := l
			wide.Ratio = 1 << 20
			_, err := wide.Ranges([]kv.BlockID{1<<32 - 1}, Decode)
			return err
		},
	} {
		var r *RangeError
		if err := f(); !errors.As(err, &r) {
			t.Errorf("%s block id beyond a region: %v", name, err)
		}
	}
	if _, err := PlanWrite(l, small, Have{[]kv.BlockID{9}, 4}, Want{Blocks: []kv.BlockID{4}}); err != nil {
		t.Errorf("the last block of a region: %v", err)
	}
}

func TestCheckNamesBothSides(t *testing.T) {
	for _, c := range []struct {
		name   string
		mutate func(*Layout)
		stock  bool
		says   []string
	}{
		{"tp", func(l *Layout) { l.TP = 2 }, false, []string{"tensor-parallel", "is 2", "ours is 1"}},
		{"pp", func(l *Layout) { l.PP = 3 }, false, []string{"pipeline", "is 3"}},
		{"block size", func(l *Layout) { l.BlockSize = 8 }, false, []string{"block size", "is 8", "ours is 4"}},
		{"ratio of a stock peer", func(l *Layout) { l.Ratio = 2 }, true, []string{"logical", "is 2"}},
		{"regions", func(l *Layout) { l.Regions = l.Regions[:1] }, false, []string{"regions", "is 1", "ours is 2"}},
		{"order", func(l *Layout) { l.Order = "LBNHC" }, false, []string{"LBNHC", "LBHNC"}},
		{"length", func(l *Layout) { l.Regions[1].BlockLen = 4 }, false, []string{"region 1", "is 4", "ours is 8"}},
		{"name", func(l *Layout) { l.Regions[0].Name = "x" }, false, []string{"region 0", `"x"`}},
	} {
		remote := twoRegions(10)
		c.mutate(&remote)
		err := Check(twoRegions(10), remote, c.stock)
		var m *MismatchError
		if !errors.As(err, &m) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, s := range c.says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: %q does not say %q", c.name, err, s)
			}
		}
	}
	remote := twoRegions(20)
	remote.Ratio = 2
	remote.Regions[0].Stride = 16
	if err := Check(twoRegions(10), remote, false); err != nil {
		t.Errorf("unlike ratio, stride and block count between kvferry peers: %v", err)
	}
}

func TestFromMetadata(t *testing.T) {
	m := &wire.AgentMetadata{EngineID: "e", KVCachesBaseAddr: []uint64{4096, 8192}, NumBlocks: 10, BlockLens: []int{8, 8},
		BlockStrides: []int{8, 16}, KVCacheLayout: "LBHNC", BlockSize: 4, PhysicalBlocksPerLogical: 1, DCPSize: 1, PCPSize: 1,
		RegionNames: []string{"layers.0", "layers.1"}}
	got, err := FromMetadata(m, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	want := twoRegions(10)
	want.Regions[1].Stride = 16
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	ple := 1
	for name, mutate := range map[string]func(*wire.AgentMetadata){
		"ssm":      func(m *wire.AgentMetadata) { m.SSMSizes[0] = 1 },
		"dcp":      func(m *wire.AgentMetadata) { m.DCPSize = 2 },
		"pcp":      func(m *wire.AgentMetadata) { m.PCPSize = 2 },
		"ple":      func(m *wire.AgentMetadata) { m.PLEBlockLen = &ple },
		"groups":   func(m *wire.AgentMetadata) { m.RegionGroupIDs = []int{0, 1} },
		"shared":   func(m *wire.AgentMetadata) { m.RegionGroupIDs = []int{-1, -1} },
		"too many": func(m *wire.AgentMetadata) { m.NumBlocks = MaxRows/2 + 1 },
	} {
		bad := *m
		mutate(&bad)
		var l *LayoutError
		if _, err := FromMetadata(&bad, 1, 1); !errors.As(err, &l) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func BenchmarkPlanWrite(b *testing.B) {
	l := Layout{TP: 1, PP: 1, BlockSize: 16, Ratio: 1, Order: "LBHNC"}
	for i := range 32 {
		l.Regions = append(l.Regions, kv.Region{Base: uint64(1+i) << 32, BlockLen: 65536, Stride: 65536, NumBlocks: 4096})
	}
	blocks := make([]kv.BlockID, 1024)
	for i := range blocks {
		blocks[i] = kv.BlockID(i * 3 % 4096)
	}
	have := Have{Blocks: blocks, NumTokens: 1024 * 16}
	want := Want{Blocks: blocks[:512]}
	for b.Loop() {
		if _, err := PlanWrite(l, l, have, want); err != nil {
			b.Fatal(err)
		}
	}
}
