package p2p

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/wire"
)

// pretender says what it likes in a connect.
type pretender struct {
	*stock
	hello wire.P2PConnect
}

// newPretender connects to n under a name of its own, with the agent that offer names.
func newPretender(t *testing.T, n *node, offer agent.Name) *pretender {
	p := &pretender{stock: newStock(t, n), hello: n.tier.cfg.session().Local}
	p.hello.PeerID = p.name
	p.hello.Extension = &wire.Extension{Version: 1, Instance: "pretender", Agents: []wire.AgentOffer{{Transport: local.Transport, Blob: []byte(offer)}}}
	return p
}

func (p *pretender) greet() { p.send(wire.AppendP2P(nil, &p.hello)) }

// ended counts the sessions with a peer that have ended.
func (n *node) ended(peer string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	count := 0
	for _, x := range n.mu.notes {
		if x.What == "session_ended" && string(x.Peer) == peer {
			count++
		}
	}
	return count
}

// gone waits for the end of a peer's session.
func (n *node) gone(peer string) {
	n.t.Helper()
	for end := time.Now().Add(patience); n.ended(peer) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			n.t.Fatalf("%s: the session with %s does not end", n.name, peer)
		}
	}
}

// A peer that offers another peer's agent is not admitted; it learns that at once, and neither its coming
// nor its going does anything to the other's session.
func TestAgentOfAnotherSessionIsRefused(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	pull(a, b, "before", 0)
	for range 3 {
		p := newPretender(t, a, agent.Name(b.name))
		p.greet()
		p.expectType("connect")
		p.expectType("disconnect") // and no ack
		a.noted("admission_failed", "is another session's peer")
		p.close()
	}
	pull(a, b, "after", 10)
	pull(b, a, "the other way", 20)
	if n := a.ended(b.name); n != 0 {
		t.Errorf("the honest peer's session has ended %d times", n)
	}
}

// The honest peer that comes second is refused with an error as clear, and gets in when the other has gone.
func TestAgentNameIsFreeAgain(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	p := newPretender(t, a, agent.Name(b.name))
	p.greet()
	p.expectType("connect")
	p.expectType("connect_ack")
	p.send(wire.AppendP2P(nil, wire.P2PConnectAck{PeerID: p.name}))
	a.noted("session_open", "")
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.expect("r", keys(0, 1), "-")
	b.m.Finish("r")
	a.noted("admission_failed", "is another session's peer")
	p.close()
	a.gone(p.name)
	pull(a, b, "after", 0)
}

// Who takes another's place in the control plane by saying its name keeps only that one out, at no
// wait, and only while it stays.
func TestPeerIDIsTaken(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b, c := newNode(t, fabric, nil), newNode(t, fabric, nil), newNode(t, fabric, nil)
	d, err := zmtp.DialDealer(t.Context(), nil, a.name, zmtp.Options{Identity: b.name})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }() // it never fails
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.expect("r", keys(0, 1), "-")
	b.m.Finish("r")
	pull(a, c, "others", 0)
	_ = d.Close()
	select {
	case <-d.Done():
	case <-time.After(patience):
		t.Fatal("still connected")
	}
	pull(a, b, "after", 10)
}

// A name that is in use by a living session cannot be taken by a second connection: that one is
// refused, and the session goes on.
func TestPeerIDInUse(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	pull(a, b, "before", 0)
	d, err := zmtp.DialDealer(t.Context(), nil, a.name, zmtp.Options{Identity: b.name})
	if err == nil {
		select {
		case <-d.Done():
		case <-time.After(patience):
			t.Error("two connections of one name")
		}
		_ = d.Close()
	}
	pull(a, b, "after", 10)
	if n := a.ended(b.name); n != 0 {
		t.Errorf("the honest peer's session has ended %d times", n)
	}
}

// An AddPeer that was given up still runs when the same peer comes again: the second waits for its end,
// so that the first, which ends late, cannot take the place of the second.
func TestAdmissionWaitsForTheOneGivenUp(t *testing.T) {
	fabric := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	inner, err := fabric.Agent("deaf")
	if err != nil {
		t.Fatal(err)
	}
	deaf := &deafAgent{Agent: inner, gate: make(chan struct{}), busy: make(chan struct{}, 8)}
	a := nodeOn(t, ln, deaf, nil)
	t.Cleanup(func() { close(deaf.gate) })
	its := newNode(t, fabric, nil)
	first := newPretender(t, a, agent.Name(its.name))
	first.greet()
	<-deaf.busy
	first.close()
	a.gone(first.name)
	second := newPretender(t, a, agent.Name(its.name))
	second.greet()
	second.expectType("connect")
	select {
	case <-deaf.busy:
		t.Fatal("both at once")
	case <-time.After(20 * time.Millisecond): // it must not begin; a slow one would be found below
	}
	deaf.gate <- struct{}{}
	<-deaf.busy
	deaf.mu.Lock()
	running := deaf.mu.most
	deaf.mu.Unlock()
	if running != 1 {
		t.Errorf("%d admissions of one peer at once", running)
	}
	deaf.gate <- struct{}{}
	second.expectType("connect_ack")
}

// deafAgent does not heed the context of AddPeer.
type deafAgent struct {
	agent.Agent
	gate chan struct{}
	busy chan struct{}
	mu   struct {
		sync.Mutex
		now, most int
	}
}

func (a *deafAgent) Capabilities() agent.Capabilities {
	c := a.Agent.Capabilities()
	c.CheapAdmission = false
	return c
}

func (a *deafAgent) PeerNames(info agent.PeerInfo) []agent.Name {
	return a.Agent.(agent.Namer).PeerNames(info)
}

func (a *deafAgent) AddPeer(_ context.Context, info agent.PeerInfo) (agent.Peer, error) {
	a.count(1)
	defer a.count(-1)
	a.busy <- struct{}{}
	<-a.gate
	return a.Agent.AddPeer(context.Background(), info)
}

func (a *deafAgent) count(by int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.now += by
	a.mu.most = max(a.mu.most, a.mu.now)
}

// An agent that cannot name peers beforehand is told apart by what they offer.
func TestOfferOfAnotherSessionIsRefused(t *testing.T) {
	n, _ := stockNode(t) // its agent is no Namer
	first := newStock(t, n)
	first.meet()
	n.noted("session_open", "")
	second := newStock(t, n)
	second.send(second.connect())
	second.expectType("connect")
	second.expectType("disconnect")
	n.have(stockKeys(1))
	first.send(wire.AppendP2P(nil, &wire.P2PLookup{ID: "x", Keys: stockKeys(1)}))
	first.expectType("lookup_resp")
	if c := n.ended(first.name); c != 0 {
		t.Error("the first session has ended")
	}
}
