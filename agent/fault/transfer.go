package fault

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
)

var (
	errRemoved   = errors.New("the peer was removed")
	errSilence   = errors.New("no progress within the bound of silence (injected)")
	errCancelled = errors.New("cancelled")
)

// transfer is one that the user posted. Guarded by Agent.mu.
type transfer struct {
	a      *Agent
	id     agent.TransferID // the user's
	inner  agent.TransferID // the inner agent's; 0 while it has not started there
	peer   agent.PeerID
	spec   agent.Transfer
	posted time.Time

	start   *timer // of a delayed start
	silence *timer // of one that is not to start

	result  *agent.Result // held back
	given   bool          // Result given
	ready   bool          // nothing moves any more; Stopped is owed
	waiting *timer        // of a delayed Stopped
	stopped bool
}

// ordered is all transfers as they were posted, so that a test repeats itself. The caller holds mu.
func (a *Agent) ordered() []*transfer {
	return slices.SortedFunc(maps.Values(a.mu.outer), func(x, y *transfer) int { return cmp.Compare(x.id, y.id) })
}

// Post is Agent.Post.
func (a *Agent) Post(spec agent.Transfer) (agent.TransferID, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return 0, agent.ErrClosed
	}
	owner, known := a.mu.lists[spec.Remote]
	t := &transfer{a: a, peer: owner, spec: spec, posted: a.opts.Now()}
	var r *active
	if known {
		r = a.decide(Occasion{Point: OnPost, Peer: owner.Name, Op: spec.Op, Msg: spec.Notif})
	}
	if r != nil && r.Do == Fail {
		return 0, &agent.PostError{Op: spec.Op, Reason: r.cause().Error()}
	}
	if r != nil && r.Do == Cut {
		if p := a.mu.peers[owner]; p != nil {
			a.cut(p, r.cause())
		}
		return 0, &agent.PostError{Op: spec.Op, Reason: r.cause().Error()}
	}
	if !a.events.Reserve() {
		return 0, agent.ErrBusy
	}
	if r == nil {
		id, err := a.Agent.Post(spec)
		if err != nil {
			a.events.Unreserve()
			return 0, err
		}
		t.inner = id
		a.mu.inner[id] = t
	}
	a.mu.last++
	t.id = a.mu.last
	a.mu.outer[t.id] = t
	if r != nil {
		t.keep()
		t.hinder(r)
	}
	return t.id, nil
}

// keep copies what the caller may change after Post.
func (t *transfer) keep() {
	t.spec.LocalIdx, t.spec.RemoteIdx = slices.Clone(t.spec.LocalIdx), slices.Clone(t.spec.RemoteIdx)
	t.spec.Notif = slices.Clone(t.spec.Notif)
}

// hinder does what a rule says to a transfer that was accepted.
func (t *transfer) hinder(r *active) {
	switch r.Do {
	case Delay:
		t.start = t.a.later(r.Delay, t.begin)
	case Drop, Stall:
		t.silence = t.a.later(t.spec.Silence, func() { t.release(agent.OutcomeDeadline, t.fault(errSilence)) })
	case WriteLate:
		t.give(t.made(agent.OutcomeFailed, t.fault(r.cause())))
		t.start = t.a.later(r.Delay, t.begin)
	}
}

// begin starts a transfer that was held back.
func (t *transfer) begin() {
	t.start = nil
	id, err := t.a.Agent.Post(t.spec)
	if err != nil {
		t.release(agent.OutcomeFailed, t.fault(err))
		return
	}
	t.inner = id
	t.a.mu.inner[id] = t
}

func (t *transfer) fault(err error) error {
	return &agent.PeerError{Peer: t.peer.Name, Phase: "transfer", Err: err}
}

// made is a Result of the wrapper's own.
func (t *transfer) made(outcome agent.Outcome, err error) agent.Result {
	return agent.Result{
		Transfer: t.id, Peer: t.peer, Outcome: outcome, Err: err,
		Descs: len(t.spec.LocalIdx), Took: t.a.opts.Now().Sub(t.posted),
	}
}

// release ends a transfer as far as the wrapper holds it back: one that has not started ends now;
// of one that has, only what waits here is given.
func (t *transfer) release(outcome agent.Outcome, err error) {
	t.a.drop(t.start)
	t.a.drop(t.silence)
	t.a.drop(t.waiting)
	t.start, t.silence, t.waiting = nil, nil, nil
	switch {
	case t.result != nil:
		t.give(*t.result)
	case t.inner == 0 && !t.given:
		t.give(t.made(outcome, err))
	}
	if t.inner == 0 {
		t.ready = true
	}
	if t.ready {
		t.stop()
	}
}

// give delivers the Result.
func (t *transfer) give(r agent.Result) {
	if t.given {
		return
	}
	t.given, t.result = true, nil
	r.Transfer = t.id
	t.a.events.Result(r)
}

// stop delivers the Stopped, unless the Result is still held back.
func (t *transfer) stop() {
	if t.stopped || !t.given {
		return
	}
	t.stopped = true
	delete(t.a.mu.outer, t.id)
	delete(t.a.mu.inner, t.inner)
	t.a.events.Stopped(agent.Stopped{Transfer: t.id, Peer: t.peer})
}

// onResult is the inner agent's Result.
func (t *transfer) onResult(r agent.Result) {
	if t.given { // WriteLate
		return
	}
	a := t.a
	rule := a.decide(Occasion{Point: OnResult, Peer: r.Peer.Name, Op: t.spec.Op, Msg: t.spec.Notif, Outcome: r.Outcome})
	if rule == nil {
		t.give(r)
		return
	}
	switch rule.Do {
	case Fail:
		if r.Outcome == agent.OutcomeDone {
			r.Outcome, r.Err, r.Bytes = agent.OutcomeFailed, t.fault(rule.cause()), 0
		}
		t.give(r)
	case Cut:
		r.Outcome, r.Err, r.Bytes = agent.OutcomePeerLost, t.fault(rule.cause()), 0
		t.give(r)
		if p := a.mu.peers[r.Peer]; p != nil {
			a.cut(p, rule.cause())
		}
	case Delay:
		t.result = &r
		a.later(rule.Delay, func() {
			if t.result != nil {
				t.give(*t.result)
			}
			if t.ready && t.waiting == nil {
				t.stop()
			}
		})
	}
}

// onStopped is the inner agent's Stopped.
func (t *transfer) onStopped(s agent.Stopped) {
	t.ready = true
	if rule := t.a.decide(Occasion{Point: OnStopped, Peer: s.Peer.Name, Op: t.spec.Op}); rule != nil {
		t.waiting = t.a.later(rule.Delay, func() {
			t.waiting = nil
			t.stop()
		})
		return
	}
	t.stop()
}

// Cancel is Agent.Cancel.
func (a *Agent) Cancel(id agent.TransferID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.mu.outer[id]
	switch {
	case t == nil:
	case t.inner != 0:
		a.Agent.Cancel(t.inner)
	case !t.given:
		t.release(agent.OutcomeCancelled, t.fault(errCancelled))
	}
}
