package local

import (
	"errors"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/agent/internal/grants"
	"github.com/kvferry/kvferry/agent/internal/memory"
)

// maxPieces bounds what one step copies besides its bytes.
const maxPieces = 1024

var (
	errOutside  = errors.New("refused by the peer: a range lies outside of the grant")
	errRevoked  = errors.New("refused by the peer: the grant was revoked during the transfer")
	errSilence  = errors.New("no progress within the bound of silence")
	errCanceled = errors.New("cancelled")
)

// transfer is one posted transfer. Guarded by the fabric's mu.
type transfer struct {
	id    agent.TransferID
	link  *link
	plan  *front.Plan
	cut   *front.Cutter
	grant *grants.Grant
	ended bool

	posted, first, progress time.Time
	stopTimer               func()
}

func (t *transfer) now() time.Time { return t.link.from.fabric.cfg.Now() }

// begin is what the receiver checks before any byte moves.
func (t *transfer) begin() {
	if t.ended {
		return
	}
	access := agent.AccessWrite
	if t.plan.Op == agent.Read {
		access = agent.AccessRead
	}
	g, err := t.link.to.front.Grants.Find(t.plan.Grant, t.link.from.name, access)
	if err != nil {
		t.refuse(err)
		return
	}
	for r := range t.plan.RemoteRanges {
		if !g.Covers(r.Addr, r.Length) {
			t.refuse(errOutside)
			return
		}
	}
	t.grant, t.first = g, t.now()
	t.cut = t.plan.Cut(t.link.from.fabric.cfg.Chunk, maxPieces)
	t.next()
}

// next schedules the next chunk, or ends the transfer.
func (t *transfer) next() {
	l, cfg := t.link, &t.link.from.fabric.cfg
	chunk := t.cut.Next(nil)
	if len(chunk) == 0 {
		t.arrived()
		return
	}
	var wait time.Duration
	if cfg.Bandwidth > 0 {
		n := 0
		for _, p := range chunk {
			n += p.N
		}
		now := t.now()
		if l.busy.Before(now) {
			l.busy = now
		}
		l.busy = l.busy.Add(time.Duration(float64(n) / cfg.Bandwidth * float64(time.Second)))
		wait = l.busy.Sub(now)
	}
	l.later(wait, func() {
		if t.ended {
			return
		}
		if !t.grant.Enter() {
			t.refuse(errRevoked)
			return
		}
		for _, p := range chunk {
			here, there := memory.At(p.Local, p.N), memory.At(p.Remote, p.N)
			if t.plan.Op == agent.Write {
				copy(there, here)
			} else {
				copy(here, there)
			}
		}
		t.grant.Leave()
		t.progress = t.now()
		t.next()
	})
}

// arrived delivers the notification and sends the answer on its way. Who revokes finds the
// notification queued, or never sees it.
func (t *transfer) arrived() {
	if !t.grant.Enter() {
		t.refuse(errRevoked)
		return
	}
	defer t.grant.Leave()
	if t.plan.Notif != nil {
		var arrival *agent.Arrival
		if t.plan.Op == agent.Write {
			arrival = &agent.Arrival{Bytes: t.plan.Bytes, Took: t.now().Sub(t.first)}
		}
		if !t.link.deliver(t.plan.Notif, arrival) {
			return
		}
	}
	t.answer(agent.OutcomeDone, nil)
}

func (t *transfer) refuse(err error) {
	t.answer(agent.OutcomeFailed, &agent.PeerError{Peer: t.link.to.name, Phase: "transfer", Err: err})
}

// answer ends the transfer when the receiver's word has travelled back.
func (t *transfer) answer(outcome agent.Outcome, err error) {
	t.link.later(t.link.from.fabric.cfg.Latency, func() { t.finish(outcome, err) })
}

// finish gives the Result and the Stopped. No step of an ended transfer copies anything, so the two
// come together.
func (t *transfer) finish(outcome agent.Outcome, err error) {
	if t.ended {
		return
	}
	t.ended = true
	if t.stopTimer != nil {
		t.stopTimer()
	}
	a, now := t.link.from, t.now()
	delete(t.link.transfers, t)
	delete(a.transfers, t.id)
	r := agent.Result{
		Transfer: t.id, Peer: t.link.out, Outcome: outcome, Err: err,
		Descs: t.plan.Descs(), Took: now.Sub(t.posted),
	}
	if outcome == agent.OutcomeDone {
		r.Bytes = t.plan.Bytes
	}
	if !t.first.IsZero() {
		r.Post = t.first.Sub(t.posted)
	}
	a.front.Events.Result(r)
	t.plan.Release()
	a.front.Events.Stopped(agent.Stopped{Transfer: t.id, Peer: t.link.out})
}

// watch ends the transfer once nothing has moved for its bound of silence.
func (t *transfer) watch(d time.Duration) {
	f := t.link.from.fabric
	t.stopTimer = f.cfg.After(d, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if t.ended {
			return
		}
		if left := t.plan.Silence - t.now().Sub(t.progress); left > 0 {
			t.watch(left)
			return
		}
		t.finish(agent.OutcomeDeadline, &agent.PeerError{Peer: t.link.to.name, Phase: "transfer", Err: errSilence})
	})
}
