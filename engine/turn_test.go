package engine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

func newTurnPair(t *testing.T, change func(*Config)) pair {
	t.Helper()
	return newPullPair(t, func(c *Config) {
		c.Bidirectional = true
		if change != nil {
			change(c)
		}
	})
}

// turn runs both legs of one turn; earlier is what D said that it kept of the last one, if any.
func (x pair) turn(t testing.TB, id string, p []kv.Token, maxTokens int, earlier *kv.TransferParams) (prefill, decode answer) {
	t.Helper()
	first, second := pullLegs(id, p, maxTokens)
	if earlier != nil {
		params := *earlier
		first.Params = &params
	}
	prefill = generate(t, x.p, first)
	if prefill.Err != nil || prefill.Params == nil || !prefill.Params.DoRemotePrefill {
		t.Fatalf("%s: P answers %+v", id, prefill.Output)
	}
	decode = generate(t, x.d, second(prefill))
	checkAnswer(t, id, decode, expect(t, p, maxTokens, model.Sampling{}))
	return prefill, decode
}

// letGo ends what D keeps of a conversation that does not go on.
func (x pair) letGo(t testing.TB, kept *kv.TransferParams) {
	t.Helper()
	if ok, err := x.d.Release(kept.RemoteRequestID, kept.Lease); err != nil || !ok {
		t.Errorf("D keeps nothing as %s: %v, %v", kept.RemoteRequestID, ok, err)
	}
	settle(t, x.d)
	settle(t, x.p)
}

// Three turns of a conversation: P computes what is new, and what it reads it reads from D. The tokens are
// those of the model alone.
func TestTurns(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		cached bool // by P, all but what D has answered
	}{
		"shm":                        {func(c *Config) { c.Transport, c.RecomputeThreshold = TransportSHM, -1 }, true},
		"tcp":                        {func(c *Config) { c.Transport, c.RecomputeThreshold = TransportTCP, -1 }, true},
		"no prefix cache, threshold": {func(c *Config) { c.NoPrefixCache = true }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newTurnPair(t, c.change)
			p := prompt(70, 3)
			var kept *kv.TransferParams
			for i := range 3 {
				had := 0
				if kept != nil {
					had = kept.RemoteNumTokens
				}
				prefill, decode := x.turn(t, fmt.Sprintf("turn%d", i), p, 12, kept)
				u := prefill.Usage
				if i > 0 && u.Cached+u.External != had || u.ComputedPrompt != len(p)-u.Cached-u.External {
					t.Errorf("turn %d: P's usage is %+v, D had %d of %d tokens", i, u, had, len(p))
				}
				if i > 0 && (u.External == 0 || (u.Cached > 0) != c.cached) {
					t.Errorf("turn %d: P's usage is %+v", i, u)
				}
				settle(t, x.p)
				kept = decode.Params
				if kept == nil || !kept.DoRemoteDecode || kept.DoRemotePrefill || kept.RemoteNumTokens != len(p)+11 || kept.Lease == 0 ||
					kept.RemoteBlocksExpiry == nil || kept.RemoteBlockIDs.Len() != (len(p)+11+15)/16 || kept.RemoteEngineID != x.d.Coordinates().EngineID {
					t.Fatalf("turn %d: D keeps %+v", i, kept)
				}
				if s := x.d.Stats(); s.Held != 1 || s.TurnsKept != uint64(i+1) {
					t.Errorf("turn %d: D has %+v", i, s)
				}
				p = slices.Concat(p, decode.Tokens, prompt(20+i, 50+i))
			}
			x.letGo(t, kept)
			if s := x.p.Stats(); s.Received != 2 || s.ReceiveFailed != 0 {
				t.Errorf("P: %+v", s)
			}
		})
	}
}

// What P cannot or need not read it computes, and nothing is left behind: D gets its blocks back if P knows
// that it does not need them.
func TestTurnNotRead(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*Config)
		prompt  func(p, answered []kv.Token) []kv.Token
		params  func(*kv.TransferParams)
		phase   connector.Phase // of what P could not read; "": it did not try
		readers bool            // D has its blocks back by P
	}{
		{name: "below the threshold", readers: true},
		{name: "another conversation", change: noThreshold, phase: connector.PhaseParams,
			prompt: func(p, answered []kv.Token) []kv.Token { return slices.Concat(prompt(1, 9), p, answered) }},
		{name: "another salt", change: noThreshold, phase: connector.PhaseParams},
		{name: "too late", change: noThreshold, phase: connector.PhaseLease,
			params: func(p *kv.TransferParams) { *p.RemoteBlocksExpiry -= 476 }},
		{name: "a lease that is over", change: noThreshold, phase: connector.PhaseLease,
			params: func(p *kv.TransferParams) { p.Lease++ }},
		{name: "other blocks", change: noThreshold, phase: connector.PhaseParams,
			params: func(p *kv.TransferParams) { p.RemoteBlockIDs[0][0]++ }},
		{name: "nobody there", change: noThreshold, phase: connector.PhaseHandshake,
			params: func(p *kv.TransferParams) { p.RemotePort = 1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			x := newTurnPair(t, func(cfg *Config) {
				cfg.LoadFailurePolicy = kv.FailOnLoadFailure
				if c.change != nil {
					c.change(cfg)
				}
			})
			p := prompt(40, 4)
			_, decode := x.turn(t, "one", p, 8, nil)
			kept := *decode.Params
			kept.RemoteBlockIDs = kept.RemoteBlockIDs.Clone()
			expiry := *kept.RemoteBlocksExpiry
			kept.RemoteBlocksExpiry = &expiry
			if c.params != nil {
				c.params(&kept)
			}
			next := slices.Concat(p, decode.Tokens, prompt(10, 5))
			if c.prompt != nil {
				next = c.prompt(p, decode.Tokens)
			}
			first, _ := pullLegs("two", next, 4)
			first.Params = &kept
			if c.name == "another salt" {
				first.CacheSalt = "s"
			}
			a := generate(t, x.p, first)
			checkAnswer(t, "two", a, expect(t, next, 1, model.Sampling{}))
			if a.Usage.External != 0 || a.Params == nil || !a.Params.DoRemotePrefill {
				t.Errorf("%+v", a.Output)
			}
			if (a.LoadErr != nil) != (c.phase != "") || a.LoadErr != nil && a.LoadErr.Phase != c.phase {
				t.Errorf("P could not read it: %v, want phase %q", a.LoadErr, c.phase)
			}
			if ok, err := x.p.Release(a.Params.RemoteRequestID, a.Params.Lease); !ok || err != nil {
				t.Error(ok, err)
			}
			if c.readers {
				settle(t, x.d)
				settle(t, x.p)
				return
			}
			x.letGo(t, decode.Params)
		})
	}
}

func noThreshold(c *Config) { c.RecomputeThreshold = -1 }

// H12: a P without the setting takes D's parameters for what they are, and D has its blocks back; a D
// without it keeps none.
func TestTurnOfUnlikeEngines(t *testing.T) {
	set := false
	x := newPullPair(t, func(c *Config) { // P first, then D
		c.Bidirectional = set
		set = true
	})
	p := prompt(100, 8)
	_, decode := x.turn(t, "one", p, 10, nil)
	next := slices.Concat(p, decode.Tokens, prompt(80, 9))
	prefill, decode2 := x.turn(t, "two", next, 10, decode.Params)
	if prefill.Usage.External != 0 {
		t.Errorf("%+v", prefill.Usage)
	}
	eventually(t, x.d, func(s Stats) bool { return s.Held == 1 }) // of the second turn
	x.letGo(t, decode2.Params)

	y := newPullPair(t, func(c *Config) {
		c.Bidirectional = set
		set = false
	})
	if _, decode := y.turn(t, "three", p, 10, nil); decode.Params != nil {
		t.Errorf("D keeps %+v", decode.Params)
	}
	settle(t, y.d)
	settle(t, y.p)
}

// H13: what is of no conversation that could go on is not kept.
func TestTurnNotKept(t *testing.T) {
	x := newTurnPair(t, nil)
	p := prompt(40, 2)
	first, second := pullLegs("several", p, 4)
	a := generate(t, x.p, first)
	for _, id := range []string{"0_", "1_"} {
		r := second(a)
		r.ID = kv.RequestID(id) + r.ID
		r.Params.Readers = 2
		if d := generate(t, x.d, r); d.Err != nil || d.Params != nil {
			t.Errorf("%+v", d.Output)
		}
	}
	first, second = pullLegs("left", p, 200)
	r := second(generate(t, x.p, first))
	r.IgnoreEOS = true
	s := submit1(t, x.d, r)
	if _, err := s.Next(context.Background()); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if d := generate(t, x.d, Request{ID: "plain", Prompt: p, MaxTokens: 2, Params: &kv.TransferParams{RemoteBlockIDs: kv.BlockIDs{{1}}, RemoteRequestID: "x"}}); d.Params != nil {
		t.Errorf("%+v", d.Params)
	}
	settle(t, x.d)
	settle(t, x.p)
}

// A D that comes to its end, or is not there any more, keeps nothing; P computes.
func TestTurnDecodeEngineCloses(t *testing.T) {
	x := newTurnPair(t, noThreshold)
	p := prompt(70, 4)
	_, decode := x.turn(t, "one", p, 20, nil)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	start := time.Now()
	if err := x.d.Close(ctx); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("D waited %v for a next turn", d)
	}
	next := slices.Concat(p, decode.Tokens, prompt(10, 5))
	first, _ := pullLegs("two", next, 4)
	params := *decode.Params
	first.Params = &params
	a := generate(t, x.p, first)
	checkAnswer(t, "two", a, expect(t, next, 1, model.Sampling{}))
	if a.LoadErr == nil || a.Params == nil {
		t.Errorf("%+v", a.Output)
	}
	if ok, err := x.p.Release(a.Params.RemoteRequestID, a.Params.Lease); !ok || err != nil {
		t.Error(ok, err)
	}
	settle(t, x.p)
}

// Turns that are kept are in nobody's way: many conversations fill D, whose requests go on all the same.
func TestTurnsFillDecodeEngine(t *testing.T) {
	x := newTurnPair(t, func(c *Config) { c.NumBlocks = 16 })
	for i := range 8 {
		x.turn(t, fmt.Sprintf("c%d", i), prompt(40, 30+i), 4, nil) // 3 blocks each
	}
	big := prompt(240, 60)
	if a := generate(t, x.d, Request{ID: "big", Prompt: big, MaxTokens: 4}); a.Err != nil {
		t.Errorf("%v", a.Err)
	}
	if s := x.d.Stats(); s.TurnsKept != 8 || s.TurnsReclaimed < 4 {
		t.Errorf("%+v", s)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := x.d.ResetPrefixCache(ctx, true); err != nil { // waits for what is kept no longer
		t.Error(err)
	}
	settle(t, x.d)
	settle(t, x.p)
}

func TestBidirectionalConfig(t *testing.T) {
	err := Config{Model: tiny(), Bidirectional: true}.Validate()
	if err == nil || !strings.Contains(err.Error(), "bidirectional_kv_xfer works in pull only") {
		t.Errorf("push: %v", err)
	}
	if err := (Config{Model: tiny(), Bidirectional: true, Mode: kv.Pull, DecoderBlocksTTL: time.Millisecond}).Validate(); err == nil {
		t.Error("a time of a millisecond is accepted")
	}
}
