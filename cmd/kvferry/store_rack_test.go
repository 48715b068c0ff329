package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/choose"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p"
)

// cpuTier is an engine's CPU tier in this process, with a store in another: what an engine does to a
// store, without the engine.
type cpuTier struct {
	t       *testing.T
	peers   *p2p.Tier
	m       *tier.Manager
	agent   agent.Agent
	changed chan struct{}
	closed  bool
	last    int
}

const (
	cpuTierBlocks   = 256
	cpuTierBlockLen = 64 << 10
)

// newCPUTier makes a tier and waits until its store can be asked.
func newCPUTier(t *testing.T, store *process, fingerprint string) *cpuTier {
	t.Helper()
	e := startCPUTier(t, store, fingerprint)
	eventually(t, "a session with the store", func() bool {
		if e.peers.StoreUp() {
			return true
		}
		e.request(func(kv.RequestID) {}) // makes it dial again
		return false
	})
	return e
}

// startCPUTier makes a tier that begins to dial its store.
func startCPUTier(t *testing.T, store *process, fingerprint string) *cpuTier {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	name := ln.Addr().String()
	e := &cpuTier{t: t, changed: make(chan struct{}, 1)}
	e.agent, err = choose.New(choose.Config{Name: agent.Name("cpu-tier-" + name), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	mem, err := e.agent.Alloc(cpuTierBlocks * cpuTierBlockLen)
	if err != nil {
		t.Fatal(err)
	}
	e.peers, err = p2p.New(p2p.Config{
		Listener: ln, Name: name, Agent: e.agent, Base: mem.Addr(), Blocks: cpuTierBlocks, BlockLen: cpuTierBlockLen,
		Fingerprint: fingerprint, HashSeed: "seed", Instance: name, HostID: choose.HostID(), Store: store.ready["p2p"],
	})
	if err != nil {
		t.Fatal(err)
	}
	e.m, err = tier.New(tier.Config{
		Memory: mem.Bytes(), BlockLen: cpuTierBlockLen, Secondaries: []tier.Secondary{e.peers},
		OnChange: func() {
			select {
			case e.changed <- struct{}{}:
			default:
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.close)
	return e
}

func (e *cpuTier) close() {
	if e.closed {
		return
	}
	e.closed = true
	if err := e.m.Close(); err != nil {
		e.t.Error(err)
	}
	if err := e.agent.Close(); err != nil {
		e.t.Error(err)
	}
}

func (e *cpuTier) request(f func(kv.RequestID)) {
	e.t.Helper()
	e.last++
	id := kv.RequestID(fmt.Sprint("r", e.last))
	if err := e.m.Begin(tier.Request{ID: id}); err != nil {
		e.t.Fatal(err)
	}
	f(id)
	e.m.Finish(id)
}

// compute puts blocks into the tier, which are offered to the store.
func (e *cpuTier) compute(ks []core.Key) {
	e.t.Helper()
	e.request(func(id kv.RequestID) {
		res, ok := e.m.Reserve(id, ks)
		if !ok {
			e.t.Fatal("no room")
		}
		for i, at := range res.Index {
			fillBlock(e.m.Block(res.Slots[i]), ks[at])
		}
		if res.ID != 0 {
			e.m.Commit(res.ID, true)
		}
	})
}

// fetch asks for blocks and says which are there, as "+-". One with other content fails the test.
func (e *cpuTier) fetch(ks []core.Key) string {
	e.t.Helper()
	var out strings.Builder
	e.request(func(id kv.RequestID) {
		deadline := time.After(patience)
		for {
			verdicts := e.m.Lookup(id, ks)
			out.Reset()
			for _, v := range verdicts {
				out.WriteString(map[core.Verdict]string{core.Hit: "+", core.Miss: "-", core.Pending: "?"}[v])
			}
			if !strings.Contains(out.String(), "?") {
				break
			}
			select {
			case <-e.changed:
			case <-deadline:
				e.t.Fatalf("still %s", out.String())
			}
		}
		want := make([]byte, cpuTierBlockLen)
		for i, k := range ks {
			if out.String()[i] != '+' {
				continue
			}
			lease, slots, ok := e.m.Use([]core.Key{k})
			if !ok {
				e.t.Fatal("a hit cannot be used")
			}
			if fillBlock(want, k); !bytes.Equal(want, e.m.Block(slots[0])) {
				e.t.Errorf("block %x is not what was computed", string(k))
			}
			e.m.EndUse(lease)
		}
	})
	return out.String()
}

func blockKeys(from, to int) (out []core.Key) {
	for i := from; i < to; i++ {
		out = append(out, core.Key(fmt.Sprintf("%032d\x00\x00\x00\x00", i)))
	}
	return out
}

// fillBlock writes the content that belongs to a key.
func fillBlock(dst []byte, k core.Key) {
	var seed [32]byte
	copy(seed[:], k)
	_, _ = rand.NewChaCha8(seed).Read(dst) // never fails
}
