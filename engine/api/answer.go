package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// answer is what a client is told. It belongs to the handler's goroutine.
type answer struct {
	s         *Server
	w         http.ResponseWriter
	rc        *http.ResponseController
	job       *job
	keyed     *keyed
	format    writer
	start     time.Time
	created   int64
	texts     []part
	begun     bool // a token has come
	committed bool // the header of a stream is sent
	buf       []byte
}

// writer gives an answer the form of its endpoint. The values are for encoding/json.
type writer interface {
	whole(a *answer, params json.RawMessage) any
	chunks(a *answer, child int, first bool, out *engine.Output) []any
	usage(a *answer) any
}

// fail tells a failure: as a status, or in a stream that has begun as its last event.
func (a *answer) fail(e *openai.Error) {
	if !a.committed {
		writeError(a.w, e)
		return
	}
	a.write(openai.AppendEvent(nil, e.AppendJSON(nil)))
}

// gone ends an answer that nobody waits for. Without a status, net/http would make it a 200.
func (a *answer) gone() {
	if !a.committed {
		a.w.WriteHeader(statusClientGone)
	}
}

// chunk streams one output; false means that the client has gone.
func (a *answer) chunk(child int, t *part, out *engine.Output) bool {
	if !a.committed {
		h := a.w.Header()
		h.Set("Content-Type", openai.EventStream+"; charset=utf-8")
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no")
		a.committed = true
		a.w.WriteHeader(http.StatusOK)
	}
	a.buf = a.buf[:0]
	for _, v := range a.format.chunks(a, child, !t.begun, out) {
		a.event(v)
	}
	t.begun = true
	return a.write(a.buf)
}

func (a *answer) event(v any) {
	b, err := json.Marshal(v)
	if err != nil { // these types cannot fail to marshal; a panic costs this request
		panic(err)
	}
	a.buf = openai.AppendEvent(a.buf, b)
}

// write sends bytes at once; false means that the client has gone.
func (a *answer) write(b []byte) bool {
	_ = a.rc.SetWriteDeadline(time.Now().Add(a.s.patience)) // a test's writer has no connection
	if _, err := a.w.Write(b); err != nil {
		return false
	}
	return a.rc.Flush() == nil
}

// finish ends a good answer. false: its client has gone. One that goes later is not noticed: it may have
// read the answer, and have closed the connection as clients do.
func (a *answer) finish(ctx context.Context) bool {
	if a.job.output.Stream {
		a.buf = a.buf[:0]
		if a.job.output.IncludeUsage {
			a.event(a.format.usage(a))
		}
		return a.write(openai.AppendDone(a.buf))
	}
	body, err := json.Marshal(a.format.whole(a, a.params()))
	if err != nil {
		a.s.log.Error("an answer cannot be encoded", "error", err)
		writeError(a.w, internalError())
		return false
	}
	if ctx.Err() != nil {
		a.gone()
		return false
	}
	if err := writeJSON(a.w, http.StatusOK, body); err != nil {
		return false
	}
	err = a.rc.Flush()
	return err == nil || errors.Is(err, errors.ErrUnsupported)
}

// params is the kv_transfer_params of the answer: the first request's, as stock engines give them.
func (a *answer) params() json.RawMessage {
	end := a.texts[0].end
	if end.Params == nil {
		return nil
	}
	p := *end.Params
	if p.Lease != 0 {
		p.Release = a.s.releaseToken(p.RemoteRequestID, p.Lease)
	}
	if p.CachedTokens == nil && p.DoRemotePrefill {
		cached := a.cached(end)
		p.CachedTokens = &cached
	}
	return wire.AppendTransferParams(nil, &p)
}

// turnParams is the kv_transfer_params of a stream's chunk: the last one of the first request says what this
// decode engine keeps for the next turn. What a prefill leg answers is in no stream, as with stock engines.
func (a *answer) turnParams(child int, out *engine.Output) json.RawMessage {
	if child > 0 || out.Params == nil || !out.Params.DoRemoteDecode {
		return nil
	}
	return a.params()
}

func finishReason(out *engine.Output) *string {
	if out.Finish == "" {
		return nil
	}
	s := string(out.Finish)
	return &s
}

func (a *answer) promptIDs(child int) []kv.Token {
	if !a.job.output.ReturnTokenIDs {
		return nil
	}
	return a.job.prompts[child/a.job.n]
}

func (a *answer) tokenIDs(out *engine.Output) []kv.Token {
	if !a.job.output.ReturnTokenIDs {
		return nil
	}
	return out.Tokens
}

// completionWriter answers /v1/completions.
type completionWriter struct{}

func (completionWriter) base(a *answer) openai.Completion {
	return openai.Completion{ID: a.job.id, Object: "text_completion", Created: a.created, Model: a.job.model, Choices: []openai.CompletionChoice{}}
}

func (w completionWriter) whole(a *answer, params json.RawMessage) any {
	c := w.base(a)
	for i, t := range a.texts {
		c.Choices = append(c.Choices, openai.CompletionChoice{
			Index: i, Text: string(t.text), FinishReason: finishReason(t.end), StopReason: stopReason(&a.job.children[i], t.end),
			PromptTokenIDs: a.promptIDs(i), TokenIDs: t.tokens,
		})
	}
	c.Usage, c.KVTransferParams = a.usage(), params
	return c
}

func (w completionWriter) chunks(a *answer, child int, first bool, out *engine.Output) []any {
	c := w.base(a)
	choice := openai.CompletionChoice{
		Index: child, Text: out.Text, FinishReason: finishReason(out), StopReason: stopReason(&a.job.children[child], out), TokenIDs: a.tokenIDs(out),
	}
	if first {
		choice.PromptTokenIDs = a.promptIDs(child)
	}
	c.Choices = append(c.Choices, choice)
	c.KVTransferParams = a.turnParams(child, out)
	return []any{c}
}

func (w completionWriter) usage(a *answer) any {
	c := w.base(a)
	c.Usage = a.usage()
	return c
}

// chatWriter answers /v1/chat/completions.
type chatWriter struct{}

func (chatWriter) whole(a *answer, params json.RawMessage) any {
	c := openai.Chat{ID: a.job.id, Object: "chat.completion", Created: a.created, Model: a.job.model, PromptTokenIDs: a.promptIDs(0)}
	for i, t := range a.texts {
		c.Choices = append(c.Choices, openai.ChatChoice{
			Index: i, Message: openai.ChatMessage{Role: "assistant", Content: string(t.text)},
			FinishReason: finishReason(t.end), StopReason: stopReason(&a.job.children[i], t.end), TokenIDs: t.tokens,
		})
	}
	c.Usage, c.KVTransferParams = a.usage(), params
	return c
}

func (chatWriter) base(a *answer) openai.ChatChunk {
	return openai.ChatChunk{ID: a.job.id, Object: "chat.completion.chunk", Created: a.created, Model: a.job.model, Choices: []openai.ChatDeltaChoice{}}
}

// chunks begins each answer with a chunk that names the role and has no text.
func (w chatWriter) chunks(a *answer, child int, first bool, out *engine.Output) []any {
	var all []any
	if first {
		c := w.base(a)
		c.PromptTokenIDs = a.promptIDs(child)
		c.Choices = append(c.Choices, openai.ChatDeltaChoice{Index: child, Delta: openai.ChatDelta{Role: "assistant"}})
		all = append(all, c)
	}
	c := w.base(a)
	c.Choices = append(c.Choices, openai.ChatDeltaChoice{
		Index: child, Delta: openai.ChatDelta{Content: out.Text},
		FinishReason: finishReason(out), StopReason: stopReason(&a.job.children[child], out), TokenIDs: a.tokenIDs(out),
	})
	c.KVTransferParams = a.turnParams(child, out)
	return append(all, c)
}

func (w chatWriter) usage(a *answer) any {
	c := w.base(a)
	c.Usage = a.usage()
	return c
}
