package engine

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// keyed is a way in which requests of one prompt must not share KV.
type keyed struct {
	set       func(r *Request, key string)
	otherText bool // keys change the answer
}

var keyKinds = map[string]keyed{
	"salt":    {set: func(r *Request, key string) { r.CacheSalt = key }},
	"adapter": {set: func(r *Request, key string) { r.Adapter = key }, otherText: true},
	"extras": {set: func(r *Request, key string) {
		if key != "" {
			r.Extras = []string{"image one", key}
		}
	}},
}

// Requests of one prompt and unlike salts, adapters or extra keys share no KV, neither by a hand-off,
// which is refused, nor in a cache that a hand-off has filled, in both modes.
func TestKeysAcrossEngines(t *testing.T) {
	p := prompt(40, 5)
	for kind, k := range keyKinds {
		change := func(c *Config) { c.Lease, c.Adapters = shortLease, []string{"a", "b"} }
		with := func(r Request, key string) Request {
			k.set(&r, key)
			return r
		}
		t.Run(kind+" push", func(t *testing.T) {
			t.Parallel()
			x := newPair(t, change)
			checkKeys(t, x, k, p, func(id, keyP, keyD string) (d answer) {
				prefill, decode := x.legs(id, p, 3)
				var wg sync.WaitGroup
				wg.Go(func() { generate(t, x.p, with(prefill, keyP)) })
				wg.Go(func() { d = generate(t, x.d, with(decode, keyD)) })
				wg.Wait()
				return d
			})
		})
		t.Run(kind+" pull", func(t *testing.T) {
			t.Parallel()
			x := newPullPair(t, change)
			checkKeys(t, x, k, p, func(id, keyP, keyD string) answer {
				prefill, decode := pullLegs(id, p, 3)
				return generate(t, x.d, with(decode(generate(t, x.p, with(prefill, keyP))), keyD))
			})
		})
	}
}

func checkKeys(t *testing.T, x pair, k keyed, p []kv.Token, run func(id, keyP, keyD string) answer) {
	const says = "the prompts differ in tokens, cache salt, adapter or extra keys"
	for _, unlike := range [][2]string{{"a", "b"}, {"a", ""}, {"", "b"}} {
		if a := run("unlike"+unlike[0]+unlike[1], unlike[0], unlike[1]); a.Err == nil || a.Err.Kind != KindTransfer ||
			!strings.Contains(a.Err.Error(), says) || len(a.Tokens) != 0 {
			t.Errorf("P with %q, D with %q: %+v", unlike[0], unlike[1], a.Output)
		}
	}
	answers := map[string]answer{}
	for _, key := range []string{"", "a", "b"} {
		r := Request{ID: "alone", Prompt: p, MaxTokens: 3}
		k.set(&r, key)
		a := run("like"+key, key, key)
		checkAnswer(t, "both with "+key, a, adapted(t, r.Adapter, p, 3))
		if a.Usage.Cached != 0 {
			t.Errorf("both with %q: %d tokens found in the cache", key, a.Usage.Cached)
		}
		answers[key] = a
	}
	if plain := expect(t, p, 3, model.Sampling{}); !same(answers[""].Tokens, plain) {
		t.Errorf("without a key: %v, want %v", answers[""].Tokens, plain)
	}
	if other := !same(answers["a"].Tokens, answers["b"].Tokens) && !same(answers["a"].Tokens, answers[""].Tokens); other != k.otherText {
		t.Errorf("answers: %v, %v, %v", answers[""].Tokens, answers["a"].Tokens, answers["b"].Tokens)
	}
	settle(t, x.p)
	settle(t, x.d)
}

// adapted is what one engine answers with an adapter, each asked once.
func adapted(t *testing.T, name string, p []kv.Token, n int) []kv.Token {
	t.Helper()
	compute := func() []kv.Token {
		e := newEngine(t, func(c *Config) { c.Adapters = []string{"a", "b"} })
		return generate(t, e, Request{ID: "alone", Prompt: p, MaxTokens: n, Adapter: name}).Tokens
	}
	f, _ := expected.LoadOrStore("adapter "+fmt.Sprint(name, p, n), sync.OnceValue(compute))
	return f.(func() []kv.Token)()
}

// The prefix cache of one engine gives blocks only to requests of equal keys.
func TestKeysInPrefixCache(t *testing.T) {
	for kind, k := range keyKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			e := newEngine(t, func(c *Config) { c.Adapters = []string{"a", "b"} })
			ask := func(key string) answer {
				r := Request{ID: kv.RequestID("r" + key), Prompt: prompt(40, 9), MaxTokens: 2}
				k.set(&r, key)
				return generate(t, e, r)
			}
			for _, key := range []string{"", "a", "b"} {
				first, again := ask(key), ask(key)
				if first.Usage.Cached != 0 || again.Usage.Cached != 32 || !same(first.Tokens, again.Tokens) {
					t.Errorf("key %q: cached %d, then %d; tokens %v, then %v", key, first.Usage.Cached, again.Usage.Cached, first.Tokens, again.Tokens)
				}
			}
		})
	}
}

// The CPU tier gives back what the KV cache has evicted only to requests of equal keys.
func TestKeysInCPUTier(t *testing.T) {
	for kind, k := range keyKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			e := newEngine(t, func(c *Config) {
				withTier()(c)
				c.NumBlocks, c.Adapters = 5, []string{"a", "b"}
			})
			n := 0
			ask := func(key string, p []kv.Token) answer {
				n++
				r := Request{ID: kv.RequestID(fmt.Sprint("r", n)), Prompt: p, MaxTokens: 2}
				k.set(&r, key)
				a := generate(t, e, r)
				tierSettled(t, e)
				return a
			}
			evict := func() { ask("", prompt(64, 77+n)) }
			firsts := map[string]answer{}
			for _, key := range []string{"", "a", "b"} {
				if firsts[key] = ask(key, prompt(40, 1)); firsts[key].Usage.Tier+firsts[key].Usage.Cached != 0 {
					t.Errorf("key %q: the first finds %+v", key, firsts[key].Usage)
				}
				evict()
			}
			for key, first := range firsts {
				if again := ask(key, prompt(40, 1)); again.Usage.Tier == 0 || !same(again.Tokens, first.Tokens) {
					t.Errorf("key %q: %+v, tokens %v, at first %v", key, again.Usage, again.Tokens, first.Tokens)
				}
				evict()
			}
		})
	}
}

func TestKeysRefused(t *testing.T) {
	e := newEngine(t, func(c *Config) { c.Adapters = []string{"a"} })
	for name, r := range map[string]Request{
		"model":      {Adapter: "b"},
		"extra_keys": {Extras: []string{strings.Repeat("x", MaxSalt+1)}},
	} {
		r.ID, r.Prompt = "r", prompt(4, 1)
		_, err := e.Submit(t.Context(), r)
		if re := (*RequestError)(nil); !errors.As(err, &re) || re.Kind != KindInvalid || re.Field != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := e.Submit(t.Context(), Request{ID: "r", Prompt: prompt(4, 1), Extras: make([]string, MaxExtras+1)}); err == nil {
		t.Error("any number of extra keys is taken")
	}
	for _, names := range [][]string{{""}, {"a", "a"}, {model.TinyName}, make([]string, MaxAdapters+1)} {
		if err := (Config{Model: tiny(), Adapters: names}).Validate(); err == nil || !strings.Contains(err.Error(), "adapter") {
			t.Errorf("adapters %.50q: %v", names, err)
		}
	}
}
