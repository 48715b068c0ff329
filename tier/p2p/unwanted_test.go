package p2p

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// What the loop hears of keys that a request has no use for: how many of them were hits, and which have no answer. A hit
// that comes after that, or while a lookup is under way, is declined too, and nothing twice.
func TestUnwantedIsDeclinedOnce(t *testing.T) {
	p := &Tier{wake: make(chan struct{}, 1)}
	p.mu.views = map[kv.RequestID]*view{}
	hits := func(epoch uint64, ks ...core.Key) (all []session.Answer) {
		for _, k := range ks {
			all = append(all, session.Answer{Req: "r", Epoch: epoch, Key: k, Hit: true})
		}
		return all
	}
	probe := func(want core.Verdict, ks ...core.Key) {
		t.Helper()
		for _, k := range ks {
			if v := p.Probe("r", k); v != want {
				t.Errorf("%s: %v, want %v", k, v, want)
			}
		}
	}
	heard := func(want ...session.Event) {
		t.Helper()
		got, _ := p.take()
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("the loop hears: %s", d)
		}
	}
	p.Begin(tier.Request{ID: "r", Source: &tier.Source{Host: "127.0.0.1", Port: 1, KVRequestID: "q"}})
	p.take()
	probe(core.Pending, "a", "b", "c", "d", "e")
	p.Flush("r")
	heard(session.Ask{Req: "r", Keys: []core.Key{"a", "b", "c", "d", "e"}})

	p.answer(append(hits(0, "b"), session.Answer{Req: "r", Key: "a"}, session.Answer{Req: "r", Key: "c"}))
	probe(core.Miss, "a")
	p.answer(hits(0, "d")) // in the midst of a lookup
	p.Unwanted("r", []core.Key{"b", "c", "d", "e", "f"})
	p.Flush("r")
	heard(session.Decline{Req: "r", Hits: 2, Open: []core.Key{"e"}})
	p.Unwanted("r", []core.Key{"b", "c", "d", "e", "f"})
	heard()
	p.answer(append(hits(0, "e"), hits(1, "e")...)) // the first has crossed with that, the other is of no lookup
	heard(session.Decline{Req: "r", Hits: 1})

	probe(core.Pending, "b", "c", "e")
	p.Flush("r")
	heard(session.Ask{Req: "r", Keys: []core.Key{"b", "c", "e"}})
	p.answer(hits(0, "b"))
	probe(core.Hit, "b")
}
