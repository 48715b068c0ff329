package session

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// A long lookup whose first half is ready last: each of its blocks takes the place of one of the second half, the last
// one first. A search of all that is kept, for each of them, would take minutes.
func TestBeginningOfALongLookupIsKept(t *testing.T) {
	const share = wire.MaxP2PKeys / 2
	var s script
	s.line(t, fmt.Sprintf("new pins=%d", share))
	s.line(t, "meet p:1 1")
	m := &wire.P2PLookup{ID: "q", Keys: make([]core.Key, 2*share)}
	at := map[core.Key]int{}
	for i := range m.Keys {
		m.Keys[i] = core.Key(fmt.Sprint(i))
		at[m.Keys[i]] = i
	}
	var resp *wire.P2PLookupResp
	given := map[core.PinID]bool{} // back
	// serve carries out the portions that follow, with the pin of a hit being its place in the lookup.
	serve := func(actions []Action, verdict func(at int) core.Verdict) {
		for len(actions) > 0 {
			a := actions[0]
			actions = actions[1:]
			switch a := a.(type) {
			case Serve:
				ev := Served{Lookup: a.Lookup}
				for _, k := range a.Keys {
					ev.Answers = append(ev.Answers, core.Served{Verdict: verdict(at[k]), Pin: core.PinID(at[k])})
				}
				actions = append(actions, s.h.Step(s.now, ev)...)
			case Unpin:
				for _, p := range a.Pins {
					given[p] = true
				}
			case Send:
				resp = a.Msg.(*wire.P2PLookupResp)
			}
		}
	}
	serve(s.h.Step(s.now, Message{Identity: "p:1", Link: 1, Msg: m}), func(at int) core.Verdict {
		if at < share-1 || at == 2*share-1 {
			return core.Pending
		}
		return core.Hit
	})
	if resp != nil || len(given) != 0 {
		t.Fatalf("%d blocks are given back, answer %v", len(given), resp)
	}
	serve(s.h.Step(s.now, Changed{}), func(int) core.Verdict { return core.Hit })
	if resp == nil {
		t.Fatal("no answer")
	}
	for i, hit := range resp.Hits {
		if hit != (i < share) || given[core.PinID(i)] == hit {
			t.Fatalf("block %d: hit %v, given back %v", i, hit, given[core.PinID(i)])
		}
	}
}
