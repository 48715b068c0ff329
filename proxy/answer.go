package proxy

import (
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
)

// headers sets what every answer has.
func (q *request) headers() http.Header {
	h := q.w.Header()
	if q.client == "" {
		h.Set("X-Request-Id", string(q.attempt.request))
	}
	route := "push"
	if !q.plan.Disaggregate {
		route = "decode-only; reason=" + strconv.Quote(q.plan.Reason)
	}
	h.Set("X-Kvferry-Route", route)
	return h
}

// commit begins D's stream.
func (q *request) commit() {
	h := q.headers()
	h.Set("Content-Type", openai.EventStream+"; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	q.status = http.StatusOK
	q.w.WriteHeader(q.status)
}

// write sends bytes to the client at once.
func (q *request) write(b []byte) {
	if q.gone {
		return
	}
	_ = q.rc.SetWriteDeadline(time.Now().Add(q.r.patience)) // a test's writer has no connection
	if _, err := q.w.Write(b); err != nil {
		q.gone = true
		return
	}
	if err := q.rc.Flush(); err != nil {
		q.gone = true
	}
}

func (q *request) complete(streamed bool) {
	if streamed {
		return
	}
	h := q.headers()
	a := q.attempt.answer
	h.Set("Content-Type", a.contentType)
	h.Set("Content-Length", strconv.Itoa(len(a.body)))
	q.status = http.StatusOK
	_ = q.rc.SetWriteDeadline(time.Now().Add(q.r.patience + time.Duration(len(a.body)>>16)*time.Second))
	q.w.WriteHeader(q.status)
	if _, err := q.w.Write(a.body); err == nil {
		_ = q.rc.Flush()
	}
}

// reject answers with an error; the legs may still be ending, but the client need not wait.
func (q *request) reject(f *core.Failure) {
	q.blame(f)
	h := q.headers()
	h.Set("X-Kvferry-Leg", f.Leg.String())
	h.Set("X-Kvferry-Engine", f.Engine)
	if f.RetryAfter != "" {
		h.Set("Retry-After", f.RetryAfter)
	}
	q.status = f.Status
	_ = q.rc.SetWriteDeadline(time.Now().Add(q.r.patience))
	writeJSON(q.w, f.Status, failureBody(f))
	_ = q.rc.Flush()
}

// breakOff ends a stream that cannot go on.
func (q *request) breakOff(f *core.Failure) {
	q.blame(f)
	if !f.Told {
		q.write(openai.AppendEvent(nil, failureBody(f)))
	}
}

// blame names the engine of a failure that the machine found out about.
func (q *request) blame(f *core.Failure) {
	if f.Engine != "" {
		return
	}
	f.Engine = q.attempt.targets[f.Leg].name
	f.Message = "The " + f.Leg.String() + " leg to " + f.Engine + " was given up: " + f.Message + "."
}

// finish writes the line of a request and counts it.
func (q *request) finish() {
	o, a := q.outcome, q.attempt
	status := q.status
	if o.ClientGone {
		status = statusClientGone
		if q.status == 0 {
			q.w.WriteHeader(status) // nobody reads it, but net/http would make it a 200
		}
	}
	total := time.Since(q.start)
	args := []any{
		"id", q.visibleID(), "leg_id", string(a.request), "path", q.plan.API.Path(), "decode", a.targets[core.Decode].name,
	}
	route := "decode-only"
	if q.plan.Disaggregate {
		route = "push"
		args = append(args, "prefill", a.targets[core.Prefill].name, "transfer_id", string(a.id))
	} else {
		args = append(args, "reason", q.plan.Reason)
	}
	args = append(args, "route", route, "status", status, "attempts", o.Attempts)
	if !o.FirstChunk.IsZero() {
		ttft := o.FirstChunk.Sub(q.start)
		args = append(args, "ttft_ms", milliseconds(ttft))
		q.r.metrics.seconds.WithLabelValues("first_chunk").Observe(ttft.Seconds())
	}
	args = append(args, "total_ms", milliseconds(total))
	level := slog.LevelInfo
	switch {
	case o.ClientGone:
		args = append(args, "error", "the client left")
	case o.Failure != nil:
		args = append(args, "error", o.Failure.Error())
		if o.Failure.Status >= 500 {
			level = slog.LevelWarn
		}
	default:
		q.r.metrics.seconds.WithLabelValues("total").Observe(total.Seconds())
	}
	q.r.metrics.requests.WithLabelValues(q.plan.API.Path(), route, strconv.Itoa(status), outcomeLabel(o)).Inc()
	q.r.log.Log(q.req.Context(), level, LogRouted, args...)
}

// statusClientGone is in logs and metrics only: the client has closed the connection.
const statusClientGone = 499

// LogRouted is the message of the one log line of every request that was sent to an engine.
const LogRouted = "request routed"

func (q *request) visibleID() string {
	if q.client != "" {
		return q.client
	}
	return string(q.attempt.request)
}

func outcomeLabel(o *core.Outcome) string {
	switch {
	case o.ClientGone:
		return "client_gone"
	case o.Failure != nil:
		return o.Failure.Leg.String() + "_" + string(o.Failure.Kind)
	}
	return "ok"
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
