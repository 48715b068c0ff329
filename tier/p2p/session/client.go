package session

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// clientRole is what this node asks of one peer.
type clientRole struct {
	s       *session
	txs     map[string]*transaction
	delayed []*transaction // with keys to ask for again, oldest first
}

func (c *clientRole) init(s *session) { c.s, c.txs = s, map[string]*transaction{} }

// transaction is one id under which this node asks. It outlives its request while answers are due.
type transaction struct {
	c          *clientRole
	id         string
	req        *request // nil: over, only what is still due is awaited
	everything bool
	round      uint64
	unsent     []core.Key
	asks       []*ask
	// held: the peer may hold pins under the current round, or will supply, so it is owed a last fetch.
	held bool
	// kept is how many hits of the current round may still be fetched; declined: some will not be.
	kept     int
	declined bool
	// fence is the round of an abort whose ack says that no earlier lookup will be answered any more.
	fenced  bool
	fence   uint64
	waiting []*load // fetches not yet sent, oldest first
	loads   map[uint64]*load
	fetches uint64 // of this request
	later   later
}

// ask is one lookup sent, or about to be.
type ask struct {
	epoch    uint64
	sent     bool
	fetches  uint64                // before it
	open     map[core.Key]int      // keys without an answer, and how often each was asked
	unwanted map[core.Key]struct{} // those whose answer nobody waits for; nil: none
	stale    bool                  // of a request that is over
	deadline *timer
}

// open begins a transaction for a request.
func (s *session) open(r *request, id string, everything bool) (*transaction, string) {
	c := &s.client
	t := c.txs[id]
	switch {
	case t != nil && t.req != nil:
		return nil, fmt.Sprintf("another request uses the id %q of the same source", id)
	case t != nil && everything:
		// The peer files what it prefills under round 0 only, which is not over yet.
		return nil, fmt.Sprintf("an earlier request under the id %q of the same source is not settled", id)
	case t == nil && len(c.txs) >= maxTransactions:
		return nil, "too many requests wait for the same source"
	case t == nil:
		t = &transaction{c: c, id: id, loads: map[uint64]*load{}}
		c.txs[id] = t
	}
	t.req, t.everything, t.held = r, everything, everything
	t.fetches, t.kept, t.declined = 0, 0, false
	return t, ""
}

func (c *clientRole) busy() bool {
	for _, t := range c.txs {
		if t.req != nil || len(t.loads) > 0 {
			return true
		}
	}
	return false
}

func (c *clientRole) pumpAll() {
	for _, id := range slices.Sorted(maps.Keys(c.txs)) {
		if t := c.txs[id]; t != nil {
			t.pump()
		}
	}
}

// ask notes keys; they are sent when nothing of an earlier round can be mistaken for their answer.
func (t *transaction) ask(epoch uint64, keys []core.Key) {
	t.unsent = append(t.unsent, keys...)
	t.later.epoch = epoch - t.fetches
	h := t.c.s.h
	a := &ask{epoch: epoch, fetches: t.fetches, open: map[core.Key]int{}}
	for _, k := range keys {
		a.open[k]++
	}
	a.deadline = h.after(h.cfg.LookupTimeout, func() { t.timeOut() })
	t.asks = append(t.asks, a)
	t.pump()
}

// timeOut gives the source up for this request.
func (t *transaction) timeOut() {
	h, p := t.c.s.h, t.c.s.peer
	h.count(p, func(c *Counts) { c.LookupsTimedOut++ })
	if t.req != nil {
		h.report(event.TierLookupTimedOut{Request: t.req.id, Peer: string(p)})
	}
	t.fail("its source does not answer a lookup in time")
}

// unanswered reports whether the peer owes answers to lookups that were sent.
func (t *transaction) unanswered() bool {
	return slices.ContainsFunc(t.asks, func(a *ask) bool { return a.sent && len(a.open) > 0 })
}

// pump sends what can be sent.
func (t *transaction) pump() {
	s := t.c.s
	if !s.ready() || s.dead || t.fenced || t.req == nil {
		return
	}
	for len(t.waiting) > 0 {
		if t.unanswered() || !t.waiting[0].send() {
			return
		}
		t.waiting = t.waiting[1:]
	}
	t.letGo()
	if len(t.unsent) > 0 {
		s.send(&wire.P2PLookup{ID: t.id, Keys: t.unsent, Round: t.round})
		s.expect()
		s.h.count(s.peer, func(c *Counts) { c.LookupsAsked++ })
		t.unsent, t.held = nil, true
		for _, a := range t.asks {
			a.sent = true
		}
	}
}

// fetch begins a job.
func (t *transaction) fetch(ev Fetch) {
	h := t.c.s.h
	if len(ev.Keys) == 0 || h.loads[ev.Job] != nil {
		h.emit(LoadEnded{Job: ev.Job, Stopped: true})
		return
	}
	l := &load{t: t, job: ev.Job, keys: ev.Keys, slots: ev.Slots, stopped: true, begun: h.now, req: ev.Req, why: "its source did not send it"}
	bytes := float64(len(ev.Keys)) * float64(h.cfg.Local.BlockLen)
	patience := h.cfg.LoadTimeout + time.Duration(bytes/float64(h.cfg.LoadRate)*float64(time.Second))
	l.deadline = h.after(patience, func() { l.abort("it took too long") })
	h.loads[ev.Job] = l
	t.fetches++
	t.later.hits, t.kept, t.declined = 0, 0, false
	t.waiting = append(t.waiting, l)
	t.pump()
}

func (c *clientRole) onLookupResp(m *wire.P2PLookupResp) {
	t := c.txs[m.ID]
	if t == nil {
		c.s.h.note(c.s.peer, "stray_message", "lookup_resp for the unknown id %q", m.ID)
		return
	}
	for i, k := range m.Keys {
		t.answer(k, m.Hits[i], m.Later != nil && m.Later[i])
	}
	c.s.h.count(c.s.peer, func(c *Counts) { c.LookupsAnswered++ })
	t.dropAnswered()
	t.pump()
	c.askLater()
}

// dropAnswered forgets the asks that nothing is due to.
func (t *transaction) dropAnswered() {
	t.asks = slices.DeleteFunc(t.asks, func(a *ask) bool {
		if len(a.open) == 0 {
			t.c.s.h.stop(a.deadline)
		}
		return len(a.open) == 0
	})
}

// answer gives one key's answer to the oldest ask for it. One that was not sent is not answered.
func (t *transaction) answer(k core.Key, hit, later bool) {
	if t.fenced {
		return
	}
	for _, a := range t.asks {
		if !a.sent || a.open[k] == 0 {
			continue
		}
		if a.open[k]--; a.open[k] == 0 {
			delete(a.open, k)
		}
		_, unwanted := a.unwanted[k]
		switch {
		case t.req == nil || unwanted:
		case later && !hit:
			t.postpone(k)
		default:
			if hit && a.fetches == t.fetches {
				t.kept++
				t.later.hits++
				t.later.since = time.Time{}
			}
			t.c.s.h.emit(Answer{Req: t.req.id, Epoch: a.epoch, Key: k, Hit: hit})
		}
		return
	}
}

// dropStale forgets the asks that will not be answered.
func (t *transaction) dropStale() {
	t.asks = slices.DeleteFunc(t.asks, func(a *ask) bool { return a.stale })
}

// finish ends the transaction's request.
func (t *transaction) finish() {
	t.req = nil
	t.close()
	t.forget()
	t.c.askLater()
}

// fail ends it with a reason, which the request is told.
func (t *transaction) fail(why string) {
	if r := t.req; r != nil {
		r.tx = nil
		t.c.s.h.emit(Fail{Req: r.id, Why: why})
	}
	t.finish()
}

// close aborts what is under way and releases what the peer holds.
func (t *transaction) close() {
	for _, round := range slices.Sorted(maps.Keys(t.loads)) {
		t.loads[round].abort("its request is over")
	}
	for len(t.waiting) > 0 {
		t.waiting[0].abort("its request is over")
	}
	owed := t.unanswered() && !t.fenced
	t.unsent = nil
	t.forgetLater()
	if t.held {
		t.c.s.send(&wire.P2PFetch{ID: t.id, Round: t.round})
		t.held = false
	}
	if owed {
		t.fenced, t.fence = true, t.round
		t.c.s.send(wire.P2PAbortFetch{ID: t.id, Round: t.round})
		t.round++
	}
	for _, a := range t.asks {
		t.c.s.h.stop(a.deadline)
		a.stale = true
	}
	if !t.fenced {
		t.asks = nil
	}
}

// forget drops a transaction that is over and settled.
func (t *transaction) forget() {
	if t.req == nil && len(t.loads) == 0 && len(t.waiting) == 0 && !t.fenced && t.c.txs[t.id] == t {
		delete(t.c.txs, t.id)
		if len(t.c.txs) == 0 {
			t.c.s.expectNothing()
		}
	}
}

// end fails everything with the session.
func (c *clientRole) end(why string) {
	for _, id := range slices.Sorted(maps.Keys(c.txs)) {
		t := c.txs[id]
		for _, a := range t.asks {
			c.s.h.stop(a.deadline)
		}
		for _, round := range slices.Sorted(maps.Keys(t.loads)) {
			if l := t.loads[round]; l != nil {
				l.why = why
				l.settled(false, false)
			}
		}
		for _, l := range t.waiting {
			l.why = why
			l.end(false)
		}
		t.forgetLater()
		t.asks, t.unsent, t.waiting = nil, nil, nil
		if t.req != nil {
			t.req.tx = nil
			c.s.h.emit(Fail{Req: t.req.id, Why: why})
		}
	}
	c.txs = map[string]*transaction{}
}
