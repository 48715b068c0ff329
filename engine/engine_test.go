package engine

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue { // tests wait for leases more than they compute
		_ = flag.Set("test.parallel", "6")
	}
	goleak.VerifyTestMain(m)
}

// A request's tokens are those of the model alone, whoever shares its batch, with and without the
// prefix cache, greedy or seeded, in every layout and chunking.
func TestAlone(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"default":      nil,
		"small chunks": func(c *Config) { c.MaxBatchTokens, c.MaxRunning, c.BlockSize = 7, 3, 4; c.NumBlocks = 300 },
		"tight":        func(c *Config) { c.NumBlocks = 12; c.Threads = 2 },
		"no cache":     func(c *Config) { c.NoPrefixCache, c.Layout = true, model.LBNHC },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEngine(t, change)
			var wg sync.WaitGroup
			for i, n := range []int{1, 15, 16, 17, 40, 40, 90, 64} {
				r := Request{ID: kv.RequestID(fmt.Sprintf("r%d", i)), Prompt: prompt(n, n), MaxTokens: 5 + i%3}
				if i%2 == 1 {
					r.Sampling = model.Sampling{Temperature: 0.9, TopP: 0.95, TopK: 40, Seed: uint64(i)}
				}
				wg.Go(func() {
					a := generate(t, e, r)
					checkAnswer(t, string(r.ID), a, expect(t, r.Prompt, r.MaxTokens, r.Sampling))
					if a.Finish != connector.FinishLength {
						t.Errorf("%s ends as %s", r.ID, a.Finish)
					}
					if got := e.Tokenizer().Decode(a.Tokens); a.Text != got {
						t.Errorf("%s: text %q of tokens that say %q", r.ID, a.Text, got)
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestPrefixCache(t *testing.T) {
	e := newEngine(t, nil)
	p := prompt(64, 1)
	first := generate(t, e, Request{ID: "a", Prompt: p, MaxTokens: 3})
	again := generate(t, e, Request{ID: "b", Prompt: p, MaxTokens: 3})
	salted := generate(t, e, Request{ID: "c", Prompt: p, MaxTokens: 3, CacheSalt: "s"})
	for i, u := range []struct{ got, cached, computed int }{
		{first.Usage.ComputedPrompt, first.Usage.Cached, 64}, {again.Usage.ComputedPrompt, again.Usage.Cached - 48, 16},
		{salted.Usage.ComputedPrompt, salted.Usage.Cached, 64},
	} {
		if u.got != u.computed || u.cached != 0 {
			t.Errorf("%d: %+v", i, u)
		}
	}
	if !same(first.Tokens, again.Tokens) || !same(first.Tokens, salted.Tokens) {
		t.Error("the cache changes the answer")
	}
	if s := e.Stats(); s.PrefixQueries != 192 || s.PrefixHits != 48 || s.BlocksCached == 0 {
		t.Errorf("%+v", s)
	}
}

func TestStops(t *testing.T) {
	e := newEngine(t, nil)
	p := prompt(30, 3)
	want := expect(t, p, 12, model.Sampling{})
	text := e.Tokenizer().Decode(want)

	a := generate(t, e, Request{ID: "string", Prompt: p, MaxTokens: 12, StopStrings: []string{"\x00", text[4:7], text[5:6]}})
	cut := strings.IndexByte(text, text[5]) // complete before the longer one
	if a.Finish != connector.FinishStop || a.StopString == "" || a.Text != text[:cut] {
		t.Errorf("stop string: %q %s %q of %q", a.Text, a.Finish, a.StopString, text)
	}

	stop := want[3]
	at := 0
	for want[at] != stop {
		at++
	}
	a = generate(t, e, Request{ID: "token", Prompt: p, MaxTokens: 12, StopTokens: []kv.Token{stop}})
	if a.Finish != connector.FinishStop || a.StopString != "" || len(a.Tokens) != at+1 || a.Text != text[:at] {
		t.Errorf("stop token: %q %s, %d tokens of %q", a.Text, a.Finish, len(a.Tokens), text)
	}

	a = generate(t, e, Request{ID: "held", Prompt: p, MaxTokens: 4, StopStrings: []string{text[3:5]}})
	if a.Finish != connector.FinishLength || a.Text != text[:4] {
		t.Errorf("held back at the end: %q %s of %q", a.Text, a.Finish, text)
	}
}

func TestContextLimit(t *testing.T) {
	e := newEngine(t, func(c *Config) { c.NumBlocks = 3 })
	if e.MaxContext() != 49 || e.Model().MaxContext != 49 {
		t.Fatalf("context %d", e.MaxContext())
	}
	for _, n := range []int{40, 48} {
		a := generate(t, e, Request{ID: "a", Prompt: prompt(n, n)})
		checkAnswer(t, "to the end", a, expect(t, prompt(n, n), 49-n, model.Sampling{}))
		if a.Finish != connector.FinishLength {
			t.Errorf("ends as %s", a.Finish)
		}
	}
	big := newEngine(t, nil)
	if big.MaxContext() != tiny().Config().MaxPosition {
		t.Errorf("context %d", big.MaxContext())
	}
}

func TestRefusals(t *testing.T) {
	e := newEngine(t, func(c *Config) { c.NumBlocks = 4; c.Role = connector.Consumer })
	good := Request{ID: "a", Prompt: prompt(3, 1), MaxTokens: 1}
	for name, c := range map[string]struct {
		field string
		spoil func(*Request)
	}{
		"no id":              {"request_id", func(r *Request) { r.ID = "" }},
		"long id":            {"request_id", func(r *Request) { r.ID = kv.RequestID(make([]byte, MaxRequestID+1)) }},
		"empty prompt":       {"prompt", func(r *Request) { r.Prompt = nil }},
		"long prompt":        {"prompt", func(r *Request) { r.Prompt = prompt(65, 1) }},
		"foreign token":      {"prompt", func(r *Request) { r.Prompt = []kv.Token{1, 100000} }},
		"negative token":     {"prompt", func(r *Request) { r.Prompt = []kv.Token{-1} }},
		"max tokens":         {"max_tokens", func(r *Request) { r.MaxTokens = -1 }},
		"many stops":         {"stop", func(r *Request) { r.StopStrings = make([]string, MaxStopStrings+1) }},
		"empty stop":         {"stop", func(r *Request) { r.StopStrings = []string{""} }},
		"long stop":          {"stop", func(r *Request) { r.StopStrings = []string{string(make([]byte, MaxStopBytes+1))} }},
		"many stop tokens":   {"stop_token_ids", func(r *Request) { r.StopTokens = make([]kv.Token, MaxStopTokens+1) }},
		"foreign stop token": {"stop_token_ids", func(r *Request) { r.StopTokens = []kv.Token{259} }},
		"salt":               {"cache_salt", func(r *Request) { r.CacheSalt = string(make([]byte, MaxSalt+1)) }},
		"temperature":        {"sampling", func(r *Request) { r.Sampling.Temperature = -1 }},
		"hand-off":           {"kv_transfer_params", func(r *Request) { r.Params = &kv.TransferParams{DoRemotePrefill: true} }},
		"role":               {"kv_transfer_params", func(r *Request) { r.Params = &kv.TransferParams{DoRemoteDecode: true} }},
	} {
		r := good
		c.spoil(&r)
		_, err := e.Submit(t.Context(), r)
		var re *RequestError
		if !errors.As(err, &re) || re.Kind != KindInvalid || re.Field != c.field || re.Request != r.ID || re.Error() == "" {
			t.Errorf("%s: %+v", name, err)
		}
	}
	checkAnswer(t, "afterwards", generate(t, e, good), expect(t, good.Prompt, 1, model.Sampling{}))
}

func TestOverload(t *testing.T) {
	e := newEngine(t, func(c *Config) { c.MaxQueue, c.MaxRunning = 2, 1 })
	var streams []*Stream
	var refused *RequestError
	for i := range 8 {
		s, err := e.Submit(t.Context(), Request{ID: kv.RequestID(fmt.Sprint(i)), Prompt: prompt(20, i), MaxTokens: 200})
		if err == nil {
			streams = append(streams, s)
		} else if !errors.As(err, &refused) {
			t.Fatal(err)
		}
	}
	if len(streams) != 3 || refused == nil || refused.Kind != KindOverload {
		t.Errorf("%d were taken, then %v", len(streams), refused)
	}
	if s := e.Stats(); s.Refused[KindOverload] != 5 {
		t.Errorf("%+v", s)
	}
	for _, s := range streams {
		s.Close()
		if a := read(t, s); a.Finish != connector.FinishAbort || a.Err.Kind != KindAborted {
			t.Errorf("closed: %+v", a.Output)
		}
	}
}

func TestDuplicateID(t *testing.T) {
	e := newEngine(t, nil)
	s := submit1(t, e, Request{ID: "a", Prompt: prompt(20, 1), MaxTokens: 500})
	_, err := e.Submit(t.Context(), Request{ID: "a", Prompt: prompt(20, 1), MaxTokens: 1})
	var re *RequestError
	if !errors.As(err, &re) || re.Field != "request_id" {
		t.Errorf("a second one: %v", err)
	}
	s.Close()
	read(t, s)
	checkAnswer(t, "afterwards", generate(t, e, Request{ID: "a", Prompt: prompt(20, 1), MaxTokens: 1}), expect(t, prompt(20, 1), 1, model.Sampling{}))
}

// The client's context ends the request, before, during and after it.
func TestClientContext(t *testing.T) {
	e := newEngine(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	s, err := e.Submit(ctx, Request{ID: "a", Prompt: prompt(20, 1), MaxTokens: 1500})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	cancel()
	if a := read(t, s); a.Finish != connector.FinishAbort || !errors.Is(a.Err, errClientGone) {
		t.Errorf("%+v", a.Output)
	}
	s, err = e.Submit(ctx, Request{ID: "b", Prompt: prompt(20, 1), MaxTokens: 1500})
	if err != nil {
		t.Fatal(err)
	}
	if a := read(t, s); a.Finish != connector.FinishAbort {
		t.Errorf("%+v", a.Output)
	}
	ctx, cancel = context.WithCancel(t.Context())
	s, err = e.Submit(ctx, Request{ID: "c", Prompt: prompt(20, 1), MaxTokens: 2})
	if err != nil {
		t.Fatal(err)
	}
	if a := read(t, s); a.Finish != connector.FinishLength {
		t.Errorf("%+v", a.Output)
	}
	cancel()
	s.Close()
}

// KV that cannot be computed with ends its request with an error, not with tokens.
func TestDamagedKV(t *testing.T) {
	e := newEngine(t, nil)
	p := prompt(64, 1)
	generate(t, e, Request{ID: "a", Prompt: p, MaxTokens: 1})
	for l := range tiny().Config().Layers {
		for b := range e.cfg.NumBlocks {
			block := e.parts.cache.Block(l, kv.BlockID(b))
			for i := range block {
				block[i] = 0xff // NaN
			}
		}
	}
	a := generate(t, e, Request{ID: "b", Prompt: p, MaxTokens: 1})
	if a.Usage.Cached == 0 || a.Finish != connector.FinishError || a.Err.Kind != KindInternal || !errors.Is(a.Err, model.ErrNotFinite) || len(a.Tokens) != 0 {
		t.Errorf("%+v", a.Output)
	}
	q := prompt(64, 2)
	checkAnswer(t, "another", generate(t, e, Request{ID: "c", Prompt: q, MaxTokens: 2}), expect(t, q, 2, model.Sampling{}))
}

// An engine without requests does nothing at all.
func TestIdle(t *testing.T) {
	e := newEngine(t, nil)
	generate(t, e, Request{ID: "a", Prompt: prompt(20, 1), MaxTokens: 2})
	before := e.Stats().Wakeups
	time.Sleep(100 * time.Millisecond)
	if woke := e.Stats().Wakeups - before - 1; woke != 0 {
		t.Errorf("the idle loop woke %d times", woke)
	}
}

func TestAddressInUse(t *testing.T) {
	e := newEngine(t, nil)
	addr := fmt.Sprintf("%s:%d", e.Coordinates().Host, e.Coordinates().Port)
	_, err := New(Config{Model: tiny(), NumBlocks: 2, SideChannel: addr})
	if err == nil {
		t.Fatal("two engines listen at one address")
	}
	t.Log(err)
}
