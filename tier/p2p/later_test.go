package p2p

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// A source keeps a quarter of its memory for one peer at a time, and a longer prompt comes whole all the same,
// in rounds; also when two are asked for at once.
func TestLongPromptComesWhole(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, nil), newNode(t, fabric, nil)
	a.have(keys(0, 60))
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.begin(tier.Request{ID: "s", Source: a.source("q2")})
	for pending := true; pending; { // as an engine does that has two prompts
		pending = false
		for req, ks := range map[kv.RequestID][]core.Key{"r": keys(0, 40), "s": keys(40, 60)} {
			pending = slices.Contains(b.m.Lookup(req, ks), core.Pending) || pending
		}
		if pending {
			select {
			case <-b.changed:
			case <-time.After(patience):
				t.Fatalf("still pending: %+v", b.m.Stats())
			}
		}
	}
	b.expect("r", keys(0, 40), strings.Repeat("+", 40))
	b.expect("s", keys(40, 62), strings.Repeat("+", 20)+"--")
	b.m.Finish("r")
	b.m.Finish("s")
	b.quiet()
	a.quiet()
	if s := a.m.Stats(); s.RefusedPins == 0 {
		t.Error("the source had room for all at once, which shows nothing")
	}
}

// A source that is busy with another peer is not waited for: what it has no room for is a miss.
func TestSourceBusyWithAnother(t *testing.T) {
	fabric := local.New(local.Config{})
	a, b := newNode(t, fabric, func(c *Config) { c.Session.PeerPins = testSlots }), newNode(t, fabric, nil)
	a.have(keys(0, 60))
	other, err := fabric.Agent("other")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()  // it has no memory
	p := newPretender(t, a, other.Name()) // looks up, and fetches nothing
	p.greet()
	p.expectType("connect")
	p.expectType("connect_ack")
	p.send(wire.AppendP2P(nil, wire.P2PConnectAck{PeerID: p.name}))
	p.send(wire.AppendP2P(nil, &wire.P2PLookup{ID: "x", Keys: keys(0, 60)}))
	p.expectType("lookup_resp")
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	b.expect("r", keys(0, 3), "---")
	b.m.Finish("r")
	p.close()
	a.gone(p.name)
	b.begin(tier.Request{ID: "s", Source: a.source("q")})
	b.expect("s", keys(0, 3), "+++")
	b.m.Finish("s")
	a.quiet()
}
