package proxy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
)

// request is one client request. It belongs to the handler's goroutine.
type request struct {
	r       *Router
	w       http.ResponseWriter
	rc      *http.ResponseController
	req     *http.Request
	plan    core.Plan
	body    *openai.Object
	client  string // the client's own X-Request-Id
	machine *core.Machine
	attempt *attempt
	legs    sync.WaitGroup
	start   time.Time

	gone    bool // the client, as a failed write showed
	status  int  // what the client was sent; 0: nothing
	outcome *core.Outcome
}

func (r *Router) serveCompletion(w http.ResponseWriter, req *http.Request, api core.API) {
	start := time.Now()
	if n := r.inFlight.Add(1); n > int64(r.cfg.MaxInFlight) {
		r.inFlight.Add(-1)
		r.refuse(w, api, overloaded("The router already serves %d requests; try again later.", r.cfg.MaxInFlight))
		return
	}
	defer r.inFlight.Add(-1)
	client := req.Header.Get("X-Request-Id")
	if err := core.CheckClientRequestID(client); err != nil {
		r.refuse(w, api, err)
		return
	}
	if client != "" {
		w.Header().Set("X-Request-Id", client)
	}
	body, release, err := r.readBody(w, req)
	if err != nil {
		r.refuse(w, api, err)
		return
	}
	defer release()
	obj, err := openai.ParseObject(body)
	if err != nil {
		r.refuse(w, api, openai.JSONError(err))
		return
	}
	plan, err := core.NewPlan(api, obj)
	if err != nil {
		r.refuse(w, api, err)
		return
	}
	q := &request{
		r: r, w: w, rc: http.NewResponseController(w), req: req, plan: plan, body: obj, client: client, start: start,
		machine: core.NewMachine(core.Config{
			FirstByte: r.cfg.FirstByteTimeout, Idle: r.cfg.IdleTimeout, Attempts: maxAttempts,
		}, plan.Disaggregate),
	}
	q.serve()
}

// refuse answers a request that never reached an engine.
func (r *Router) refuse(w http.ResponseWriter, api core.API, err error) {
	var e *openai.Error
	if !errors.As(err, &e) {
		e = &openai.Error{Status: http.StatusBadRequest, Type: openai.TypeInvalidRequest, Message: err.Error()}
	}
	if e.Status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	r.metrics.refused(api, e.Status)
	writeError(w, e)
}

// serve drives the machine until the request has ended and no leg is left.
func (q *request) serve() {
	defer q.legs.Wait()
	defer q.cancelAll()
	defer func() { _ = q.rc.SetWriteDeadline(time.Time{}) }() // the connection may serve another request
	client := q.req.Context().Done()
	var timer *time.Timer
	var expired <-chan time.Time
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	q.step(core.Begin{}, nil)
	for q.outcome == nil {
		if q.gone {
			q.gone, client = false, nil
			q.step(core.ClientGone{}, nil)
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
	q.finish()
}

// legEnded drops P's coordinates if what happened may be their fault, and goes on.
func (q *request) legEnded(ev core.Ended) {
	f := ev.Failure
	if f != nil && f.Kind == core.Cancelled && q.req.Context().Err() != nil {
		q.step(core.ClientGone{}, nil) // the leg noticed first that the client has left
	}
	if f != nil && f.Kind != core.Cancelled {
		q.r.metrics.legFailed(ev.Leg, f.Kind)
		a := q.attempt
		suspect := f.Leg == core.Prefill && f.Kind != core.Status || f.Leg == core.Decode && f.Status >= 500
		if suspect && q.plan.Disaggregate {
			p := a.targets[core.Prefill]
			if ev.Leg == core.Decode && a.asked {
				p.forget(a.gen)
			} else {
				p.forgetAny()
			}
		}
	}
	q.step(ev, nil)
}

func (q *request) step(ev core.Event, chunk []byte) {
	for _, act := range q.machine.Step(time.Now(), ev) {
		switch act := act.(type) {
		case core.StartLeg:
			q.startLeg(act)
		case core.CancelLeg:
			q.attempt.cancel[act.Leg]()
			q.r.metrics.cancelled(act.Leg, act.Cause)
		case core.Commit:
			q.commit()
		case core.Forward:
			q.write(chunk)
		case core.Complete:
			q.complete(act.Streamed)
		case core.Reject:
			q.reject(act.Failure)
		case core.Break:
			q.breakOff(act.Failure)
		case core.End:
			q.outcome = &act.Outcome
		}
	}
}

func (q *request) startLeg(act core.StartLeg) {
	if q.attempt == nil || q.attempt.number != act.Attempt {
		q.newAttempt(act.Attempt)
	}
	a := q.attempt
	ctx, cancel := context.WithCancel(q.req.Context())
	a.cancel[act.Leg] = cancel
	q.legs.Go(func() {
		defer cancel()
		q.r.run(ctx, a, act.Leg)
	})
}

func (q *request) newAttempt(number int) {
	unique := newUUID()
	last := q.attempt
	a := &attempt{
		number: number, request: core.LegRequestID(q.client, unique), id: kv.TransferID("xfer-" + newUUID()),
		plan: q.plan, body: q.body, header: q.req.Header,
		chunks: make(chan []byte), ended: make(chan core.Ended, 2),
	}
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
	q.attempt = a
}

func (q *request) cancelAll() {
	if q.attempt == nil {
		return
	}
	for _, cancel := range q.attempt.cancel {
		if cancel != nil {
			cancel()
		}
	}
}

func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}
