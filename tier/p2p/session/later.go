package session

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry/tier/core"
)

// later is what a source has of a transaction's keys and could not keep for it yet (wire.CapP2PLater): it keeps
// only so many blocks for one peer at a time. They are asked for again in a later round, when this node holds
// nothing of the source's memory, so that a prompt of any length comes whole, a share at a time:
//
//	client                                     server, with a share of 2
//	   │ lookup(a b c d), round 0 ───────────────> │
//	   │ <──────── a and b are hits, c and d later │
//	   │ fetch(a b), round 0 ────────────────────> │
//	   │ <════════════════════════════════════════ │
//	   │ lookup(c d), round 1 ───────────────────> │
//
// A source that has no room even then is busy with others, and is not waited for: the keys are misses.
type later struct {
	keys  []core.Key
	hits  int       // answered since the last fetch: one will follow
	epoch uint64    // what the engine's count of fetches is ahead of ours
	tried bool      // they were asked for while this node held nothing
	since time.Time // no hit
	timer *timer
}

// postpone notes a key to be asked for again.
func (t *transaction) postpone(k core.Key) {
	if len(t.later.keys) == 0 {
		t.later.timer = t.c.s.h.after(fetchFollows, t.lookLater)
		t.c.delayed = append(t.c.delayed, t)
	}
	t.later.keys = append(t.later.keys, k)
	if t.later.since.IsZero() {
		t.later.since = t.c.s.h.now
	}
}

// takeLater gives what was postponed.
func (t *transaction) takeLater() []core.Key {
	keys := t.later.keys
	if len(keys) == 0 {
		return nil
	}
	t.c.s.h.stop(t.later.timer)
	t.later.keys, t.later.timer = nil, nil
	t.c.delayed = slices.DeleteFunc(t.c.delayed, func(x *transaction) bool { return x == t })
	return keys
}

func (t *transaction) forgetLater() {
	t.takeLater()
	t.later = later{}
}

// holds reports whether the source keeps blocks for this transaction: when that ends there is room.
func (t *transaction) holds() bool {
	return len(t.loads) > 0 || len(t.waiting) > 0 || t.later.hits > 0
}

// askLater asks for what was postponed, if the time has come.
func (c *clientRole) askLater() {
	if c.s.dead || len(c.delayed) == 0 {
		return
	}
	for _, t := range c.txs {
		if t.holds() {
			for _, d := range c.delayed {
				d.later.tried = false
			}
			return
		}
	}
	for _, t := range slices.Clone(c.delayed) {
		if t.later.tried {
			t.missLater()
			continue
		}
		keys := t.takeLater()
		t.later.tried = true
		t.ask(t.later.epoch+t.fetches, keys)
	}
}

// lookLater ends the wait for hits that nobody fetches, and in the end the wait for other requests of this node,
// which hold what the source may keep for it. Fetches under way have deadlines of their own.
func (t *transaction) lookLater() {
	h := t.c.s.h
	loading := false
	for _, x := range t.c.txs {
		loading = loading || x.loading()
	}
	if loading && (t.loading() || h.now.Sub(t.later.since) < h.cfg.LoadTimeout) {
		t.later.timer = h.after(fetchFollows, t.lookLater)
		return
	}
	if loading {
		t.missLater()
		return
	}
	for _, x := range t.c.txs {
		x.later.hits = 0
	}
	t.later.timer = h.after(fetchFollows, t.lookLater)
	t.c.askLater()
}

// loading reports whether a fetch of the transaction is under way.
func (t *transaction) loading() bool {
	for _, l := range t.loads {
		if !l.ended {
			return true
		}
	}
	return len(t.waiting) > 0
}

// missLater gives up what was postponed.
func (t *transaction) missLater() {
	for _, k := range t.takeLater() {
		t.c.s.h.emit(Answer{Req: t.req.id, Epoch: t.later.epoch + t.fetches, Key: k})
	}
}
