package proxy

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
)

// fan is a client's request for several answers: a request of its own for each, at most maxPairs at a
// time, merged into one answer. The first that fails ends all. It belongs to the handler's goroutine,
// which alone writes to the client; each of its requests has a goroutine, and says what it has by pieces.
//
//	         ┌── request ──> P, D ──┐
//	client ──┼── request ──> P, D ──┼── piece ──> core.Merge ──> client
//	         └── request ──> P, D ──┘
type fan struct {
	c       *client
	id      kv.RequestID // leads the ids of all legs
	ctx     context.Context
	cancel  context.CancelFunc
	pieces  chan piece
	running sync.WaitGroup
	started int
	left    int
	merge   *core.Merge
	begun   bool
	last    end // of the first request that ended, or of the one that failed
	prefill []string
	decode  []string
}

// piece is what one of the requests says.
type piece struct {
	part   int
	head   head
	events []byte // of its stream
	whole  *answer
	over   *end // it has ended; the last piece
}

func newFan(c *client, id kv.RequestID) *fan {
	f := &fan{c: c, id: id, pieces: make(chan piece), left: len(c.plan.Answers)}
	f.ctx, f.cancel = context.WithCancel(c.req.Context())
	f.merge = core.NewMerge(string(id), len(c.plan.Answers), c.plan.PerPrompt, includeUsage(c.plan.Answers[0]))
	return f
}

func includeUsage(o *openai.Object) bool {
	options, err := openai.ParseObject(o.Present("stream_options"))
	return err == nil && string(options.Present("include_usage")) == "true"
}

// serve runs all requests and answers.
func (f *fan) serve() {
	defer f.running.Wait()
	defer f.cancel()
	var failure *core.Failure
	gone := false
	for f.left > 0 {
		for f.started < len(f.c.plan.Answers) && f.started-(len(f.c.plan.Answers)-f.left) < maxPairs {
			f.start(f.started)
			f.started++
		}
		var p piece
		select {
		case p = <-f.pieces:
		case <-f.ctx.Done():
			gone = true
		}
		if gone {
			break
		}
		if failure, gone = f.take(p); failure != nil || gone {
			break
		}
	}
	f.finish(failure, gone)
}

// start begins one request.
func (f *fan) start(i int) {
	name := func(attempt int) kv.RequestID {
		id := string(f.id) + "." + strconv.Itoa(i)
		if attempt > 1 {
			id += "." + strconv.Itoa(attempt)
		}
		return kv.RequestID(id)
	}
	out := &part{f: f, i: i}
	q := f.c.r.newRequest(f.ctx, f.c.req.Header, f.c.plan, f.c.plan.Answers[i], out, name)
	f.running.Go(func() {
		e := end{failure: &core.Failure{Leg: core.Decode, Kind: core.Internal, Status: http.StatusInternalServerError, Message: internalError().Message}}
		defer func() {
			if p := recover(); p != nil {
				f.c.r.log.Error("a request failed", "panic", p, "stack", string(debug.Stack()))
			}
			out.send(piece{over: &e})
		}()
		q.serve()
		e = q.end()
	})
}

// take uses one piece. It tells the failure that ends all, and whether the client has gone.
func (f *fan) take(p piece) (*core.Failure, bool) {
	switch {
	case p.over != nil:
		return f.over(*p.over)
	case p.whole != nil:
		if err := f.merge.Whole(p.part, p.whole.body); err != nil {
			return f.garbage(p.part, err), false
		}
	case p.events != nil:
		events, err := f.merge.Events(p.part, p.events)
		if err != nil {
			return f.garbage(p.part, err), false
		}
		if len(events) == 0 {
			return nil, false
		}
		if !f.begun {
			f.begun = true
			f.c.begin(f.head(p.head))
		}
		return nil, !f.c.write(events)
	}
	return nil, false
}

func (f *fan) over(e end) (*core.Failure, bool) {
	f.left--
	if f.last.route == "" || e.failure != nil {
		f.last = e
	}
	for i := 0; i+1 < len(e.args); i += 2 {
		name, _ := e.args[i+1].(string)
		switch e.args[i] {
		case "prefill":
			f.prefill = addOnce(f.prefill, name)
		case "decode":
			f.decode = addOnce(f.decode, name)
		}
	}
	return e.failure, e.gone && e.failure == nil
}

func addOnce(list []string, s string) []string {
	if slices.Contains(list, s) {
		return list
	}
	return append(list, s)
}

// garbage is an answer that cannot be merged.
func (f *fan) garbage(part int, err error) *core.Failure {
	return &core.Failure{
		Leg: core.Decode, Kind: core.Garbage, Status: http.StatusBadGateway,
		Message: fmt.Sprintf("Answer %d of %d cannot be merged with the others: %v.", part, len(f.c.plan.Answers), err),
	}
}

func (f *fan) head(h head) head {
	h.id = string(f.id)
	h.route += "; pairs=" + strconv.Itoa(len(f.c.plan.Answers))
	return h
}

// finish answers, or ends the answer, and writes the log line.
func (f *fan) finish(failure *core.Failure, gone bool) {
	f.cancel()
	h := f.head(head{route: f.last.route})
	switch {
	case gone:
	case failure != nil && f.begun:
		f.c.broken(failure)
	case failure != nil:
		f.c.reject(h, failure)
	default:
		if failure = f.complete(h); failure != nil {
			f.c.reject(h, failure)
		}
	}
	e := f.last
	if e.route == "" {
		e.route = routeUnknown
	}
	e.legID, e.failure, e.gone = string(f.id), failure, gone
	e.args = []any{"decode", strings.Join(f.decode, ","), "prefill", strings.Join(f.prefill, ","), "pairs", len(f.c.plan.Answers)}
	f.c.finish(e)
}

func (f *fan) complete(h head) *core.Failure {
	if f.merge.Streamed() {
		if !f.begun {
			f.c.begin(h)
		}
		f.c.write(f.merge.End())
		return nil
	}
	body, err := f.merge.Body()
	if err != nil {
		return f.garbage(0, err)
	}
	f.c.whole(h, answer{"application/json", body})
	return nil
}

// part is the output of one of a fan's requests. It belongs to that request's goroutine.
type part struct {
	f *fan
	i int
	h head
}

func (p *part) send(x piece) bool {
	x.part = p.i
	x.head = p.h
	select {
	case p.f.pieces <- x:
		return true
	case <-p.f.ctx.Done():
		return false
	}
}

func (p *part) begin(h head) { p.h = h }

// write copies: the request uses its bytes again when this returns.
func (p *part) write(events []byte) bool       { return p.send(piece{events: bytes.Clone(events)}) }
func (p *part) whole(h head, a answer)         { p.h = h; p.send(piece{whole: &a}) }
func (p *part) reject(h head, f *core.Failure) { p.h = h } // the end of the request tells it
func (p *part) broken(*core.Failure)           {}
