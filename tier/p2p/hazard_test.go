package p2p

import (
	"encoding/hex"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// The hazards of p2p-tier.md, section 13, that are the transport's. Those of the protocol are in
// package session, H11 in core, H24 in wire.

// pull proves that b can still fetch from a.
func pull(a, b *node, req string, from int) {
	a.t.Helper()
	a.begin(tier.Request{ID: kv.RequestID("have-" + req)})
	a.compute(kv.RequestID("have-"+req), keys(from, from+2))
	a.m.Finish(kv.RequestID("have-" + req))
	b.begin(tier.Request{ID: kv.RequestID(req), Source: a.source(req)})
	b.expect(kv.RequestID(req), keys(from, from+3), "++-")
	b.m.Finish(kv.RequestID(req))
}

// Identities that are none cost their owner the connection, and nobody else anything.
func TestHazardP2P_H6_OddIdentities(t *testing.T) {
	var f struct {
		Cases []struct {
			Name     string
			Identity *string
			Payload  hexBytes
		}
	}
	load(t, "transport.json", &f)
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	for _, c := range f.Cases {
		var id string
		if c.Identity != nil {
			raw, err := hex.DecodeString(*c.Identity)
			if err != nil {
				t.Fatal(err)
			}
			id = string(raw)
		}
		if c.Name == "identity-own" {
			id = a.name
		}
		d, err := zmtp.DialDealer(t.Context(), nil, a.name, zmtp.Options{Identity: id})
		if err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		if err := d.Send(t.Context(), c.Payload); err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		select { // an empty map does not begin a session
		case <-d.Done():
		case <-time.After(patience):
			t.Errorf("%s: still connected", c.Name)
		}
		_ = d.Close() // it never fails
	}
	pull(a, b, "after", 0)
}

// A peer that does not read what it asks for loses its session; the others are served meanwhile.
func TestHazardP2P_H20_H23_PeerFloodsAndDoesNotRead(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b, its := newNode(t, fabric, nil), newNode(t, fabric, nil), newNode(t, fabric, nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	name := ln.Addr().String()
	mute, err := zmtp.Listen(t.Context(), ln, zmtp.Options{Limits: zmtp.Limits{InboxMessages: 1, InboxBytes: 1}}) // nobody receives
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mute.Close() }()
	d, err := zmtp.DialDealer(t.Context(), nil, a.name, zmtp.Options{Identity: name})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	hello := a.tier.cfg.session().Local
	hello.PeerID = name
	hello.Extension = &wire.Extension{Version: 1, Instance: "mute", Agents: []wire.AgentOffer{{Transport: local.Transport, Blob: []byte(its.name)}}}
	for _, m := range []wire.P2PMessage{&hello, wire.P2PConnectAck{PeerID: name}} {
		if err := d.Send(t.Context(), wire.AppendP2P(nil, m)); err != nil {
			t.Fatal(err)
		}
	}
	flood := wire.AppendP2P(nil, &wire.P2PLookup{ID: "x", Keys: make([]core.Key, 3000)})
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for d.Send(t.Context(), flood) == nil {
		}
	}()
	for i := range 5 {
		pull(a, b, fmt.Sprint("meanwhile-", i), 10*i)
	}
	a.gone(name) // as too much waits for it, or as its socket took nothing for unackedTimeout
	select {
	case <-gone:
	case <-time.After(patience):
		t.Error("the flood goes on")
	}
	pull(a, b, "after", 100)
}

// Closing does not wait for peers that never listened.
func TestHazardP2P_H21_CloseAfterUnreachablePeer(t *testing.T) {
	fabric := local.New(local.Config{})
	a := newNode(t, fabric, nil)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	for i, addr := range []string{refusedAddr(t), silent.Addr().String()} {
		a.begin(tier.Request{ID: kv.RequestID(fmt.Sprint(i)), Source: (&node{name: addr}).source("q")})
	}
	done := make(chan struct{})
	go func() {
		a.close()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("Close hangs")
	}
}

func refusedAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	return addr
}

// Requests that name a port where nobody listens miss at once, also the second and the third, and
// disturb nobody.
func TestHazardP2P_H31_RefusedFreezesNobody(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	pull(a, b, "before", 0)
	addr := refusedAddr(t)
	for i := range 3 {
		id := kv.RequestID(fmt.Sprint("refused-", i))
		b.begin(tier.Request{ID: id, Source: (&node{name: addr}).source("q")})
		b.expect(id, keys(0, 3), "++-") // two of them are in memory by now
		b.m.Finish(id)
	}
	pull(a, b, "after", 10)
	pull(b, a, "the other way", 20)
}

// With sessions open and nothing to do there is nothing to wake up for: no deadline of the protocol,
// and no PINGs. That the kernel watches instead is TestKernelWatches; what it costs, TestIdleTicks.
func TestHazardP2P_H25_IdleSleeps(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	pull(a, b, "one", 0)
	a.quiet()
	b.quiet()
	for _, n := range []*node{a, b} {
		if hb := n.tier.cfg.heartbeat(); hb != (zmtp.Heartbeat{}) {
			t.Errorf("heartbeats %+v", hb)
		}
		n.close()
		if at, ok := n.tier.loop.hub.Deadline(); ok {
			t.Errorf("%s: a deadline in %v", n.name, time.Until(at))
		}
	}
}

// Admitting a peer of 19,599 blocks makes no list of them: the agent prepares one list, of its own.
func TestAdmissionCostsNoBlocks(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ag := newLikeNixl(t, ln.Addr().String())
	n := nodeOn(t, ln, ag, func(c *Config) { c.Fingerprint = "2dbaaeb8de80efbe" })
	s := newStock(t, n)
	hello, err := wire.DecodeP2P(s.connect())
	if err != nil {
		t.Fatal(err)
	}
	big := hello.(*wire.P2PConnect)
	big.NumBlocks = 19599
	s.send(wire.AppendP2P(nil, big))
	s.expectType("connect")
	s.expectType("connect_ack")
	if got := ag.next() - 1; got != 1 { // one AddPeer, no Prepare of the peer's
		t.Errorf("the agent was called %d times", got)
	}
}
