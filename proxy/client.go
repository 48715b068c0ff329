package proxy

import (
	"cmp"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
)

// output is where the answer of a request goes: its client, or the merge of several. One goroutine calls
// it: begin before write, or whole, or reject.
type output interface {
	// begin sends the status of a stream.
	begin(h head)
	// write sends whole events at once; false: nobody reads any more.
	write(events []byte) bool
	// whole sends an answer that is not streamed.
	whole(h head, a answer)
	// reject answers with an error.
	reject(h head, f *core.Failure)
	// broken ends a stream that has begun with an error event.
	broken(f *core.Failure)
}

// head is what the headers of an answer tell.
type head struct {
	id    string // of the request, if the client has not named it
	route string
}

// client is the connection of a client. It belongs to the handler's goroutine.
type client struct {
	r      *Router
	w      http.ResponseWriter
	rc     *http.ResponseController
	req    *http.Request
	plan   core.Plan
	id     string // the client's own X-Request-Id
	start  time.Time
	status int // what was sent; 0: nothing
	first  time.Time
}

// headers sets what every answer has.
func (c *client) headers(h head) http.Header {
	out := c.w.Header()
	if c.id == "" {
		out.Set("X-Request-Id", h.id)
	}
	out.Set("X-Kvferry-Route", h.route)
	return out
}

func (c *client) begin(h head) {
	out := c.headers(h)
	out.Set("Content-Type", openai.EventStream+"; charset=utf-8")
	out.Set("Cache-Control", "no-cache")
	out.Set("X-Accel-Buffering", "no")
	c.first = time.Now()
	c.status = http.StatusOK
	c.w.WriteHeader(c.status)
}

func (c *client) write(b []byte) bool {
	_ = c.rc.SetWriteDeadline(time.Now().Add(c.r.patience)) // a test's writer has no connection
	if _, err := c.w.Write(b); err != nil {
		return false
	}
	return c.rc.Flush() == nil
}

func (c *client) whole(h head, a answer) {
	out := c.headers(h)
	out.Set("Content-Type", a.contentType)
	out.Set("Content-Length", strconv.Itoa(len(a.body)))
	c.status = http.StatusOK
	_ = c.rc.SetWriteDeadline(time.Now().Add(c.r.patience + time.Duration(len(a.body)>>16)*time.Second))
	c.w.WriteHeader(c.status)
	if _, err := c.w.Write(a.body); err == nil {
		_ = c.rc.Flush()
	}
}

// reject answers with an error; the legs may still be ending, but the client need not wait.
func (c *client) reject(h head, f *core.Failure) {
	out := c.headers(h)
	out.Set("X-Kvferry-Leg", f.Leg.String())
	out.Set("X-Kvferry-Engine", f.Engine)
	if f.RetryAfter != "" {
		out.Set("Retry-After", f.RetryAfter)
	}
	c.status = f.Status
	_ = c.rc.SetWriteDeadline(time.Now().Add(c.r.patience))
	writeJSON(c.w, f.Status, failureBody(f))
	_ = c.rc.Flush()
}

func (c *client) broken(f *core.Failure) {
	c.write(openai.AppendEvent(nil, failureBody(f)))
}

// done ends the use of the connection for this request; it may serve another one.
func (c *client) done() { _ = c.rc.SetWriteDeadline(time.Time{}) }

// statusClientGone is in logs and metrics only: the client has closed the connection.
const statusClientGone = 499

// LogRouted is the message of the one log line of every request that was sent to an engine.
const LogRouted = "request routed"

// end is what became of a client's request.
type end struct {
	legID   string
	route   string // as a metric label
	failure *core.Failure
	gone    bool
	args    []any // more for the log line
}

// finish writes the line of a request and counts it.
func (c *client) finish(e end) {
	status := c.status
	if e.gone {
		status = statusClientGone
		if c.status == 0 {
			c.w.WriteHeader(status) // nobody reads it, but net/http would make it a 200
		}
	}
	total := time.Since(c.start)
	args := append([]any{"id", cmp.Or(c.id, e.legID), "leg_id", e.legID, "path", c.plan.API.Path()}, e.args...)
	args = append(args, "route", e.route, "status", status)
	if !c.first.IsZero() {
		ttft := c.first.Sub(c.start)
		args = append(args, "ttft_ms", milliseconds(ttft))
		c.r.metrics.phase(phaseFirstChunk, ttft)
	}
	args = append(args, "total_ms", milliseconds(total))
	level := slog.LevelInfo
	switch {
	case e.gone:
		args = append(args, "error", "the client left")
	case e.failure != nil:
		args = append(args, "error", e.failure.Error())
		if e.failure.Status >= 500 {
			level = slog.LevelWarn
		}
	default:
		c.r.metrics.phase(phaseTotal, total)
	}
	c.r.metrics.requests.WithLabelValues(c.plan.API.Path(), e.route, strconv.Itoa(status), e.outcome()).Inc()
	c.r.log.Log(c.req.Context(), level, LogRouted, args...)
}

func (e end) outcome() string {
	switch {
	case e.gone:
		return "client_gone"
	case e.failure != nil:
		return e.failure.Leg.String() + "_" + string(e.failure.Kind)
	}
	return "ok"
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
