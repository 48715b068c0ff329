package p2p

import (
	"net"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/wire"
)

// greedy takes all offers of its node at once.
type greedy struct {
	mu struct {
		sync.Mutex
		offers []core.Key
		peer   Peer
		ended  []Peer
	}
	news chan struct{}
}

func newGreedy() *greedy { return &greedy{news: make(chan struct{}, 1)} }

func (g *greedy) Offered(p Peer, keys []core.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.peer, g.mu.offers = p, append(g.mu.offers, keys...)
	notify(g.news)
}

func (g *greedy) Ended(p Peer) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.ended = append(g.mu.ended, p)
	notify(g.news)
}

func (g *greedy) wait(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for {
		g.mu.Lock()
		ok := done()
		g.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-g.news:
		case <-deadline:
			t.Fatalf("no %s", what)
		}
	}
}

// keep fetches what was offered, as a store does.
func (n *node) keep(g *greedy, req string) {
	g.mu.Lock()
	from, ks := g.mu.peer, g.mu.offers
	g.mu.offers = nil
	g.mu.Unlock()
	n.begin(tier.Request{ID: kv.RequestID(req), Source: from.Source(req)})
	for i, v := range n.lookup(kv.RequestID(req), ks) {
		if v != core.Hit {
			n.t.Fatalf("offer %d is a %v", i, v)
		}
	}
	n.m.Finish(kv.RequestID(req))
}

// What one engine has computed another gets from the store, when the first is gone.
func TestStoreBetweenTwo(t *testing.T) {
	fabric := local.New(local.Config{})
	g := newGreedy()
	store := newNode(t, fabric, func(c *Config) { c.Offers = g })
	a := newNode(t, fabric, func(c *Config) { c.Store = store.name })
	a.noted("session_open", "")
	a.awaitStore()
	a.have(keys(0, 4))
	g.wait(t, "offer", func() bool { return len(g.mu.offers) == 4 })
	store.keep(g, "k")
	a.close()
	g.wait(t, "end", func() bool { return len(g.mu.ended) == 1 && g.mu.ended[0] == g.mu.peer })
	b := newNode(t, fabric, func(c *Config) { c.Store = store.name })
	b.awaitStore()
	b.begin(tier.Request{ID: "r"})
	b.expect("r", keys(0, 6), "++++--")
	b.m.Finish("r")
	b.quiet()
	store.quiet()
}

// awaitStore waits until the store can be asked.
func (n *node) awaitStore() {
	n.t.Helper()
	deadline := time.Now().Add(patience)
	for !n.tier.StoreUp() {
		if time.Now().After(deadline) {
			n.t.Fatalf("%s: no store", n.name)
		}
		time.Sleep(time.Millisecond)
	}
}

// A store that is away, or mute, costs a request nothing.
func TestAwayStoreIsNotWaitedFor(t *testing.T) {
	mute, err := net.Listen("tcp", "127.0.0.1:0") // connections are made and never answered
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	n := newNode(t, local.New(local.Config{}), func(c *Config) { c.Store = mute.Addr().String() })
	n.begin(tier.Request{ID: "r"})
	for _, v := range n.m.Lookup("r", keys(0, 3)) {
		if v != core.Miss {
			t.Fatalf("a request waits for a store that is away: %v", v)
		}
	}
	n.compute("r", keys(0, 3))
	n.m.Finish("r")
	n.quiet() // no store job waits either
}

// What was computed while the store was away is offered when it has come, if it is still there.
func TestStoreIsOfferedWhatItMissed(t *testing.T) {
	fabric := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	name := ln.Addr().String()
	_ = ln.Close() // away
	a := newNode(t, fabric, func(c *Config) { c.Store = name })
	a.have(keys(0, 4))
	a.noted("session_ended", "no connection")
	if ln, err = net.Listen("tcp", name); err != nil {
		t.Skip("the port is somebody else's now: ", err)
	}
	ag, err := fabric.Agent(agent.Name(name))
	if err != nil {
		t.Fatal(err)
	}
	g := newGreedy()
	nodeOn(t, ln, ag, func(c *Config) { c.Offers = g })
	for i := 0; !a.tier.StoreUp(); i++ { // each request calls it, after its pause
		id := kv.RequestID("call-" + strconv.Itoa(i))
		a.begin(tier.Request{ID: id})
		a.m.Finish(id)
		time.Sleep(10 * time.Millisecond)
	}
	g.wait(t, "offer", func() bool { return len(g.mu.offers) == 4 })
	g.mu.Lock()
	defer g.mu.Unlock()
	if want := []core.Key{key(0), key(1), key(2), key(3)}; !slices.Equal(g.mu.offers, want) {
		t.Errorf("offered: %x", g.mu.offers)
	}
}

// Two tiers with other facts behind one port: each peer comes to its own, one with a third is refused.
func TestFront(t *testing.T) {
	fabric := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ports := map[string]*Port{}
	refused := make(chan string, 16)
	front, err := NewFront(FrontConfig{
		Listener: ln,
		Route: func(c *wire.P2PConnect) (*Port, string) {
			if p := ports[c.Fingerprint]; p != nil {
				return p, ""
			}
			return nil, "nobody has the facts " + c.Fingerprint
		},
		OnRefused: func(_, why string) { refused <- why },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer front.Close()
	name := ln.Addr().String()
	var stores []*node
	for i, facts := range []string{"one", "two"} {
		ports[facts] = front.NewPort()
		ag, err := fabric.Agent(agent.Name("store" + strconv.Itoa(i)))
		if err != nil {
			t.Fatal(err)
		}
		s := nodeNamed(t, name, ag, func(c *Config) {
			c.Listener, c.Port, c.Fingerprint, c.Offers = nil, ports[facts], facts, newGreedy()
		})
		s.begin(tier.Request{ID: "own"})
		s.compute("own", keys(10*i, 10*i+2))
		s.m.Finish("own")
		stores = append(stores, s)
	}
	front.Start()
	engine := func(facts string) *node {
		return newNode(t, fabric, func(c *Config) { c.Store, c.Fingerprint = name, facts })
	}
	ask := func(n *node, want string) {
		t.Helper()
		n.awaitStore()
		n.begin(tier.Request{ID: "r"})
		n.expect("r", []core.Key{key(0), key(1), key(10), key(11)}, want)
		n.m.Finish("r")
	}
	first, second, third := engine("one"), engine("two"), engine("three")
	ask(first, "++--")
	ask(second, "--++")
	select {
	case why := <-refused:
		if why != "nobody has the facts three" {
			t.Errorf("refused: %s", why)
		}
	case <-time.After(patience):
		t.Error("the third is not refused")
	}
	if third.tier.StoreUp() {
		t.Error("the third has a store")
	}
	if n := ports["one"].Links(); n != 1 {
		t.Errorf("%d links lead to the first", n)
	}
	stores[0].close() // its port goes with it
	first.noted("session_ended", "")
	ask2 := engine("two")
	ask(ask2, "--++")
	for _, n := range []*node{first, second, third, ask2, stores[1]} {
		n.close() // before the front
	}
}

func TestPeerSource(t *testing.T) {
	for id, want := range map[session.PeerID]tier.Source{
		"host:5710":  {Host: "host", Port: 5710, KVRequestID: "x"},
		"[::1]:5710": {Host: "[::1]", Port: 5710, KVRequestID: "x"},
	} {
		if got := *(Peer{ID: id}.Source("x")); got != want {
			t.Errorf("%s: %+v", id, got)
		}
	}
}
