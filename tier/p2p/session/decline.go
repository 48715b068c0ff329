package session

import (
	"slices"

	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// decline notes what of the current round will not be fetched. A source keeps hits until a fetch of their round, or
// for long: when none of them will be fetched, an empty fetch ends the round.
//
//	client                                     source
//	   │ lookup(a b c), round 0 ─────────────────> │ pins b, c
//	   │ <─────────────────── a is a miss, b and c hits
//	   │ fetch(), round 0 ───────────────────────> │ lets go of b, c
func (t *transaction) decline(ev Decline) {
	t.declined = true
	t.kept = max(0, t.kept-ev.Hits)
	t.later.hits = max(0, t.later.hits-ev.Hits)
	if len(ev.Open) > 0 {
		open := make(map[core.Key]struct{}, len(ev.Open))
		for _, k := range ev.Open {
			open[k] = struct{}{}
		}
		t.declineOpen(open)
	}
	t.pump()
	t.c.askLater()
}

// declineOpen forgets keys without an answer: those not sent, or to be sent again, are not; the answers of others
// are nobody's.
func (t *transaction) declineOpen(keys map[core.Key]struct{}) {
	has := func(k core.Key) bool {
		_, ok := keys[k]
		return ok
	}
	t.unsent = slices.DeleteFunc(t.unsent, has)
	for _, a := range t.asks {
		for k := range keys {
			switch {
			case a.open[k] == 0 || a.stale:
			case !a.sent:
				delete(a.open, k)
			default:
				if a.unwanted == nil {
					a.unwanted = map[core.Key]struct{}{}
				}
				a.unwanted[k] = struct{}{}
			}
		}
	}
	t.dropAnswered()
	if rest := slices.DeleteFunc(slices.Clone(t.later.keys), has); len(rest) < len(t.later.keys) {
		if len(rest) == 0 {
			t.takeLater()
		} else {
			t.later.keys = rest
		}
	}
}

// letGo ends the round when its source keeps only what was declined. A transfer of an earlier round would end with
// it, and is waited for.
func (t *transaction) letGo() {
	s := t.c.s
	if !t.declined || t.kept > 0 || t.req == nil || t.fenced || !s.ready() || s.dead ||
		len(t.loads)+len(t.waiting) > 0 || t.unanswered() {
		return
	}
	t.declined = false
	if t.held {
		s.send(&wire.P2PFetch{ID: t.id, Round: t.round})
		t.held = false
		t.round++
	}
}
