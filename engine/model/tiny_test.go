package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// fingerprintTokens is how many generated tokens a damage to the KV may take to show.
const fingerprintTokens = 32

// promptLengths are in tokens: below, at and beyond block borders, up to half the context.
var promptLengths = []int{
	4, 7, 12, 16, 17, 18, 25, 32, 40, 47, 55, 64, 73, 90, 101, 128, 150, 177, 200, 231, 256, 300, 350, 1000,
}

// damage is one way to hurt the KV of a prompt.
type damage struct {
	name  string
	apply func()
}

// fixture has the KV of a prompt in a cache, and other contents of the same blocks.
type fixture struct {
	prompt []kv.Token
	blocks []kv.BlockID
	cache  *Cache
	stale  *Cache
	shape  CacheShape
}

func newFixture(t *testing.T, r *Runner, n int) *fixture {
	m, size := r.Model(), 16
	count := (n + fingerprintTokens + size - 1) / size
	f := &fixture{shape: CacheShape{BlockSize: size, NumBlocks: count}, blocks: table(0, count)}
	f.prompt = m.tok.Encode(text(n, n))
	f.cache, f.stale = newCache(t, m.cfg, f.shape), newCache(t, m.cfg, f.shape)
	run(t, r, f.cache, f.prompt, 0, f.blocks)
	run(t, r, f.stale, m.tok.Encode(text(n+5, n)), 0, f.blocks)
	return f
}

// damages lists what must show. The last token of a prompt is always computed again, so that only
// blocks with an earlier token count.
func (f *fixture) damages() []damage {
	cfg, c := f.cache.cfg, f.cache
	used := (len(f.prompt) - 2 + f.shape.BlockSize) / f.shape.BlockSize
	var list []damage
	for l := range cfg.Layers {
		list = append(list, damage{fmt.Sprintf("layer %d zeroed", l), func() {
			for _, b := range f.blocks {
				clear(c.Block(l, b))
			}
		}})
	}
	for h := range cfg.KVHeads {
		list = append(list, damage{fmt.Sprintf("KV head %d zeroed", h), func() {
			for l := range cfg.Layers {
				for _, b := range f.blocks {
					for i := range f.shape.BlockSize {
						clear(c.HeadToken(l, b, h, i))
					}
				}
			}
		}})
	}
	for i := range used {
		list = append(list, damage{fmt.Sprintf("block %d of %d stale", i, used), func() {
			for l := range cfg.Layers {
				copy(c.Block(l, f.blocks[i]), f.stale.Block(l, f.blocks[i]))
			}
		}})
		for _, j := range []int{(i + 1) % used, (i + used/2) % used} {
			if j <= i {
				continue
			}
			list = append(list, damage{fmt.Sprintf("blocks %d and %d of %d exchanged", i, j, used), func() {
				for l := range cfg.Layers {
					a, b := c.Block(l, f.blocks[i]), c.Block(l, f.blocks[j])
					for k := range a {
						a[k], b[k] = b[k], a[k]
					}
				}
			}})
		}
	}
	return list
}

// Whatever part of a prompt's KV is damaged, greedy tokens differ soon: equal tokens prove that KV
// arrived whole.
func TestTinyFeelsEveryBlock(t *testing.T) {
	r := NewRunner(Tiny(), 1)
	worst, count := 0, 0
	for _, n := range promptLengths {
		f := newFixture(t, r, n)
		whole := append([]byte(nil), f.cache.mem...)
		want := greedy(t, r, f.cache, f.prompt, f.blocks, fingerprintTokens, nil)
		for _, d := range f.damages() {
			copy(f.cache.mem, whole)
			d.apply()
			got := greedy(t, r, f.cache, f.prompt, f.blocks, fingerprintTokens, want)
			if len(got) == len(want) && got[len(got)-1] == want[len(want)-1] {
				t.Errorf("prompt of %d tokens, %s: %d tokens and no difference", n, d.name, len(want))
			}
			worst, count = max(worst, len(got)), count+1
		}
		copy(f.cache.mem, whole)
		if got := greedy(t, r, f.cache, f.prompt, f.blocks, fingerprintTokens, nil); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("prompt of %d tokens: undamaged KV gives other tokens", n)
		}
	}
	t.Logf("%d damages, the slowest showed at token %d", count, worst)
}

// The limit that RotatedKeys documents: full blocks can change places without a trace, except for
// rounding. With plain keys the same exchange shows.
func TestExchangedBlocksNeedPlainKeys(t *testing.T) {
	m := Tiny()
	r := NewRunner(m, 1)
	shape := CacheShape{BlockSize: 4, NumBlocks: 4}
	prompt := m.tok.Encode(text(3, 13))
	for _, keys := range []Keys{PlainKeys, RotatedKeys} {
		shape.Keys = keys
		c := newCache(t, m.cfg, shape)
		run(t, r, c, prompt, 0, []kv.BlockID{0, 1, 2, 3})
		want := run(t, r, c, prompt[12:], 12, []kv.BlockID{0, 1, 2, 3})
		got := run(t, r, c, prompt[12:], 12, []kv.BlockID{1, 0, 2, 3})
		far := 0.0
		for i := range got {
			far = max(far, math.Abs(float64(got[i]-want[i])))
		}
		if (keys == PlainKeys) != (far > 0.1) {
			t.Errorf("%v keys: exchanging two blocks moves logits by up to %g", keys, far)
		}
	}
}

// variedLengths are of prompts, in tokens.
var variedLengths = []int{1, 5, 33, 100, 400, 900}

// Generated text is varied printable ASCII, and the winner leads by more than rounding.
func TestTinyOutputIsVaried(t *testing.T) {
	m := Tiny()
	r := NewRunner(m, 1)
	for _, n := range variedLengths {
		const tokens = 64
		prompt := m.tok.Encode(text(n+1, n))
		shape := CacheShape{BlockSize: 32, NumBlocks: (n+tokens)/32 + 1}
		c := newCache(t, m.cfg, shape)
		blocks := table(0, shape.NumBlocks)
		logits := run(t, r, c, prompt, 0, blocks)
		seen := map[kv.Token]int{}
		close := 0
		for i := range tokens {
			best, err := argmax(logits)
			if err != nil {
				t.Fatal(err)
			}
			if !printable(int(best)) {
				t.Errorf("prompt of %d: token %d is not printable", n, best)
			}
			for j, v := range logits {
				if kv.Token(j) != best && logits[best]-v < 1e-4 {
					close++
				}
			}
			seen[best]++
			logits = run(t, r, c, []kv.Token{best}, n+i, blocks)
		}
		for tok, times := range seen {
			if times > tokens/2 {
				t.Errorf("prompt of %d: token %d comes %d times in %d", n, tok, times, tokens)
			}
		}
		if len(seen) < 10 {
			t.Errorf("prompt of %d: only %d different tokens in %d", n, len(seen), tokens)
		}
		if close > 1 {
			t.Errorf("prompt of %d: %d of %d choices hang on less than 1e-4", n, close, tokens)
		}
	}
}

// The built-in weights and what they compute are part of the product: other machines and later
// versions must agree with recorded outputs.
func TestTinyIsTheSameEverywhere(t *testing.T) {
	m := Tiny()
	h := sha256.New()
	for _, p := range m.weights.tensors(m.cfg) {
		if err := binary.Write(h, binary.LittleEndian, *p.data); err != nil {
			t.Fatal(err)
		}
	}
	const weights = "5839c6b7ec75cb32e2a0e595d7ff10ddfbdc5d4f118663f3bbb264681add01ab"
	if got := hex.EncodeToString(h.Sum(nil)); got != weights {
		t.Errorf("weights are %s, want %s", got, weights)
	}
	h.Reset()
	for _, x := range [][]float32{m.rope.cos, m.rope.sin} {
		if err := binary.Write(h, binary.LittleEndian, x); err != nil {
			t.Fatal(err)
		}
	}
	r := NewRunner(m, 1)
	c := newCache(t, m.cfg, CacheShape{BlockSize: 16, NumBlocks: 20})
	prompt := m.tok.Encode(text(0, 250))
	if err := binary.Write(h, binary.LittleEndian, run(t, r, c, prompt, 0, table(0, 20))); err != nil {
		t.Fatal(err)
	}
	const bits = "45b0b51f8344d07470e27a8f161f6d8d653bda302f6bad2020a731174dfede08"
	if got := hex.EncodeToString(h.Sum(nil)); got != bits {
		t.Errorf("rotation table and logits are %s, want %s", got, bits)
	}
	const want = "mdrs]MPU8UYi<bis/8n5iW*#b*R8uS5PUqMs]IM4PMiURIlS"
	if got := m.tok.Decode(greedy(t, r, c, prompt, table(0, 20), 48, nil)); got != want {
		t.Errorf("greedy text is %q, want %q", got, want)
	}
}

// Log-probabilities are finer than tokens: one block of one KV head in one layer, which tokens may
// miss in a long prompt, changes those of the first few tokens already.
func TestTinyLogProbsFeelEveryPart(t *testing.T) {
	const tokens = 4
	r := NewRunner(Tiny(), 1)
	cfg := r.Model().cfg
	for _, n := range []int{promptLengths[0], promptLengths[len(promptLengths)-1]} {
		f := newFixture(t, r, n)
		whole := append([]byte(nil), f.cache.mem...)
		// same reports whether the next tokens have the recorded log-probabilities.
		var record []float64
		same := func() bool {
			last, at := f.prompt[n-1], n-1
			for i := range tokens {
				var s Sampler
				c, err := s.Choose(run(t, r, f.cache, []kv.Token{last}, at, f.blocks), Sampling{}, at+1)
				if err != nil {
					t.Fatal(err)
				}
				if i == len(record) {
					record = append(record, c.LogProb)
				}
				if c.LogProb != record[i] {
					return false
				}
				last, at = c.Token, at+1
			}
			return true
		}
		same()
		for i := range (n - 2 + f.shape.BlockSize) / f.shape.BlockSize {
			for l := range cfg.Layers {
				for h := range cfg.KVHeads {
					copy(f.cache.mem, whole)
					for k := range f.shape.BlockSize {
						copy(f.cache.HeadToken(l, f.blocks[i], h, k), f.stale.HeadToken(l, f.blocks[i], h, k))
					}
					if same() {
						t.Errorf("prompt of %d tokens: layer %d head %d of block %d stale, and no log-probability differs", n, l, h, i)
					}
				}
			}
		}
		copy(f.cache.mem, whole)
		if !same() {
			t.Error("undamaged KV gives other log-probabilities")
		}
	}
}
