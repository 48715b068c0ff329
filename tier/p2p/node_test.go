package p2p

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		childNode(os.Getenv(childEnv))
	}
	goleak.VerifyTestMain(m)
}

const (
	testBlockLen = 4096
	testSlots    = 64
	patience     = 20 * time.Second
)

// node is a CPU tier with peers.
type node struct {
	t       *testing.T
	name    string
	agent   agent.Agent
	tier    *Tier
	m       *tier.Manager
	changed chan struct{}
	closed  bool

	mu struct {
		sync.Mutex
		notes []session.Note
		news  chan struct{}
	}
}

// newNode makes a node whose agent is of a fabric; change may alter its configuration.
func newNode(t *testing.T, fabric *local.Fabric, change func(*Config)) *node {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	name := ln.Addr().String()
	ag, err := fabric.Agent(agent.Name(name))
	if err != nil {
		t.Fatal(err)
	}
	return nodeOn(t, ln, ag, change)
}

func nodeOn(t *testing.T, ln net.Listener, ag agent.Agent, change func(*Config)) *node {
	t.Helper()
	return nodeNamed(t, ln.Addr().String(), ag, func(c *Config) {
		c.Listener = ln
		if change != nil {
			change(c)
		}
	})
}

// nodeNamed makes a node without a listener.
func nodeNamed(t *testing.T, name string, ag agent.Agent, change func(*Config)) *node {
	t.Helper()
	return nodeBehind(t, name, ag, change, func(s tier.Secondary) tier.Secondary { return s })
}

// nodeBehind makes a node whose Manager sees its tier wrapped.
func nodeBehind(t *testing.T, name string, ag agent.Agent, change func(*Config), wrap func(tier.Secondary) tier.Secondary) *node {
	t.Helper()
	n := &node{t: t, name: name, agent: ag, changed: make(chan struct{}, 1)}
	n.mu.news = make(chan struct{})
	mem, err := ag.Alloc(testSlots * testBlockLen)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Name: n.name, Agent: ag, Base: mem.Addr(), Blocks: testSlots, BlockLen: testBlockLen,
		Fingerprint: "f", HashSeed: StockHashSeed, Instance: "instance-" + n.name, OnNote: n.note,
	}
	if change != nil {
		change(&cfg)
	}
	if n.tier, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	n.m, err = tier.New(tier.Config{
		Memory: mem.Bytes(), BlockLen: testBlockLen, Secondaries: []tier.Secondary{wrap(n.tier)},
		OnChange: func() { notify(n.changed) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.close)
	return n
}

func (n *node) close() {
	if n.closed {
		return
	}
	n.closed = true
	if err := n.m.Close(); err != nil {
		n.t.Errorf("%s: %v", n.name, err)
	}
	if err := n.agent.Close(); err != nil {
		n.t.Errorf("%s: %v", n.name, err)
	}
}

func (n *node) note(x session.Note) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.notes = append(n.mu.notes, x)
	close(n.mu.news)
	n.mu.news = make(chan struct{})
}

// noted waits for a note.
func (n *node) noted(what, text string) session.Note {
	n.t.Helper()
	deadline := time.After(patience)
	for {
		n.mu.Lock()
		news := n.mu.news
		for _, x := range n.mu.notes {
			if x.What == what && strings.Contains(x.Text, text) {
				n.mu.Unlock()
				return x
			}
		}
		all := fmt.Sprint(n.mu.notes)
		n.mu.Unlock()
		select {
		case <-news:
		case <-deadline:
			n.t.Fatalf("%s: no %s with %q; notes: %s", n.name, what, text, all)
		}
	}
}

// source names this node to a request.
func (n *node) source(id string) *tier.Source {
	host, port, _ := net.SplitHostPort(n.name)
	var p int
	_, _ = fmt.Sscan(port, &p) // it is a number
	return &tier.Source{Host: host, Port: p, KVRequestID: id}
}

func key(i int) core.Key {
	b := bytes.Repeat([]byte{7}, 36)
	binary.BigEndian.PutUint64(b, uint64(i))
	return core.Key(b)
}

func keys(from, to int) []core.Key {
	var out []core.Key
	for i := from; i < to; i++ {
		out = append(out, key(i))
	}
	return out
}

func content(k core.Key) []byte {
	var seed [32]byte
	copy(seed[:], k)
	b := make([]byte, testBlockLen)
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

// compute has the engine of n compute blocks for a request.
func (n *node) compute(req kv.RequestID, ks []core.Key) {
	n.t.Helper()
	res, ok := n.m.Reserve(req, ks)
	if !ok {
		n.t.Fatalf("%s has no room for %d blocks", n.name, len(ks))
	}
	for i, at := range res.Index {
		copy(n.m.Block(res.Slots[i]), content(ks[at]))
	}
	if res.ID != 0 {
		n.m.Commit(res.ID, true)
	}
}

// have computes blocks for a request of their own.
func (n *node) have(ks []core.Key) {
	n.t.Helper()
	n.begin(tier.Request{ID: "have"})
	n.compute("have", ks)
	n.m.Finish("have")
}

func (n *node) begin(r tier.Request) {
	n.t.Helper()
	if err := n.m.Begin(r); err != nil {
		n.t.Fatal(err)
	}
}

// lookup asks until nothing is pending, as an engine does: woken by changes only.
func (n *node) lookup(req kv.RequestID, ks []core.Key) []core.Verdict {
	n.t.Helper()
	deadline := time.After(patience)
	for {
		got := n.m.Lookup(req, ks)
		pending := false
		for _, v := range got {
			pending = pending || v == core.Pending
		}
		if !pending {
			return got
		}
		select {
		case <-n.changed:
		case <-deadline:
			n.mu.Lock()
			defer n.mu.Unlock()
			n.t.Fatalf("%s: still %v; %+v; notes: %v; peers: %+v", n.name, got, n.m.Stats(), n.mu.notes, n.tier.Stats().Total)
		}
	}
}

// startLoad asks until a load is under way.
func (n *node) startLoad(req kv.RequestID, ks []core.Key) {
	n.t.Helper()
	deadline := time.After(patience)
	for {
		n.m.Lookup(req, ks)
		if n.m.Stats().Loads > 0 {
			return
		}
		select {
		case <-n.changed:
		case <-deadline:
			n.t.Fatalf("%s: no load begins", n.name)
		}
	}
}

// expect looks up, compares, and reads what is there.
func (n *node) expect(req kv.RequestID, ks []core.Key, want string) {
	n.t.Helper()
	got := ""
	var there []core.Key
	for i, v := range n.lookup(req, ks) {
		got += map[core.Verdict]string{core.Hit: "+", core.Miss: "-"}[v]
		if v == core.Hit {
			there = append(there, ks[i])
		}
	}
	if got != want {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.t.Fatalf("%s: lookup gives %s, want %s; notes: %v", n.name, got, want, n.mu.notes)
	}
	lease, slots, ok := n.m.Use(there)
	if !ok {
		n.t.Fatalf("%s: hits cannot be used", n.name)
	}
	for i, s := range slots {
		if !bytes.Equal(n.m.Block(s), content(there[i])) {
			n.t.Fatalf("%s: block %x has other content", n.name, string(there[i]))
		}
	}
	n.m.EndUse(lease)
}

// quiet waits until nothing is pinned or under way.
func (n *node) quiet() {
	n.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		s := n.m.Stats()
		if s.Loads+s.Stores+s.Leases+s.PeerPins+s.Writing+s.Quarantined == 0 {
			if s.Strays != 0 {
				n.t.Errorf("%s: %d strays", n.name, s.Strays)
			}
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("%s: not quiet: %+v", n.name, s)
		}
		select {
		case <-n.changed:
		case <-time.After(10 * time.Millisecond): // a pin that goes changes nothing for the engine
		}
	}
}

// slowAgent makes AddPeer wait until it is let go.
type slowAgent struct {
	agent.Agent
	gate chan struct{} // one element lets one admission go
	fail error
	busy chan struct{} // one element for each admission that waits
}

func (a *slowAgent) Capabilities() agent.Capabilities {
	c := a.Agent.Capabilities()
	c.CheapAdmission = false
	return c
}

func (a *slowAgent) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	a.busy <- struct{}{}
	select {
	case <-a.gate:
	case <-ctx.Done():
		return agent.Peer{}, context.Cause(ctx)
	}
	if a.fail != nil {
		return agent.Peer{}, a.fail
	}
	return a.Agent.AddPeer(ctx, info)
}
