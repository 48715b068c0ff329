package tcp

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/agent/internal/gate"
)

var (
	errSilence   = errors.New("no progress within the bound of silence")
	errCancelled = errors.New("cancelled")
	errChecksum  = errors.New("checksum of the received bytes is wrong")
	errNoAnswer  = errors.New("the peer does not answer the end of a transfer")
)

// outgoing is one posted transfer. Unless said otherwise its fields are guarded by its link's mu.
type outgoing struct {
	gate.Gate // open while local memory may be touched

	id   agent.TransferID
	wire uint64 // what frames call it
	link *link
	plan *front.Plan

	posted   time.Time
	first    atomic.Int64 // nanoseconds from posted to the first byte; 0 = none yet
	progress atomic.Int64 // nanoseconds from posted to the last progress

	cut    *front.Cutter
	chunks int
	next   int    // chunk to be cut next
	acked  bitset // chunks of a WRITE that the peer has, or of a READ that are in place
	have   int    // number of bits set

	silence *time.Timer
	abort   *time.Timer // bounds the wait for Cancelled
	ended   bool        // Result given
	stopped bool        // Stopped given
}

// moved notes progress; called by stream goroutines without the link's mu.
func (t *outgoing) moved() {
	now := int64(time.Since(t.posted))
	t.first.CompareAndSwap(0, max(now, 1))
	t.progress.Store(now)
}

// check is the silence timer's function.
func (t *outgoing) check() {
	l := t.link
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.ended {
		return
	}
	idle := time.Since(t.posted) - time.Duration(t.progress.Load())
	if left := t.plan.Silence - idle; left > 0 {
		t.silence.Reset(left)
		return
	}
	t.end(agent.OutcomeDeadline, l.fault("transfer", errSilence))
	t.cancel()
}

// end gives the Result and stops touching local memory. Who calls it sees to Stopped: at once by
// stop, after the peer's answer by cancel, or with the link. The caller holds the link's mu.
func (t *outgoing) end(outcome agent.Outcome, err error) {
	t.ended = true
	t.silence.Stop()
	t.Shut()
	r := agent.Result{
		Transfer: t.id, Peer: t.link.id, Outcome: outcome, Err: err, Descs: t.plan.Descs(),
		Post: time.Duration(t.first.Load()), Took: time.Since(t.posted),
	}
	if outcome == agent.OutcomeDone {
		r.Bytes = t.plan.Bytes
	}
	t.link.a.front.Events.Result(r)
}

// stop gives the Stopped. The caller holds the link's mu.
func (t *outgoing) stop() {
	if t.stopped {
		return
	}
	t.stopped = true
	if t.abort != nil {
		t.abort.Stop()
	}
	l := t.link
	delete(l.mu.transfers, t.wire)
	l.mu.writing.drop(t)
	l.mu.reading.drop(t)
	if t.plan.Op == agent.Write {
		l.mu.writes--
		l.mu.chunks -= t.chunks
		l.mu.notifBytes -= len(t.plan.Notif)
	}
	l.a.forget(t.id)
	t.plan.Release()
	l.a.front.Events.Stopped(agent.Stopped{Transfer: t.id, Peer: l.id})
}

// cancel sees to the Stopped of a transfer that ended early. A READ's local memory is written by
// this process alone, so it has stopped already. The caller holds the link's mu.
func (t *outgoing) cancel() {
	if t.plan.Op == agent.Read {
		t.stop()
		return
	}
	if t.link.mu.dead != nil {
		return // Stopped comes with the link's end
	}
	t.link.sayCancel(t.wire)
	t.abort = time.AfterFunc(t.link.a.cfg.AbortTimeout, func() {
		l := t.link
		l.mu.Lock()
		pending := !t.stopped
		l.mu.Unlock()
		if pending {
			l.fail(l.fault("abort", errNoAnswer))
		}
	})
}

// bitset is a set of chunk numbers.
type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

// add reports whether i was not in the set.
func (b bitset) add(i int) bool {
	w, m := i/64, uint64(1)<<(i%64)
	if b[w]&m != 0 {
		return false
	}
	b[w] |= m
	return true
}
