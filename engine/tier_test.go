package engine

import (
	"context"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// withTier gives an engine a CPU tier of 64 blocks.
func withTier(secondaries ...string) func(*Config) {
	return func(c *Config) {
		c.Tier.Memory = 64 * int64(model.CacheBytes(tiny().Config(), 16, 1))
		c.Tier.Secondaries = secondaries
	}
}

// source names an engine to a request.
func source(t testing.TB, e *Engine, id string) *wire.P2PRemote {
	t.Helper()
	host, port, err := net.SplitHostPort(e.Coordinates().P2PAddress)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return &wire.P2PRemote{ID: id, Host: host, Port: n}
}

// tierSettled waits until nothing of the CPU tier is under way, and checks that it holds nothing.
func tierSettled(t testing.TB, e *Engine) {
	t.Helper()
	settle(t, e)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		s, ok := e.TierStats()
		if !ok {
			t.Fatal("no tier")
		}
		m := s.Memory
		if m.Loads+m.Stores+m.Leases+m.Requests+m.Pinned+m.Writing+m.Quarantined+m.PeerPins == 0 && e.Stats().TierCopies == 0 {
			if m.Free+m.Ready != m.Slots || m.Strays != 0 {
				t.Fatalf("not all slots are accounted for: %+v", m)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it stays so: %+v", m)
		}
	}
}

// check generates and compares with the model alone.
func (x tierCheck) run(t testing.TB, e *Engine) answer {
	t.Helper()
	a := generate(t, e, Request{ID: kv.RequestID(x.id), Prompt: x.prompt, MaxTokens: x.max, Tier: x.tier, CacheSalt: x.salt})
	checkAnswer(t, x.id, a, expect(t, x.prompt, x.max, model.Sampling{}))
	return a
}

type tierCheck struct {
	id     string
	prompt []kv.Token
	max    int
	tier   wire.P2PParams
	salt   string
}

// What the KV cache has evicted comes back out of the CPU's memory.
func TestTierAfterEviction(t *testing.T) {
	e := newEngine(t, func(c *Config) { withTier()(c); c.NumBlocks = 12 })
	p := prompt(100, 1)
	tierCheck{id: "first", prompt: p, max: 4}.run(t, e)
	tierSettled(t, e)
	for i := range 3 {
		tierCheck{id: "other" + strconv.Itoa(i), prompt: prompt(120, 10+i), max: 2}.run(t, e)
		tierSettled(t, e)
	}
	a := tierCheck{id: "again", prompt: p, max: 4}.run(t, e)
	if u := a.Usage; u.Tier == 0 || u.Tier+u.Cached != 96 || u.ComputedPrompt != 4 || a.TierTokens["cpu"] != u.Tier {
		t.Errorf("%+v from %v", u, a.TierTokens)
	}
	tierSettled(t, e)
}

// The second engine answers a prompt that the first has seen and computes the tail only.
func TestTierFromPeer(t *testing.T) {
	x, y := newEngine(t, withTier(TierP2P)), newEngine(t, withTier(TierP2P))
	p := prompt(100, 2)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	tierSettled(t, x)
	a := tierCheck{id: "b", prompt: p, max: 4, tier: wire.P2PParams{Source: source(t, x, "tx")}}.run(t, y)
	if u := a.Usage; u.Tier != 96 || u.ComputedPrompt != 4 || a.TierTokens["p2p"] != 96 {
		t.Errorf("%+v from %v", u, a.TierTokens)
	}
	tierSettled(t, x)
	tierSettled(t, y)
}

// A new engine finds what an earlier one has left in files.
func TestTierFilesOutliveEngine(t *testing.T) {
	dir := t.TempDir()
	with := func(c *Config) { withTier(TierFS)(c); c.Tier.FSDir = dir }
	p := prompt(100, 3)
	x := newEngine(t, with)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	if err := x.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	y := newEngine(t, with)
	a := tierCheck{id: "b", prompt: p, max: 4}.run(t, y)
	if u := a.Usage; u.Tier != 96 || u.ComputedPrompt != 4 || a.TierTokens["fs"] != 96 {
		t.Errorf("%+v from %v", u, a.TierTokens)
	}
	tierSettled(t, y)
}
