package p2p

import (
	"context"
	"errors"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/wire"
)

func TestPullFromAPeer(t *testing.T) {
	f := local.New(local.Config{})
	a, b := newNode(t, f, nil), newNode(t, f, nil)
	a.have(keys(0, 8))
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.expect("r", keys(0, 10), "++++++++--")
	b.m.Finish("r")
	// Warm, and the other way round, on the same session.
	b.have(keys(20, 23))
	b.begin(tier.Request{ID: "s", Source: a.source("q2")})
	b.expect("s", keys(7, 10), "+--")
	b.m.Finish("s")
	a.begin(tier.Request{ID: "t", Source: b.source("q3")})
	a.expect("t", keys(20, 24), "+++-")
	a.m.Finish("t")
	a.quiet()
	b.quiet()
}

// Of a prompt's blocks only those before the first that is nowhere are fetched. Those behind it are let go at once, while
// the request goes on, also when nothing is fetched.
func TestNothingIsFetchedBehindAMiss(t *testing.T) {
	f := local.New(local.Config{})
	a, b := newNode(t, f, nil), newNode(t, f, nil)
	a.have(append(keys(0, 2), keys(3, 8)...))
	b.begin(tier.Request{ID: "r", Source: a.source("q"), Prefix: true})
	b.expect("r", keys(0, 8), "++------")
	a.quiet()
	b.begin(tier.Request{ID: "s", Source: a.source("q2"), Prefix: true})
	b.expect("s", keys(2, 8), "------")
	a.quiet()
	if got := b.tier.Stats().Total; got.BlocksIn != 2 || got.FetchesDone != 1 {
		t.Errorf("fetched: %+v", got)
	}
	// The same request may ask again, also for what it had no use for, and when there is more.
	b.expect("s", keys(3, 8), "+++++")
	a.have(keys(20, 22))
	b.expect("s", keys(20, 23), "++-")
	b.m.Finish("r")
	b.m.Finish("s")
	a.quiet()
	b.quiet()
	if st := b.m.Stats(); st.Ready != 9 {
		t.Errorf("in memory: %+v", st)
	}
}

// A source whose memory was damaged: that block is a miss, which both a counter and an event say.
func TestDamagedBlockIsCounted(t *testing.T) {
	f := local.New(local.Config{})
	damaged := make(chan event.TierBlocksDamaged, 1)
	a := newNode(t, f, nil)
	b := newNode(t, f, func(c *Config) {
		c.Events = event.SinkFunc(func(e event.Event) {
			if d, ok := e.(event.TierBlocksDamaged); ok {
				damaged <- d
			}
		})
	})
	a.have(keys(0, 3))
	lease, slots, _ := a.m.Use(keys(1, 2))
	a.m.Block(slots[0])[9] ^= 4
	a.m.EndUse(lease)
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.expect("r", keys(0, 3), "+-+")
	b.m.Finish("r")
	if d := <-damaged; d.Blocks != 1 || d.Peer != a.name {
		t.Errorf("%+v", d)
	}
	a.quiet()
	ours, theirs := b.tier.Stats(), a.tier.Stats()
	in, out := ours.Peers[session.PeerID(a.name)], theirs.Peers[session.PeerID(b.name)]
	if in.BlocksDamaged != 1 || in.BlocksIn != 3 || in.BytesIn != 3*testBlockLen || in.BlocksUnchecked != 0 || in.FetchesDone != 1 || ours.Open != 1 {
		t.Errorf("consumer: %+v", ours)
	}
	if out.BlocksOut != 3 || out.FetchesServed != 1 || out.LookupsServed != 1 || theirs.Total != out {
		t.Errorf("source: %+v", theirs)
	}
	b.close()
	if b.tier.Stats().Ended[session.Closing] != 1 {
		t.Errorf("after Close: %+v", b.tier.Stats())
	}
}

func TestPrefillThenDecode(t *testing.T) {
	for _, order := range []string{"prefill first", "decode first"} {
		t.Run(order, func(t *testing.T) {
			f := local.New(local.Config{})
			p, d := newNode(t, f, nil), newNode(t, f, nil)
			src := p.source("pd")
			src.Everything = true
			prefill := func() {
				p.begin(tier.Request{ID: "p", Decoder: &tier.Decoder{KVRequestID: "pd"}})
				p.compute("p", keys(0, 2))
				p.compute("p", keys(0, 4)) // two of them are here already
				p.m.Finish("p")
			}
			decode := func() { d.begin(tier.Request{ID: "d", Source: src}); d.m.Lookup("d", keys(0, 4)) }
			if order == "prefill first" {
				prefill()
				decode()
			} else {
				decode()
				prefill()
			}
			d.expect("d", keys(0, 4), "++++")
			d.m.Finish("d")
			p.quiet()
			d.quiet()
		})
	}
}

// The prefill ends with less than was promised: the decoder learns it, and computes.
func TestPrefillFallsShort(t *testing.T) {
	f := local.New(local.Config{})
	p, d := newNode(t, f, nil), newNode(t, f, nil)
	src := p.source("pd")
	src.Everything = true
	d.begin(tier.Request{ID: "d", Source: src})
	d.m.Lookup("d", keys(0, 3))
	p.begin(tier.Request{ID: "p", Decoder: &tier.Decoder{KVRequestID: "pd"}})
	p.compute("p", keys(0, 2))
	p.m.Finish("p")
	d.expect("d", keys(0, 3), "---")
	d.m.Finish("d")
	p.quiet()
	d.quiet()
}

// Admission runs elsewhere: the ack waits for it, and other peers are served meanwhile.
func TestAdmissionOffTheLoop(t *testing.T) {
	f := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	inner, err := f.Agent("slow")
	if err != nil {
		t.Fatal(err)
	}
	slow := &slowAgent{Agent: inner, gate: make(chan struct{}), busy: make(chan struct{}, 8)}
	a := nodeOn(t, ln, slow, nil)
	a.have(keys(0, 4))
	b, c := newNode(t, f, nil), newNode(t, f, nil)
	b.begin(tier.Request{ID: "r", Source: a.source("b")})
	<-slow.busy
	c.begin(tier.Request{ID: "r", Source: a.source("c")})
	<-slow.busy // both at once
	if v := b.m.Lookup("r", keys(0, 1)); v[0] != core.Pending {
		t.Errorf("answered with %v before it was admitted", v[0])
	}
	slow.gate <- struct{}{}
	slow.gate <- struct{}{}
	b.expect("r", keys(0, 4), "++++")
	c.expect("r", keys(0, 5), "++++-")
}

// An agent that admits one at a time gets one at a time.
func TestAdmissionOneAtATime(t *testing.T) {
	f := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	inner, err := f.Agent("slow")
	if err != nil {
		t.Fatal(err)
	}
	slow := &slowAgent{Agent: inner, gate: make(chan struct{}), busy: make(chan struct{}, 8)}
	a := nodeOn(t, ln, &oneByOne{slow}, nil)
	a.have(keys(0, 1))
	b, c := newNode(t, f, nil), newNode(t, f, nil)
	b.begin(tier.Request{ID: "r", Source: a.source("b")})
	c.begin(tier.Request{ID: "r", Source: a.source("c")})
	<-slow.busy
	select {
	case <-slow.busy:
		t.Error("two at once")
	default:
	}
	slow.gate <- struct{}{}
	<-slow.busy
	slow.gate <- struct{}{}
	b.expect("r", keys(0, 1), "+")
	c.expect("r", keys(0, 1), "+")
}

type oneByOne struct{ *slowAgent }

func (a *oneByOne) Capabilities() agent.Capabilities {
	c := a.slowAgent.Capabilities()
	c.ParallelAdmission = false
	return c
}

// A failed admission ends the session, and the peer's request with it.
func TestAdmissionFails(t *testing.T) {
	f := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	inner, err := f.Agent("slow")
	if err != nil {
		t.Fatal(err)
	}
	slow := &slowAgent{Agent: inner, gate: make(chan struct{}, 1), busy: make(chan struct{}, 8), fail: errors.New("no route")}
	a := nodeOn(t, ln, slow, nil)
	b := newNode(t, f, nil)
	b.begin(tier.Request{ID: "r", Source: a.source("b")})
	slow.gate <- struct{}{}
	b.expect("r", keys(0, 2), "--")
	a.noted("admission_failed", "no route")
	b.noted("session_ended", "")
}

// A session that ends while its peer is being admitted leaves no peer in the agent.
func TestAdmissionSuperseded(t *testing.T) {
	f := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	inner, err := f.Agent("slow")
	if err != nil {
		t.Fatal(err)
	}
	stubborn := &stubbornAgent{Agent: inner, gate: make(chan struct{}), busy: make(chan struct{}, 8), removed: make(chan agent.PeerID, 8)}
	a := nodeOn(t, ln, stubborn, nil)
	b := newNode(t, f, nil)
	b.begin(tier.Request{ID: "r", Source: a.source("b")})
	<-stubborn.busy
	b.close()
	a.noted("session_ended", "")
	stubborn.gate <- struct{}{}
	select {
	case <-stubborn.removed:
	case <-time.After(patience):
		t.Fatal("the peer stays in the agent")
	}
}

// stubbornAgent does not heed the context, and succeeds late.
type stubbornAgent struct {
	agent.Agent
	gate    chan struct{}
	busy    chan struct{}
	removed chan agent.PeerID
}

func (a *stubbornAgent) Capabilities() agent.Capabilities {
	c := a.Agent.Capabilities()
	c.CheapAdmission = false
	return c
}

func (a *stubbornAgent) AddPeer(context.Context, agent.PeerInfo) (agent.Peer, error) {
	a.busy <- struct{}{}
	<-a.gate
	return agent.Peer{ID: agent.PeerID{Name: "late", Gen: 1}}, nil
}

func (a *stubbornAgent) RemovePeer(id agent.PeerID) {
	if id.Name == "late" {
		a.removed <- id
		return
	}
	a.Agent.RemovePeer(id)
}

// A source whose process dies under a fetch: the request misses at once, the slots come back.
func TestSourceDies(t *testing.T) {
	f := local.New(local.Config{Bandwidth: 1}) // nothing ever arrives
	a, b := newNode(t, f, nil), newNode(t, f, nil)
	a.have(keys(0, 4))
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.startLoad("r", keys(0, 4))
	a.close()
	b.expect("r", keys(0, 4), "----")
	b.m.Finish("r")
	b.quiet()
}

// A source that restarts under its name is a new peer, and is found again.
func TestSourceRestarts(t *testing.T) {
	f := local.New(local.Config{})
	a, b := newNode(t, f, nil), newNode(t, f, nil)
	a.have(keys(0, 1))
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.expect("r", keys(0, 1), "+")
	b.m.Finish("r")
	a.close()
	b.noted("session_ended", "")
	ln, err := net.Listen("tcp", a.name)
	if err != nil {
		t.Fatal(err)
	}
	ag, err := f.Agent(agent.Name(a.name))
	if err != nil {
		t.Fatal(err)
	}
	a2 := nodeOn(t, ln, ag, nil)
	a2.have(keys(5, 6))
	b.begin(tier.Request{ID: "s", Source: a2.source("q")})
	b.expect("s", keys(5, 6), "+")
}

// Four sessions in a row with the same peer, which ends each of them: none loses its first message.
func TestReconnects(t *testing.T) {
	const rounds = 4 // half a second each: the pause before a dial to a peer that has just gone
	f := local.New(local.Config{})
	a := newNode(t, f, func(c *Config) { c.Fingerprint = "2dbaaeb8de80efbe" })
	its := newNode(t, f, nil)
	a.have(keys(0, 1))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	name := ln.Addr().String()
	router, err := zmtp.Listen(t.Context(), ln, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = router.Close() }()
	hello := a.tier.cfg.session().Local
	hello.PeerID = name
	hello.Extension = &wire.Extension{Version: 1, Instance: "again", Agents: []wire.AgentOffer{{Transport: local.Transport, Blob: []byte(its.name)}}}
	for i := range rounds {
		d, err := zmtp.DialDealer(t.Context(), nil, a.name, zmtp.Options{Identity: name})
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range []wire.P2PMessage{&hello, wire.P2PConnectAck{PeerID: name}} {
			if err := d.Send(t.Context(), wire.AppendP2P(nil, m)); err != nil {
				t.Fatal(err)
			}
		}
		for _, want := range []string{"connect", "connect_ack"} {
			got, err := router.Recv(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for m, _ := wire.DecodeP2P(got.Frames[0]); m.Type() != want; m, _ = wire.DecodeP2P(got.Frames[0]) {
				if m.Type() != "disconnect" { // of the session before
					t.Fatalf("round %d: a %s instead of a %s", i, m.Type(), want)
				}
				if got, err = router.Recv(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, m := range []wire.P2PMessage{&wire.P2PLookup{ID: "q", Keys: keys(0, 1)}, wire.P2PDisconnect{}} {
			if err := d.Send(t.Context(), wire.AppendP2P(nil, m)); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := router.Recv(t.Context()); err != nil {
			t.Fatal(err)
		} else if m, _ := wire.DecodeP2P(got.Frames[0]); m.Type() != "lookup_resp" {
			t.Fatalf("round %d: a %s", i, m.Type())
		}
		_ = d.Shutdown(t.Context()) // it may have been hung up on already
		_ = d.Close()               // it never fails
	}
	for end := time.Now().Add(patience); a.ended(name) < rounds && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if s := a.tier.Stats(); s.Ended[session.Goodbye] != rounds || s.Sessions != 0 {
		t.Errorf("%+v", s)
	}
	a.quiet()
}

// Aborted by its client while the bytes move: the load ends at once, nothing lands later.
func TestFinishUnderAFetch(t *testing.T) {
	f := local.New(local.Config{Latency: 20 * time.Millisecond})
	a, b := newNode(t, f, nil), newNode(t, f, nil)
	a.have(keys(0, 4))
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.startLoad("r", keys(0, 4))
	b.m.Finish("r")
	b.quiet()
	// The slots are used by others, and keep their content.
	b.have(keys(10, 10+testSlots))
	a.quiet()
	b.begin(tier.Request{ID: "s"})
	for i := 10; i < 10+testSlots; i++ {
		b.expect("s", keys(i, i+1), "+")
	}
}

func TestConfigRefused(t *testing.T) {
	f := local.New(local.Config{})
	ag, err := f.Agent("x")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ag.Close() }()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	good := Config{Listener: ln, Name: "a:1", Agent: ag, Base: 4096, Blocks: 1, BlockLen: 1, HashSeed: "s", Instance: "i"}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"listener": func(c *Config) { c.Listener = nil },
		"agent":    func(c *Config) { c.Agent = nil },
		"name":     func(c *Config) { c.Name = "nocolon" },
		"base":     func(c *Config) { c.Base = 0 },
		"blocks":   func(c *Config) { c.Blocks = 0 },
		"seed":     func(c *Config) { c.HashSeed = "" },
		"instance": func(c *Config) { c.Instance = "" },
		"ping":     func(c *Config) { c.PingEvery = time.Minute },
		"silence":  func(c *Config) { c.Silence = -1 },
		"timeout":  func(c *Config) { c.Session.LoadTimeout = -1 },
	} {
		c := good
		change(&c)
		if c.Validate() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// A request with an unusable source or decoder costs nobody anything.
func TestUnusableParameters(t *testing.T) {
	f := local.New(local.Config{})
	a := newNode(t, f, nil)
	for i, r := range []tier.Request{
		{Source: &tier.Source{Host: "", Port: 1, KVRequestID: "q"}},
		{Source: &tier.Source{Host: "h", Port: 0, KVRequestID: "q"}},
		{Source: &tier.Source{Host: "h", Port: 1}},
		{Source: a.source("q")}, // itself
		{Decoder: &tier.Decoder{}},
	} {
		r.ID = kv.RequestID(rune('a' + i))
		a.begin(r)
		a.expect(r.ID, keys(0, 1), "-")
		a.compute(r.ID, keys(0, 1))
		a.m.Finish(r.ID)
		a.m.Reset()
	}
	a.quiet()
}

// What waits for one peer is bounded, by number and by bytes.
func TestSendQueueIsBounded(t *testing.T) {
	c := &conn{wake: make(chan struct{}, 1)}
	for i := range sendMessages + 1 {
		if ok := c.send([]byte{1}); ok != (i < sendMessages) {
			t.Fatalf("message %d: %v", i, ok)
		}
	}
	c = &conn{wake: make(chan struct{}, 1)}
	if big := make([]byte, sendBytes); !c.send(big) || c.send(big[:1]) {
		t.Error("bytes are not bounded, or a large message cannot be sent")
	}
}

// Of requests that are over nothing is left.
func TestNothingIsKeptOfRequests(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	a.have(keys(0, 3))
	for i := range 10 {
		id := kv.RequestID(strconv.Itoa(i))
		b.begin(tier.Request{ID: id, Source: a.source(string(id)), Decoder: &tier.Decoder{KVRequestID: "d" + string(id)}})
		b.lookup(id, keys(0, 4))
		b.m.Finish(id)
	}
	b.tier.mu.Lock()
	defer b.tier.mu.Unlock()
	if n := len(b.tier.mu.views); n != 0 {
		t.Errorf("%d requests are remembered", n)
	}
}
