package session

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// load is one job: a fetch and what becomes of it.
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
