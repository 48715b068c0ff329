package model

import (
	"testing"

	"github.com/kvferry/kvferry/kv"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newCache is a cache in memory of its own, filled with rubbish so that nothing can rely on zeros.
func newCache(t testing.TB, cfg Config, shape CacheShape) *Cache {
	t.Helper()
	mem := make([]byte, CacheBytes(cfg, shape.BlockSize, shape.NumBlocks))
	c, err := NewCache(cfg, shape, mem)
	if err != nil {
		t.Fatal(err)
	}
	rng := draws{state: 99}
	for i := range c.data {
		c.data[i] = rng.normal()
	}
	return c
}

// table is a block table of n blocks in an order that is not the identity, from block first on.
func table(first, n int) []kv.BlockID {
	out := make([]kv.BlockID, n)
	for i := range out {
		out[i] = kv.BlockID(first + n - 1 - i)
	}
	return out
}

// run is one call for one sequence; it returns a copy of its logits.
func run(t testing.TB, r *Runner, c *Cache, tokens []kv.Token, start int, blocks []kv.BlockID) []float32 {
	t.Helper()
	var out Logits
	err := r.Forward(c, []Sequence{{Tokens: tokens, Start: start, Blocks: blocks, Logits: true}}, &out)
	if err != nil {
		t.Fatal(err)
	}
	return append([]float32(nil), out.Row(0)...)
}

// greedy continues a prompt whose KV lies in the cache up to its last token, n tokens far, or until
// the tokens differ from want.
func greedy(t testing.TB, r *Runner, c *Cache, prompt []kv.Token, blocks []kv.BlockID, n int, want []kv.Token) []kv.Token {
	t.Helper()
	last, at := prompt[len(prompt)-1], len(prompt)-1
	var out []kv.Token
	for range n {
		logits := run(t, r, c, []kv.Token{last}, at, blocks)
		best, err := argmax(logits)
		if err != nil {
			t.Fatal(err)
		}
		last = best
		at++
		out = append(out, last)
		if want != nil && want[len(out)-1] != last {
			break
		}
	}
	return out
}

const prose = `The harbour lay quiet under a thin fog, and nobody on the quay could tell whether the ferry had left. ` +
	`Crates were stacked in rows of four; each bore a number in white paint, and the clerk read them aloud one by one. ` +
	`"Seventeen, eighteen, twenty," he said, then stopped: where was nineteen? A gull answered. The crane turned slowly, ` +
	`lifted a net of oranges, and set it down again in the same place. By noon the wind had changed. {"ok": true, "n": 3} `

// text is n bytes of prose that begin at a place of their own.
func text(seed, n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = prose[(seed*37+i)%len(prose)]
	}
	return string(b)
}
