package model

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
	"pgregory.net/rapid"
)

func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// small is a model with uneven sizes, so that every kernel width and remainder occurs.
func small(tb testing.TB, tied bool) *Model {
	cfg := Config{Name: "small", Vocab: 259, Hidden: 22, Layers: 2, Heads: 6, KVHeads: 2, HeadDim: 14, FFN: 37,
		RopeTheta: 500, NormEps: 1e-5, MaxPosition: 256, BOS: -1, Tied: tied}
	w := Weights{Layers: make([]LayerWeights, cfg.Layers)}
	rng := draws{state: 5}
	for _, t := range w.tensors(cfg) {
		data := make([]float32, t.size())
		for i := range data {
			data[i] = rng.normal() * 0.3
			if t.rows == 0 {
				data[i] += 1
			}
		}
		*t.data = data
	}
	m, err := New(cfg, w, newByteTokenizer("<|bos|>", "<|eos|>", "<|pad|>"))
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// Chunking, batching, layout, block size, form of keys and threads change no bit of the logits.
func TestResultDependsOnTheRequestOnly(t *testing.T) {
	m := small(t, false)
	reference := NewRunner(m, 1)
	rapid.Check(t, func(rt *rapid.T) {
		shape := CacheShape{
			Layout:    rapid.SampledFrom([]Layout{LBHNC, LBNHC}).Draw(rt, "layout"),
			Keys:      rapid.SampledFrom([]Keys{PlainKeys, RotatedKeys}).Draw(rt, "keys"),
			BlockSize: rapid.SampledFrom([]int{1, 3, 4, 8, 16, 33}).Draw(rt, "block size"),
		}
		r := NewRunner(m, rapid.IntRange(1, 3).Draw(rt, "threads"))
		if rapid.Bool().Draw(rt, "dedicated") {
			defer r.Dedicate(nil)()
		}
		r.fork = 1 // the model is too small to pay for it, but the split is what is tested
		n := rapid.IntRange(1, 4).Draw(rt, "sequences")
		type progress struct {
			tokens []kv.Token
			blocks []kv.BlockID
			done   int
		}
		var all []*progress
		for i := range n {
			length := rapid.IntRange(1, 100).Draw(rt, "length")
			need := (length + shape.BlockSize - 1) / shape.BlockSize
			all = append(all, &progress{tokens: m.tok.Encode(text(i, length)), blocks: table(shape.NumBlocks, need)})
			shape.NumBlocks += need
		}
		c := newCache(t, m.cfg, shape)
		var out Logits
		for {
			var seqs []Sequence
			var of []int
			for i, p := range all {
				left := len(p.tokens) - p.done
				if left == 0 || rapid.IntRange(0, 3).Draw(rt, "idle") == 0 && len(seqs) > 0 {
					continue
				}
				chunk := rapid.IntRange(1, left).Draw(rt, "chunk")
				seqs = append(seqs, Sequence{Tokens: p.tokens[p.done : p.done+chunk], Start: p.done, Blocks: p.blocks, Logits: chunk == left})
				of = append(of, i)
				p.done += chunk
			}
			if len(seqs) == 0 {
				break
			}
			if err := r.Forward(c, seqs, &out); err != nil {
				rt.Fatal(err)
			}
			for j, i := range of {
				if !seqs[j].Logits {
					if out.Row(j) != nil {
						rt.Errorf("logits of sequence %d, which did not ask", i)
					}
					continue
				}
				p := all[i]
				alone := newCache(t, m.cfg, CacheShape{BlockSize: 128, NumBlocks: 1})
				if want := run(t, reference, alone, p.tokens, 0, []kv.BlockID{0}); !sameBits(out.Row(j), want) {
					rt.Fatalf("sequence %d of %d tokens: logits differ from a call of its own", i, len(p.tokens))
				}
			}
		}
	})
}

// chunkSizes lie around the sizes of block and attention task.
var chunkSizes = []int{1, 2, 3, 7, 16, 63, 64, 65, 149}

// The cache contents are the same bits too, chunked or not: blocks of one engine stand in for
// those of another.
func TestCacheContentsDoNotDependOnChunks(t *testing.T) {
	m := Tiny()
	prompt := m.tok.Encode(text(1, 150))
	for _, layout := range []Layout{LBHNC, LBNHC} {
		shape := CacheShape{Layout: layout, BlockSize: 16, NumBlocks: 10}
		blocks := table(0, 10)
		whole := newCache(t, m.cfg, shape)
		want := run(t, NewRunner(m, 1), whole, prompt, 0, blocks)
		for _, chunk := range chunkSizes {
			r := NewRunner(m, 2)
			c := newCache(t, m.cfg, shape)
			var got []float32
			for at := 0; at < len(prompt); at += chunk {
				got = run(t, r, c, prompt[at:min(at+chunk, len(prompt))], at, blocks)
			}
			if !sameBits(got, want) {
				t.Errorf("%v, chunks of %d: logits differ", layout, chunk)
			}
			if !sameBits(c.data, whole.data) {
				t.Errorf("%v, chunks of %d: cache differs", layout, chunk)
			}
		}
	}
}

// A prefix computed by another sequence of the same call may be read in it.
func TestSharedPrefixInOneCall(t *testing.T) {
	m := small(t, false)
	r := NewRunner(m, 1)
	shape := CacheShape{BlockSize: 4, NumBlocks: 8}
	a := m.tok.Encode("abcdefgh")
	b := m.tok.Encode("abcdefghijk")
	c := newCache(t, m.cfg, shape)
	var out Logits
	err := r.Forward(c, []Sequence{
		{Tokens: b[8:], Start: 8, Blocks: []kv.BlockID{5, 2, 7}, Logits: true},
		{Tokens: a, Blocks: []kv.BlockID{5, 2}, Logits: true},
	}, &out)
	if err != nil {
		t.Fatal(err)
	}
	if !sameBits(out.Row(0), run(t, r, newCache(t, m.cfg, shape), b, 0, table(0, 3))) {
		t.Error("sequence behind the shared prefix differs")
	}
	if !sameBits(out.Row(1), run(t, r, newCache(t, m.cfg, shape), a, 0, table(0, 2))) {
		t.Error("sequence that computes the shared prefix differs")
	}
}

// Every layout keeps K and V of a position where HeadToken says, and nothing else is touched.
func TestForwardWritesOnlyItsPositions(t *testing.T) {
	m := small(t, false)
	for _, layout := range []Layout{LBHNC, LBNHC} {
		c := newCache(t, m.cfg, CacheShape{Layout: layout, BlockSize: 4, NumBlocks: 5})
		before := append([]byte(nil), c.mem...)
		blocks := []kv.BlockID{3, 1, 4}
		run(t, NewRunner(m, 1), c, m.tok.Encode("xyzxyz"), 3, blocks)
		after := append([]byte(nil), c.mem...)
		copy(c.mem, before)
		for l := range m.cfg.Layers {
			for p := 3; p < 9; p++ {
				for h := range m.cfg.KVHeads {
					clear(c.HeadToken(l, blocks[p/4], h, p%4))
				}
			}
		}
		for i := range before {
			changed, mayChange := before[i] != after[i], c.mem[i] != before[i]
			if changed && !mayChange && before[i] != 0 {
				t.Fatalf("%v: byte %d changed, which belongs to another position", layout, i)
			}
		}
		if slices.Equal(before, after) {
			t.Errorf("%v: nothing was written", layout)
		}
	}
}

func TestForwardRefuses(t *testing.T) {
	m := small(t, false)
	r := NewRunner(m, 1)
	c := newCache(t, m.cfg, CacheShape{BlockSize: 4, NumBlocks: 70})
	good := Sequence{Tokens: []kv.Token{1, 2, 3}, Blocks: []kv.BlockID{0}}
	before := append([]byte(nil), c.mem...)
	for want, s := range map[string]Sequence{
		"no new token":             {Blocks: []kv.BlockID{1}},
		"exceed the context":       {Tokens: []kv.Token{1}, Start: 256, Blocks: table(1, 65)},
		"positions -1":             {Tokens: []kv.Token{1}, Start: -1, Blocks: table(1, 1)},
		"do not hold position 4":   {Tokens: []kv.Token{1, 1}, Start: 3, Blocks: table(1, 1)},
		"token 259 is not":         {Tokens: []kv.Token{259}, Blocks: table(1, 1)},
		"token -1 is not":          {Tokens: []kv.Token{-1}, Blocks: table(1, 1)},
		"block 70 does not exist":  {Tokens: []kv.Token{1}, Start: 4, Blocks: []kv.BlockID{70, 1}},
		"already written":          {Tokens: []kv.Token{1}, Blocks: table(0, 1)},
		"written by sequence 1":    {Tokens: make([]kv.Token, 8), Blocks: []kv.BlockID{2, 2}},
		"positions 9223372036854":  {Tokens: []kv.Token{1}, Start: math.MaxInt, Blocks: table(1, 1)},
		"block 4294967295 does no": {Tokens: []kv.Token{1}, Blocks: []kv.BlockID{math.MaxUint32}},
	} {
		var out Logits
		err := r.Forward(c, []Sequence{good, s}, &out)
		var se *SequenceError
		if !errors.As(err, &se) || se.Index != 1 || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want one of sequence 1 with %q", err, want)
		}
	}
	if err := r.Forward(c, make([]Sequence, MaxBatchSeqs+1), &Logits{}); err == nil {
		t.Error("too many sequences accepted")
	}
	if err := r.Forward(newCache(t, Tiny().cfg, CacheShape{BlockSize: 4, NumBlocks: 4}), []Sequence{good}, &Logits{}); err == nil {
		t.Error("cache of another model accepted")
	}
	if !slices.Equal(before, c.mem) {
		t.Error("a refused call wrote to the cache")
	}
}

// Damaged KV that is no number ends in an error, never in a token.
func TestNotANumberInKVIsSeen(t *testing.T) {
	m := Tiny()
	r := NewRunner(m, 1)
	c := newCache(t, m.cfg, CacheShape{BlockSize: 16, NumBlocks: 4})
	prompt := m.tok.Encode(text(2, 40))
	for i, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, chunk := range []int{1, 8} {
			run(t, r, c, prompt, 0, table(0, 4))
			for j := range m.cfg.contentDim() {
				c.data[c.row(1, table(0, 4), 5+i)+j] = float32(bad)
			}
			logits := run(t, r, c, prompt[40-chunk:], 40-chunk, table(0, 4))
			if _, err := argmax(logits); !errors.Is(err, ErrNotFinite) {
				t.Errorf("%v in the cache, %d new tokens: error is %v", bad, chunk, err)
			}
		}
	}
}

func BenchmarkPrefill(b *testing.B) {
	m := Tiny()
	for _, c := range []struct {
		threads   int
		dedicated bool
	}{{1, false}, {2, false}, {2, true}} {
		b.Run(fmt.Sprintf("2000tokens/%dthreads/dedicated=%v", c.threads, c.dedicated), func(b *testing.B) {
			r, prompt := NewRunner(m, c.threads), m.tok.Encode(text(1, 2000))
			if c.dedicated {
				defer r.Dedicate(nil)()
			}
			c := newCache(b, m.cfg, CacheShape{BlockSize: 16, NumBlocks: 128})
			for b.Loop() {
				run(b, r, c, prompt, 0, table(0, 128))
			}
			b.ReportMetric(2000*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	m := Tiny()
	for _, keys := range []Keys{PlainKeys, RotatedKeys} {
		for _, batch := range []int{1, 16} {
			b.Run(fmt.Sprintf("at1000/%v/batch%d", keys, batch), func(b *testing.B) {
				r := NewRunner(m, 1)
				c := newCache(b, m.cfg, CacheShape{BlockSize: 16, Keys: keys, NumBlocks: 64 * batch})
				var seqs []Sequence
				for i := range batch {
					seqs = append(seqs, Sequence{Tokens: []kv.Token{65}, Start: 1000, Blocks: table(64*i, 64), Logits: true})
				}
				var out Logits
				for b.Loop() {
					if err := r.Forward(c, seqs, &out); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(batch)*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
			})
		}
	}
}
