package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

func (s *Server) serveCompletions(w http.ResponseWriter, req *http.Request) {
	s.serve(w, req, func(name string, body []byte) (*job, writer, error) {
		r, err := openai.ParseCompletion(body)
		if err != nil {
			return nil, nil, err
		}
		j, err := s.completionJob(name, r)
		return j, &completionWriter{}, err
	})
}

func (s *Server) serveChat(w http.ResponseWriter, req *http.Request) {
	s.serve(w, req, func(name string, body []byte) (*job, writer, error) {
		r, err := openai.ParseChat(body)
		if err != nil {
			return nil, nil, err
		}
		j, err := s.chatJob(name, r)
		return j, &chatWriter{}, err
	})
}

// serve reads a request, runs it and answers.
func (s *Server) serve(w http.ResponseWriter, req *http.Request, parse func(name string, body []byte) (*job, writer, error)) {
	start := time.Now()
	if s.inFlight.Add(1) > maxInFlight {
		s.inFlight.Add(-1)
		writeError(w, &openai.Error{
			Status: http.StatusTooManyRequests, Type: openai.TypeRateLimit, Code: string(engine.KindOverload),
			Message: fmt.Sprintf("The engine already serves %d requests; try again later.", maxInFlight),
		})
		return
	}
	defer s.inFlight.Add(-1)
	name, err := requestName(req.Header.Get("X-Request-Id"))
	if err != nil {
		writeError(w, asAPIError(err))
		return
	}
	w.Header().Set("X-Request-Id", name)
	ctx, keyed, err := s.keys.begin(req.Context(), start, req.Header.Get(wire.ReleaseKeyHeader))
	if err != nil {
		writeError(w, asAPIError(err))
		return
	}
	defer keyed.end()
	body, err := s.readBody(w, req, s.cfg.MaxBody)
	if err != nil {
		writeError(w, asAPIError(err))
		return
	}
	j, format, err := func() (*job, writer, error) {
		defer s.bodyDone(body)
		return parse(name, body)
	}()
	if err != nil {
		writeError(w, asAPIError(err))
		return
	}
	a := &answer{s: s, w: w, rc: http.NewResponseController(w), job: j, keyed: keyed, format: format, start: start, created: start.Unix()}
	a.texts = make([]part, len(j.children))
	a.run(ctx)
}

// part is what is known of one child.
type part struct {
	text   []byte
	tokens []kv.Token
	end    *engine.Output // the last output
	begun  bool
}

// piece is one output of a child, or why it cannot be read.
type piece struct {
	child int
	out   engine.Output
	err   error
}

// run submits the children, gathers what they say and answers. It returns when none is left. Blocks that
// they hold for peers are let go unless the answer is on its way: nobody else could ask for them.
func (a *answer) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	streams := make([]stream, 0, len(a.job.children))
	delivered := false
	defer func() {
		for _, st := range streams {
			if delivered {
				st.Close()
			} else {
				st.Discard()
			}
		}
	}()
	for i, r := range a.job.children {
		if i == 0 {
			r.Together = len(a.job.children) // one that is refused leaves nothing that has begun
		}
		if ctx.Err() != nil && (r.Params == nil || !r.Params.DoRemotePrefill) {
			continue
		}
		// The decode leg of a client that has left is submitted too, and ends at once: its prefill engine keeps the
		// blocks until it is told.
		st, err := a.s.engine.Submit(ctx, r)
		if err != nil {
			a.fail(asAPIError(err))
			return
		}
		streams = append(streams, st)
	}
	if ctx.Err() != nil {
		a.gone()
		return
	}
	pieces := make(chan piece)
	for i, st := range streams {
		readers.Go(func() { a.s.read(ctx, i, st, pieces) })
	}
	for left := len(streams); left > 0; {
		select {
		case p := <-pieces:
			if !a.take(p) {
				return
			}
			if p.out.Finish != "" {
				left--
			}
		case <-ctx.Done():
			a.gone()
			return
		}
	}
	delivered = a.finish(ctx) && a.keyed.deliver(time.Now(), a.holds())
}

// holds are what the answer leaves for peers.
func (a *answer) holds() (all []hold) {
	for _, t := range a.texts {
		if p := t.end.Params; p != nil && p.Lease != 0 {
			all = append(all, hold{p.RemoteRequestID, p.Lease})
		}
	}
	return all
}

// read passes on what a stream says until its last output. A panic is a failure of this request.
func (s *Server) read(ctx context.Context, child int, st stream, pieces chan<- piece) {
	send := func(p piece) bool {
		select {
		case pieces <- p:
			return true
		case <-ctx.Done():
			return false
		}
	}
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("reading a stream failed", "panic", p, "stack", string(debug.Stack()))
			send(piece{child: child, err: errors.New("a fault of the server")})
		}
	}()
	for {
		out, err := st.Next(ctx)
		switch {
		case err != nil && ctx.Err() != nil:
			return
		case errors.Is(err, io.EOF):
			err = errors.New("a stream ended without a last output")
			fallthrough
		case err != nil:
			s.log.Error("reading a stream failed", "error", err)
			send(piece{child: child, err: err})
			return
		}
		if !send(piece{child: child, out: out}) || out.Finish != "" {
			return
		}
	}
}

// take uses one piece; false ends the request.
func (a *answer) take(p piece) bool {
	switch {
	case p.err != nil:
		a.fail(asAPIError(p.err))
		return false
	case p.out.Err != nil:
		a.fail(asAPIError(p.out.Err))
		return false
	case p.out.Finish == connector.FinishAbort, p.out.Finish == connector.FinishError:
		a.fail(internalError())
		return false
	}
	part := &a.texts[p.child]
	if p.out.Finish != "" {
		end := p.out
		part.end = &end
		a.s.metrics.finished(&end, time.Since(a.start))
	}
	if !a.begun {
		a.begun = true
		a.s.metrics.firstToken.Observe(time.Since(a.start).Seconds())
	}
	if a.job.output.Stream {
		return a.chunk(p.child, part, &p.out)
	}
	part.text = append(part.text, p.out.Text...)
	if a.job.output.ReturnTokenIDs {
		part.tokens = append(part.tokens, p.out.Tokens...)
	}
	return true
}

// usage adds up: a prompt counts once, however many answers it has.
func (a *answer) usage() *openai.Usage {
	u := &openai.Usage{PromptTokensDetails: &openai.PromptTokensDetails{}}
	for i, t := range a.texts {
		if i%a.job.n == 0 {
			u.PromptTokens += len(a.job.prompts[i/a.job.n])
			u.PromptTokensDetails.CachedTokens += a.cached(t.end)
		}
		u.CompletionTokens += t.end.Usage.Completion
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}

// cached counts prompt tokens that were not computed for a request; of a decode leg, what the router
// says that P had cached, if it does.
func (a *answer) cached(end *engine.Output) int {
	if p := a.job.params; p != nil && p.DoRemotePrefill && p.CachedTokens != nil {
		return *p.CachedTokens
	}
	return min(end.Usage.Cached+end.Usage.External+end.Usage.Tier, end.Usage.Prompt)
}

// stopReason is the stop string or stop token that ended an answer; nil if neither did.
func stopReason(r *engine.Request, out *engine.Output) any {
	if out.Finish != connector.FinishStop {
		return nil
	}
	if out.StopString != "" {
		return out.StopString
	}
	if n := len(out.Tokens); n > 0 && slices.Contains(r.StopTokens, out.Tokens[n-1]) {
		return out.Tokens[n-1]
	}
	return nil
}
