package session

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// A peer that asks and fetches without end costs a bounded number of keys, and has its room again when they are over.
func TestKeysOfOnePeerAreBounded(t *testing.T) {
	var s script
	s.line(t, "new")
	hello := testConnect("p:1")
	hello.NumBlocks = wire.MaxP2PKeys
	for _, ev := range []Event{
		Message{Identity: "p:1", Link: 1, Msg: &hello}, Up{Peer: "p:1", Gen: 1}, Admitted{Peer: "p:1", Gen: 1},
		Message{Identity: "p:1", Link: 1, Msg: wire.P2PConnectAck{PeerID: "p:1"}},
	} {
		s.step(ev)
	}
	many, indexes, pending := make([]core.Key, wire.MaxP2PKeys), make([]uint64, wire.MaxP2PKeys), make([]core.Served, wire.MaxP2PKeys)
	for i := range many {
		many[i], indexes[i], pending[i].Verdict = core.Key(fmt.Sprint(i)), uint64(i), core.Pending
	}
	say := func(m wire.P2PMessage) (out []Action) {
		for _, a := range s.h.Step(s.now, Message{Identity: "p:1", Link: 1, Msg: m}) {
			if _, told := a.(Report); !told {
				out = append(out, a)
			}
		}
		return out
	}
	r := &s.h.sessions["p:1"].server
	for round := range uint64(2) {
		portions := 0
		for a := say(&wire.P2PLookup{ID: "q", Round: round, Keys: many}); len(a) > 0; portions++ {
			p := a[0].(Serve)
			if len(p.Keys) > DefaultPortion {
				t.Fatalf("a portion of %d keys", len(p.Keys))
			}
			a = s.h.Step(s.now, Served{Lookup: p.Lookup, Answers: pending[:len(p.Keys)]})
		}
		if portions != wire.MaxP2PKeys/DefaultPortion {
			t.Fatalf("%d portions", portions)
		}
		if a := say(&wire.P2PFetch{ID: "f", Round: round, Keys: many, Indexes: indexes}); len(a) != 0 {
			t.Fatalf("fetch %d: %v", round, a)
		}
	}
	if a := say(&wire.P2PLookup{ID: "q", Round: 2, Keys: many[:1]}); len(a) != 1 || a[0].(Send).Msg.(*wire.P2PLookupResp).Hits[0] {
		t.Errorf("a lookup too many: %v", a)
	}
	if a := say(&wire.P2PFetch{ID: "f", Round: 2, Keys: many[:1], Indexes: indexes[:1]}); len(a) != 2 || a[1].(Send).Msg.(wire.P2PTransferDone).Success {
		t.Errorf("a fetch too many: %v", a)
	}
	if r.asked != maxKeys || r.wanted != maxKeys {
		t.Errorf("%d and %d keys are kept", r.asked, r.wanted)
	}
	say(&wire.P2PFetch{ID: "q", Round: 0})
	say(&wire.P2PFetch{ID: "f", Round: 0})
	if r.asked != 0 || r.wanted != 0 {
		t.Errorf("%d and %d keys are kept of what is over", r.asked, r.wanted)
	}
}

// The rounds that are remembered because they came too late are bounded.
func TestExpiredRoundsAreBounded(t *testing.T) {
	var r serverRole
	r.init(nil)
	for i := range uint64(3 * maxExpired) {
		r.expire(roundKey{"q", i})
		r.expire(roundKey{"q", i})
	}
	if _, last := r.expired[roundKey{"q", 3*maxExpired - 1}]; len(r.expired) > maxExpired || len(r.expiredOrder) > maxExpired || !last {
		t.Errorf("%d rounds in a list of %d; the last is there: %v", len(r.expired), len(r.expiredOrder), last)
	}
}

// What is remembered of strangers, and of ids, is bounded.
func TestBooksAreBounded(t *testing.T) {
	var s script
	s.line(t, "new")
	for i := range uint64(2*maxLinks + 1) {
		s.h.Step(s.now, Message{Identity: fmt.Sprint("stranger:", i), Link: i + 1, Msg: wire.P2PDisconnect{}})
		s.h.pause(PeerID(fmt.Sprint("peer:", i)))
	}
	for i := range maxBindings + 10 {
		s.h.binding(fmt.Sprint(i))
	}
	if l, p, b := len(s.h.links), len(s.h.pauses), len(s.h.bindings); l > maxLinks || p > maxPauses || b > maxBindings {
		t.Errorf("%d links, %d pauses, %d bindings", l, p, b)
	}
}
