package session

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
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

// load is one job.
type load struct {
	t        *transaction
	job      core.JobID
	keys     []core.Key
	slots    []core.Slot
	round    uint64
	sent     bool
	granting bool
	grant    agent.GrantID
	deadline *timer
	ended    bool // the tier was told; what is due is only the peer's word
	stopped  bool // nothing can write its slots
	sums     []uint32
	begun    time.Time
	req      kv.RequestID
	why      string // it failed
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

// send sends a fetch, or asks for its grant first. It reports whether it was sent.
func (l *load) send() bool {
	t, s := l.t, l.t.c.s
	if s.h.cfg.Revocable && l.grant == (agent.GrantID{}) {
		if !l.granting {
			l.granting = true
			s.h.emit(Grant{Job: l.job, Agent: s.agent.Name, Slots: l.slots})
		}
		return false
	}
	l.round, l.sent, l.stopped = t.round, true, false
	t.round++
	t.held = false
	t.loads[l.round] = l
	m := &wire.P2PFetch{ID: t.id, Keys: l.keys, Indexes: make([]uint64, len(l.slots)), Round: l.round}
	if !s.stock() {
		m.Grant = l.grant
	}
	for i, slot := range l.slots {
		m.Indexes[i] = uint64(slot)
	}
	s.send(m)
	s.expect()
	return true
}

func (l *load) granted(ev Granted) {
	if ev.Err != nil {
		l.t.c.s.h.note(l.t.c.s.peer, "grant_failed", "%v", ev.Err)
		l.why = ev.Err.Error()
		l.end(false)
		l.t.waiting = slices.DeleteFunc(l.t.waiting, func(x *load) bool { return x == l })
		l.t.c.askLater()
	} else {
		l.grant = ev.ID
	}
	l.t.pump()
}

// end tells the tier, once. It gives the slots back if nobody can write them any more.
func (l *load) end(ok bool) {
	if l.ended {
		return
	}
	h := l.t.c.s.h
	l.ended = true
	h.stop(l.deadline)
	if h.cfg.Revocable && l.granting {
		h.emit(Revoke{Job: l.job})
		l.stopped = true
	}
	l.account(ok)
	h.emit(LoadEnded{Job: l.job, Peer: l.t.c.s.peer, Blocks: len(l.keys), OK: ok, Stopped: l.stopped, Keys: l.keys, Slots: l.slots, Sums: l.sums})
	if l.stopped {
		delete(h.loads, l.job)
	}
}

// account counts an end.
func (l *load) account(ok bool) {
	s := l.t.c.s
	bytes := uint64(len(l.keys)) * s.h.cfg.Local.BlockLen
	s.h.count(s.peer, func(c *Counts) {
		if !ok {
			c.FetchesFailed++
			return
		}
		c.FetchesDone++
		c.BlocksIn += uint64(len(l.keys))
		c.BytesIn += bytes
		if l.sums == nil {
			c.BlocksUnchecked += uint64(len(l.keys))
		}
	})
	if !ok {
		s.h.report(event.TierFetchFailed{Request: l.req, Peer: string(s.peer), Blocks: len(l.keys), Why: l.why})
		return
	}
	s.h.report(event.TierFetchDone{Request: l.req, Peer: string(s.peer), Blocks: len(l.keys), Bytes: int64(bytes), Took: s.h.now.Sub(l.begun), Checked: l.sums != nil})
}

// abort gives a fetch up: the tier learns it at once, the peer is asked to stop.
func (l *load) abort(why string) {
	if l.ended {
		return
	}
	l.why = why
	t := l.t
	if l.sent {
		t.c.s.send(wire.P2PAbortFetch{ID: t.id, Round: l.round})
	} else {
		t.waiting = slices.DeleteFunc(t.waiting, func(x *load) bool { return x == l })
	}
	l.end(false)
	t.pump()
	t.c.askLater()
}

// quiet: nothing writes the slots any more; the tier may not know yet.
func (l *load) quiet() {
	h := l.t.c.s.h
	l.stopped = true
	if h.loads[l.job] == l {
		h.emit(LoadStopped{Job: l.job})
		delete(h.loads, l.job)
	}
}

// settled: the peer's last word on a round. stopped says that it writes no more.
func (l *load) settled(ok, stopped bool) {
	h := l.t.c.s.h
	delete(l.t.loads, l.round)
	was := l.ended
	l.stopped = l.stopped || stopped
	l.end(ok)
	switch {
	case !l.stopped: // its slots wait for the agent's connection to end
		h.halted[l.t.c.s.agent.Name] = append(h.halted[l.t.c.s.agent.Name], l.job)
		delete(h.loads, l.job)
	case was:
		l.quiet()
	}
	l.t.forget()
	l.t.letGo()
	l.t.c.askLater()
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

func (c *clientRole) onDone(m wire.P2PTransferDone) {
	var l *load
	if t := c.txs[m.ID]; t != nil {
		l = t.loads[m.Round]
	}
	if l == nil {
		c.s.h.note(c.s.peer, "stray_message", "transfer_done for round %d of %q", m.Round, m.ID)
		return
	}
	if l.ended {
		// It has crossed with our abort, whose ack, which comes in any case, settles the round.
		if m.Success {
			l.quiet()
		}
		return
	}
	ok := m.Success
	if l.sums = m.Sums; ok && len(l.sums) != len(l.keys) && (l.sums != nil || c.s.theirs.Extension.Has(wire.CapP2PSums)) {
		c.s.h.note(c.s.peer, "sums_missing", "round %d of %q: %d checksums for %d blocks", m.Round, m.ID, len(l.sums), len(l.keys))
		l.why = "its source did not tell the checksums"
		ok = false
	}
	// Stock gives up a round's other transfers without waiting for their end.
	l.settled(ok, m.Success || !c.s.stock())
}

func (c *clientRole) onAbortAck(m wire.P2PAbortAck) {
	t := c.txs[m.ID]
	if t == nil {
		return // of an abort that crossed with the round's end
	}
	if t.fenced && t.fence == m.Round {
		t.fenced = false
		t.dropStale()
		t.pump()
	}
	if l := t.loads[m.Round]; l != nil && l.ended {
		l.settled(false, true)
		return
	}
	t.forget()
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
