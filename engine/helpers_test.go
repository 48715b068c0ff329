package engine

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// tiny is the built-in model, made once.
var tiny = sync.OnceValue(model.Tiny)

// newEngine starts an engine that is closed, and found empty, at the end of the test.
func newEngine(t testing.TB, change func(*Config)) *Engine {
	t.Helper()
	cfg := Config{Model: tiny(), NumBlocks: 160, Threads: 1}
	if change != nil {
		change(&cfg)
	}
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := e.closing.Load() // by the test, which has looked itself
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := e.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		if s := e.Stats(); !closed && (s.BlocksFree != s.BlocksTotal || s.Held+s.Running+s.Waiting+s.WaitingRemote != 0) {
			t.Errorf("left behind: %+v", s)
		}
	})
	return e
}

// shortLease is of tests in which a lease is to end. Heartbeats are a sixth of it, and silence is three of them: on
// a busy machine that must not come from engines that only wait for a processor.
const shortLease = 3 * time.Second

// answer is everything that a stream gave.
type answer struct {
	Output // the last one; Tokens, LogProbs and Text are of all
}

func read(t testing.TB, s *Stream) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var a answer
	for {
		o, err := s.Next(ctx)
		if err == io.EOF {
			return a
		}
		if err != nil {
			t.Errorf("the answer does not end: %v", err)
			return a
		}
		o.Tokens = append(a.Tokens, o.Tokens...)
		o.LogProbs = append(a.LogProbs, o.LogProbs...)
		o.Text = a.Text + o.Text
		a.Output = o
	}
}

func submit1(t testing.TB, e *Engine, r Request) *Stream {
	t.Helper()
	s, err := e.Submit(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func generate(t testing.TB, e *Engine, r Request) answer {
	t.Helper()
	return read(t, submit1(t, e, r))
}

// prompt is n tokens of printable text that differ with seed.
func prompt(n, seed int) []kv.Token {
	out := make([]kv.Token, n)
	x := uint32(seed)*2654435761 + 12345
	for i := range out {
		x = x*1664525 + 1013904223
		out[i] = kv.Token(32 + x>>8%95)
	}
	return out
}

// expected remembers what expect has computed, as functions that do so once.
var expected sync.Map

// expect is what the model answers alone, computed without an engine.
func expect(t testing.TB, p []kv.Token, n int, s model.Sampling) []kv.Token {
	t.Helper()
	compute := sync.OnceValues(func() ([]kv.Token, error) { return alone(p, n, s) })
	f, _ := expected.LoadOrStore(fmt.Sprint(p, n, s), compute)
	out, err := f.(func() ([]kv.Token, error))()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func alone(p []kv.Token, n int, s model.Sampling) ([]kv.Token, error) {
	const blockSize = 16
	blocks := make([]kv.BlockID, (len(p)+n)/blockSize+1)
	for i := range blocks {
		blocks[i] = kv.BlockID(i)
	}
	shape := tiny().Config()
	cache, err := model.NewCache(shape, model.CacheShape{BlockSize: blockSize, NumBlocks: len(blocks)},
		make([]byte, model.CacheBytes(shape, blockSize, len(blocks))))
	if err != nil {
		return nil, err
	}
	runner := model.NewRunner(tiny(), 1)
	var logits model.Logits
	var sampler model.Sampler
	var out []kv.Token
	start, next := 0, p
	for range n {
		if err := runner.Forward(cache, []model.Sequence{{Tokens: next, Start: start, Blocks: blocks, Logits: true}}, &logits); err != nil {
			return nil, err
		}
		start += len(next)
		c, err := sampler.Choose(logits.Row(0), s, start)
		if err != nil {
			return nil, err
		}
		out = append(out, c.Token)
		next = out[len(out)-1:]
	}
	return out, nil
}

func same(a, b []kv.Token) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func checkAnswer(t testing.TB, name string, a answer, want []kv.Token) {
	t.Helper()
	switch {
	case a.Err != nil:
		t.Errorf("%s: %v", name, a.Err)
	case !same(a.Tokens, want):
		t.Errorf("%s: answered %v, want %v", name, a.Tokens, want)
	case a.Usage.Completion != len(want) || len(a.LogProbs) != len(want):
		t.Errorf("%s: %d tokens, usage %+v, %d probabilities", name, len(want), a.Usage, len(a.LogProbs))
	}
}

// closeNow ends an engine without waiting for its requests.
func closeNow(t testing.TB, e *Engine) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := e.Close(ctx); err != nil {
		t.Error(err)
	}
}
