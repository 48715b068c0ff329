package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/http/httptrace"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// attempt is one pair of legs, with ids of its own. The handler's goroutine writes it, before it starts
// a leg that reads it; handoff and unread are written by P's leg, answer by D's, and both are read once it has ended.
type attempt struct {
	number  int
	request kv.RequestID
	id      kv.TransferID
	key     string // by which P lets go what it keeps of it, told P only
	plan    core.Plan
	body    *openai.Object
	header  http.Header // of the client
	targets [2]*target
	ctx     context.Context // ends with the attempt, and when the client leaves
	stop    context.CancelFunc
	cancel  [2]context.CancelFunc
	located chan location
	chunks  chan []byte // D's stream; unbuffered, so that a slow client slows D's leg only
	ended   chan core.Ended

	peer  core.Peer // P's coordinates
	gen   uint64    // of them
	asked bool      // the others of these are set
	mode  kv.TransferMode
	order core.Order

	sent context.Context // of P's leg on the wire
	cut  context.CancelFunc

	earlier  core.Turn // what D kept of an earlier turn, for this attempt only
	handoff  core.Handoff
	unread   bool        // P has its leg, and what it answered is not known
	source   core.Source // of D's KV
	fellBack bool        // D computes the prompt, as P kept nothing
	answer   answer
}

// answer is D's answer if it is not streamed.
type answer struct {
	contentType string
	body        []byte
}

// run carries out one leg and says how it ended; a panic is a failure of this leg.
func (r *Router) run(ctx context.Context, a *attempt, leg core.Leg) {
	t := a.targets[leg]
	var f *core.Failure
	defer func() {
		if p := recover(); p != nil {
			r.log.Error("a leg failed", "leg", leg.String(), "panic", p, "stack", string(debug.Stack()))
			f = &core.Failure{Leg: leg, Engine: t.name, Kind: core.Internal, Status: http.StatusInternalServerError, Message: internalError().Message}
		}
		if f != nil && ctx.Err() != nil {
			f.Kind = core.Cancelled
		}
		t.give(f)
		a.ended <- core.Ended{Leg: leg, Attempt: a.number, Failure: f}
	}()
	if leg == core.Prefill {
		f = r.runPrefill(ctx, a, t)
	} else {
		f = r.runDecode(ctx, a, t)
	}
}

// runPrefill is P's leg. What P answers is needed to tell a stock P to let go, by way of D, so that a cancel
// gives an answer that may be on its way the time to arrive, and one that has begun the time to end. If D has
// its leg already, as in push, the leg is cut at once.
func (r *Router) runPrefill(ctx context.Context, a *attempt, t *target) *core.Failure {
	defer a.cut()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(prefillGrace, a.cut) })
	defer stop()
	resp, f := r.post(a.sent, a, t, core.PrefillBody(a.plan.API, a.body, a.id, a.earlier))
	if f != nil {
		a.unread = f.Kind != core.Connect && f.Kind != core.Internal
		return f
	}
	a.unread = resp.StatusCode/100 == 2 // an error keeps nothing
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		f := readFailure(t, resp)
		// Perhaps because of what D said: the client is not to blame for that.
		f.Retry = f.Retry || a.earlier.Kept() && resp.StatusCode == http.StatusBadRequest
		return f
	}
	if stop() {
		defer context.AfterFunc(ctx, func() { time.AfterFunc(prefillTail, a.cut) })()
	}
	body, err := readAll(resp.Body, maxPrefillAnswer)
	if err != nil {
		return brokenFailure(t, core.Broken, "broke off its answer: %v", err)
	}
	o, err := openai.ParseObject(body)
	if err != nil {
		return brokenFailure(t, core.Garbage, "gave an answer that cannot be used: %v", err)
	}
	if a.handoff, err = core.ReadHandoff(o); err != nil {
		return brokenFailure(t, core.Garbage, "gave hand-off parameters that cannot be used: %v", err)
	}
	a.unread = false
	if a.handoff.Releasable() {
		t.keyless.Store(false)
	}
	return nil
}

func (r *Router) runDecode(ctx context.Context, a *attempt, t *target) *core.Failure {
	var body []byte
	switch a.source {
	case core.FromCoordinates:
		body = core.DecodeBody(a.body, a.peer, a.request, a.id)
	case core.FromHandoff:
		if err := a.handoff.Check(cmp.Or(a.mode, a.handoff.Mode())); err != nil {
			return brokenFailure(a.targets[core.Prefill], core.Garbage, "gave hand-off parameters that %s cannot use: %v", t.name, err)
		}
		body = core.HandoffBody(a.body, a.handoff.Raw)
	default:
		body = core.AloneBody(a.body)
	}
	sent, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	hold := newHold(a.source == core.FromHandoff && !a.handoff.Releasable(), cut)
	defer hold.end()
	stop := context.AfterFunc(ctx, hold.cancelled)
	defer stop()
	resp, f := r.post(hold.trace(sent), a, t, body)
	hold.end() // D is at work: a cancel counts at once
	if f != nil {
		return f
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return readFailure(t, resp)
	}
	contentType := cmp.Or(resp.Header.Get("Content-Type"), "application/json")
	if media, _, err := mime.ParseMediaType(contentType); err == nil && media == openai.EventStream {
		return stream(ctx, a.chunks, t, resp.Body)
	}
	whole, err := readAll(resp.Body, maxAnswer)
	if err != nil {
		return brokenFailure(t, core.Broken, "broke off its answer: %v", err)
	}
	if _, err := openai.ParseObject(whole); err != nil {
		return brokenFailure(t, core.Garbage, "gave an answer that cannot be used: %v", err)
	}
	a.answer = answer{contentType, whole}
	return nil
}

// post sends a leg and waits for the header of its answer.
func (r *Router) post(ctx context.Context, a *attempt, t *target, body []byte) (*http.Response, *core.Failure) {
	var reused, connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { connected.Store(true); reused.Store(info.Reused) },
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url.String()+a.plan.API.Path(), bytes.NewReader(body))
	if err != nil {
		return nil, brokenFailure(t, core.Internal, "cannot be asked: %v", err)
	}
	req.Header = r.engineHeader(a)
	if t.leg == core.Prefill && a.plan.Disaggregate {
		req.Header.Set(wire.ReleaseKeyHeader, a.key)
	}
	resp, err := r.transport.RoundTrip(req)
	switch {
	case err == nil:
		return resp, nil
	case !connected.Load():
		f := connectFailure(t, err)
		f.Retry = len(r.pools[t.leg].targets) > 1
		return nil, f
	case reused.Load():
		f := brokenFailure(t, core.Stale, "closed a kept connection before it answered: %v", err)
		f.Retry = true
		return nil, f
	}
	return nil, brokenFailure(t, core.Broken, "closed the connection before it answered: %v", rootCause(err))
}

func rootCause(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("it died, or closed the connection")
	}
	return err
}

// readFailure keeps an engine's own error.
func readFailure(t *target, resp *http.Response) *core.Failure {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // what there is of it
	f := statusFailure(t, resp, body)
	// D could not reach P where the router said: P may have come back elsewhere.
	f.Retry = t.leg == core.Decode && readUpstream(body).code == openai.CodeTransfer+"_handshake"
	return f
}

var errToldError = errors.New("an error event")

// stream hands D's events to the handler as they come. A complete stream ends with [DONE]; an error
// event of D's ends it as well and is the last that is forwarded.
func stream(ctx context.Context, chunks chan<- []byte, t *target, body io.ReadCloser) *core.Failure {
	var (
		reader  openai.EventReader
		in      [32 << 10]byte
		bufs    [2][]byte // in turn: the handler is done with one when it takes the next
		turn    int
		sent    bool
		done    bool
		failure *core.Failure
		ending  *time.Timer
	)
	for {
		n, err := body.Read(in[:])
		out := bufs[turn][:0]
		feedErr := reader.Feed(in[:n], func(ev openai.Event) error {
			if done {
				return nil
			}
			if bytes.HasPrefix(ev.Data, []byte(`{"error"`)) {
				failure = eventFailure(t, ev.Data)
				if sent || len(out) > 0 {
					out = append(out, ev.Raw...)
					failure.Told = true
				}
				return errToldError
			}
			out = append(out, ev.Raw...)
			done = string(ev.Data) == openai.Done
			return nil
		})
		bufs[turn] = out
		if len(out) > 0 {
			turn = 1 - turn
			sent = true
			select {
			case chunks <- out:
			case <-ctx.Done():
				return brokenFailure(t, core.Cancelled, "was told to stop")
			}
		}
		switch {
		case failure != nil:
			return failure
		case feedErr != nil:
			return brokenFailure(t, core.Garbage, "sent a stream that cannot be used: %v", feedErr)
		case err != nil && done:
			return nil
		case done && ending == nil:
			// The end of the answer keeps the connection for the next leg. It is not worth a wait.
			ending = time.AfterFunc(afterDone, func() { _ = body.Close() })
			defer ending.Stop()
		case errors.Is(err, io.EOF):
			return brokenFailure(t, core.Broken, "ended its stream before it was whole")
		case err != nil:
			return brokenFailure(t, core.Broken, "broke off its stream: %v", err)
		}
	}
}

// eventFailure is an error that D tells inside its stream.
func eventFailure(t *target, data []byte) *core.Failure {
	f := brokenFailure(t, core.Status, "ended its stream with an error: %s", clip(string(data), 300))
	f.Body = append([]byte(nil), data...)
	var code int
	if o, err := openai.ParseObject(data); err == nil {
		if inner, err := openai.ParseObject(o.Present("error")); err == nil {
			if n, err := fmt.Sscan(string(inner.Present("code")), &code); n == 1 && err == nil && code >= 400 && code < 600 {
				f.Status = code
				f.ByClient = readUpstream(data).byClient(code)
			}
		}
	}
	return f
}
