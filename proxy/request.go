package proxy

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// request is one request as a pair of engines can serve it: a client's, or one of several that a
// client's was split into. It belongs to the goroutine that calls serve.
type request struct {
	r       *Router
	out     output
	ctx     context.Context // ends when the client leaves
	header  http.Header     // of the client
	plan    core.Plan
	body    *openai.Object
	name    func(attempt int) kv.RequestID // the legs' X-Request-Id
	machine *core.Machine
	attempt *attempt
	legs    sync.WaitGroup
	next    []core.Event // to step, before anything is waited for

	conversation core.Conversation // zero: none
	earlier      core.Turn         // what D kept of its last turn, for the first attempt
	kept         core.Turn         // what D keeps of this one
	told         bool              // the client has the end of its stream, after which it may leave

	gone      bool // the client, as a failed write showed
	prefilled bool // the attempt's hand-off is known
	outcome   *core.Outcome
}

func (r *Router) newRequest(ctx context.Context, header http.Header, plan core.Plan, body *openai.Object, out output, name func(int) kv.RequestID) *request {
	return &request{
		r: r, out: out, ctx: ctx, header: header, plan: plan, body: body, name: name,
		machine: core.NewMachine(core.Config{
			FirstByte: r.cfg.FirstByteTimeout, Idle: r.cfg.IdleTimeout, Attempts: maxAttempts, Recompute: r.cfg.Recompute,
		}, plan.Disaggregate),
	}
}

var doneEvent = []byte("data: " + openai.Done)

// serve drives the machine until the request has ended and no leg is left.
func (q *request) serve() {
	defer q.legs.Wait()
	defer q.cancelAll()
	client := q.ctx.Done()
	var timer *time.Timer
	var expired <-chan time.Time
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	q.beginTurn()
	q.step(core.Begin{}, nil)
	for q.outcome == nil {
		if q.gone {
			q.gone, client = false, nil
			q.step(core.ClientGone{}, nil)
			continue
		}
		if len(q.next) > 0 {
			ev := q.next[0]
			q.next = q.next[1:]
			q.step(ev, nil)
			continue
		}
		if at, ok := q.machine.Deadline(); !ok {
			expired = nil
		} else if wait := time.Until(at); timer == nil {
			timer = time.NewTimer(wait)
			expired = timer.C
		} else {
			timer.Reset(wait)
			expired = timer.C
		}
		a := q.attempt
		select {
		case l := <-a.located:
			q.step(q.isLocated(l), nil)
		case chunk := <-a.chunks:
			q.step(core.Chunk{Attempt: a.number}, chunk)
		case ev := <-a.ended:
			q.legEnded(ev)
		case <-client:
			client = nil
			q.step(core.ClientGone{}, nil)
		case <-expired:
			q.step(core.Tick{}, nil)
		}
	}
	q.observe()
	q.endTurn()
}

// legEnded drops coordinates if what happened may be their fault, and goes on.
func (q *request) legEnded(ev core.Ended) {
	a := q.attempt
	f := ev.Failure
	if f != nil && f.Kind == core.Cancelled && q.ctx.Err() != nil {
		q.step(core.ClientGone{}, nil) // the leg noticed first that the client has left
	}
	if ev.Leg == core.Prefill && f == nil {
		q.prefilled = true
		ev.Handoff, ev.Releasable = a.handoff.Raw != nil, a.handoff.Releasable()
		if a.asked {
			if err := q.handoffMode(); err != nil {
				f = q.r.unpaired(a, err)
				ev.Failure = f
			}
		}
	}
	ev.Unread = ev.Leg == core.Prefill && f != nil && a.unread
	if f != nil && f.Kind != core.Cancelled {
		q.r.metrics.legFailed(ev.Leg, f)
		suspect := f.Leg == core.Prefill && f.Kind != core.Status || f.Leg == core.Decode && f.Status >= 500
		if suspect && q.plan.Disaggregate {
			p := a.targets[core.Prefill]
			if ev.Leg == core.Decode && a.asked {
				p.forget(a.gen)
			} else {
				p.forgetAny()
			}
			a.targets[core.Decode].forgetAny()
		}
	}
	q.step(ev, nil)
}

func (q *request) step(ev core.Event, chunk []byte) {
	for _, act := range q.machine.Step(time.Now(), ev) {
		switch act := act.(type) {
		case core.Locate:
			q.locate()
		case core.StartLeg:
			q.startLeg(act)
		case core.CancelLeg:
			q.attempt.cancel[act.Leg]()
			if act.Leg == core.Prefill && q.attempt.asked && q.attempt.order == core.Together {
				q.attempt.cut() // D has its leg, and P is told by the key: its answer is of no more use
			}
			q.r.metrics.cancelled(act.Leg, act.Cause)
		case core.Release:
			q.r.release(q.attempt)
		case core.Commit:
			q.out.begin(q.head())
		case core.Forward:
			q.write(chunk)
		case core.Complete:
			q.complete(act.Streamed)
		case core.Reject:
			q.blame(act.Failure)
			q.out.reject(q.head(), act.Failure)
		case core.Break:
			q.blame(act.Failure)
			if !act.Failure.Told {
				q.out.broken(act.Failure)
			}
		case core.End:
			q.outcome = &act.Outcome
		}
	}
}

// write sends a piece of D's stream, with P's count of cached tokens in it.
func (q *request) write(chunk []byte) {
	if q.gone {
		return
	}
	if n, ok := q.cached(); ok {
		chunk = core.SetCachedEvents(chunk, n)
	}
	chunk, kept := core.TakeTurnEvents(chunk)
	q.keep(kept)
	q.gone = !q.out.write(chunk)
	q.told = q.told || !q.gone && bytes.Contains(chunk, doneEvent)
}

func (q *request) complete(streamed bool) {
	if streamed {
		return
	}
	a := q.attempt.answer
	if n, ok := q.cached(); ok {
		a.body = core.SetCached(a.body, n)
	}
	body, kept := core.TakeTurn(a.body)
	a.body = body
	q.keep(kept)
	q.out.whole(q.head(), a)
}

// cached is how many prompt tokens P found in its prefix cache, if D's KV is P's and P has told.
func (q *request) cached() (int, bool) {
	a := q.attempt
	if !q.prefilled || a.handoff.Raw == nil || a.handoff.Cached < 0 {
		return 0, false
	}
	return a.handoff.Cached, true
}

// blame names the engine of a failure that the machine found out about, and counts it.
func (q *request) blame(f *core.Failure) {
	if f.Engine != "" {
		return
	}
	f.Engine = q.attempt.targets[f.Leg].name
	f.Message = "The " + f.Leg.String() + " leg to " + f.Engine + " was given up: " + f.Message + "."
	q.r.metrics.legFailed(f.Leg, f)
}

// Routes, as metric labels and in X-Kvferry-Route.
const (
	routeAlone   = "decode-only"
	routeUnknown = "pair" // it failed before its mode was known
)

// route is the way of a request, and why it is not a pair's.
func (q *request) route() (route, reason string) {
	switch {
	case !q.plan.Disaggregate:
		return routeAlone, q.plan.Reason
	case q.attempt.fellBack && q.attempt.cancel[core.Prefill] == nil:
		return routeAlone, "the KV of the prefill engine could not be had"
	case q.attempt.fellBack:
		return routeAlone, "the prefill engine kept no KV"
	case q.attempt.mode == "":
		return routeUnknown, ""
	}
	return string(q.attempt.mode), ""
}

func (q *request) head() head {
	route, reason := q.route()
	if reason != "" {
		route += "; reason=" + strconv.Quote(reason)
	}
	return head{string(q.attempt.request), route}
}

// end is what became of it, for the client's log line.
func (q *request) end() end {
	a := q.attempt
	route, reason := q.route()
	e := end{legID: string(a.request), route: route, failure: q.outcome.Failure, gone: q.outcome.ClientGone}
	e.args = []any{"decode", a.targets[core.Decode].name}
	if q.plan.Disaggregate {
		e.args = append(e.args, "prefill", a.targets[core.Prefill].name, "transfer_id", string(a.id))
	}
	if reason != "" {
		e.args = append(e.args, "reason", reason)
	}
	e.args = append(e.args, "attempts", q.outcome.Attempts)
	return e
}

// observe counts how long the phases of a good pair took.
func (q *request) observe() {
	o := q.outcome
	if o.Failure != nil || o.ClientGone || !q.plan.Disaggregate {
		return
	}
	m := q.r.metrics
	if !o.PrefillDone.IsZero() {
		m.phase(phasePrefill, o.PrefillDone.Sub(o.PrefillStart))
	}
	if o.FirstChunk.IsZero() {
		return
	}
	m.phase(phaseDecodeFirst, o.FirstChunk.Sub(o.DecodeStart))
	if !o.PrefillDone.IsZero() {
		m.phase(phaseHandoff, max(0, o.FirstChunk.Sub(o.PrefillDone)))
	}
}

func (q *request) startLeg(act core.StartLeg) {
	if q.attempt == nil || q.attempt.number != act.Attempt {
		q.newAttempt(act.Attempt)
	}
	a := q.attempt
	ctx := a.ctx
	if act.Leg == core.Prefill {
		a.sent, a.cut = context.WithCancel(context.WithoutCancel(ctx))
	} else {
		a.source = act.Source
		a.fellBack = q.plan.Disaggregate && act.Source == core.NoKV
		if act.Source == core.FromHandoff {
			ctx = context.WithoutCancel(ctx) // the machine ends it; D must get what P said
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	a.cancel[act.Leg] = cancel
	q.legs.Go(func() {
		defer cancel()
		q.r.run(ctx, a, act.Leg)
	})
}

func (q *request) newAttempt(number int) {
	last := q.attempt
	a := &attempt{
		number: number, request: q.name(number), id: kv.TransferID("xfer-" + newUUID()), key: newKey(),
		plan: q.plan, body: q.body, header: q.header,
		chunks: make(chan []byte), ended: make(chan core.Ended, 2), located: make(chan location, 1),
	}
	if last != nil {
		last.close()
	} else {
		a.earlier = q.earlier // not for a second attempt: D may be done with it
	}
	a.ctx, a.stop = context.WithCancel(q.ctx)
	q.attempt = a
	q.prefilled = false
	for leg := core.Prefill; leg <= core.Decode; leg++ {
		if leg == core.Prefill && !q.plan.Disaggregate {
			continue
		}
		var avoid *target
		if last != nil {
			avoid = last.targets[leg]
			q.r.metrics.retries.Inc()
		}
		a.targets[leg] = q.r.pools[leg].take(avoid)
	}
}

func (q *request) cancelAll() {
	if q.attempt == nil {
		return
	}
	q.attempt.close()
	for _, cancel := range q.attempt.cancel {
		if cancel != nil {
			cancel()
		}
	}
}

// close ends what an attempt holds besides its legs: questions, and engines that got no leg.
func (a *attempt) close() {
	a.stop()
	for leg, t := range a.targets {
		if t != nil && a.cancel[leg] == nil {
			t.giveBack()
		}
	}
}

// newKey is a release key. It must not be guessed, nor be derived from what engines or clients are told.
func newKey() string {
	var b [wire.ReleaseKeyLen / 2]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}
