package engine

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/kv"
)

// check refuses what the machine does not look at.
func (e *Engine) check(r *Request) error {
	bad := func(field, format string, args ...any) error {
		return &RequestError{Request: r.ID, Kind: KindInvalid, Field: field, Phase: "submit", Err: fmt.Errorf(format, args...)}
	}
	vocab := kv.Token(e.cfg.Model.Config().Vocab)
	outside := func(x kv.Token) bool { return x < 0 || x >= vocab }
	switch {
	case r.ID == "":
		return bad("request_id", "the request has no id")
	case len(r.ID) > MaxRequestID:
		return bad("request_id", "the id has %d bytes, at most %d are allowed", len(r.ID), MaxRequestID)
	case r.MaxTokens < 0:
		return bad("max_tokens", "max_tokens is %d, must not be negative", r.MaxTokens)
	case len(r.StopStrings) > MaxStopStrings:
		return bad("stop", "%d stop strings, at most %d are allowed", len(r.StopStrings), MaxStopStrings)
	case len(r.StopTokens) > MaxStopTokens:
		return bad("stop_token_ids", "%d stop tokens, at most %d are allowed", len(r.StopTokens), MaxStopTokens)
	case len(r.CacheSalt) > MaxSalt:
		return bad("cache_salt", "the cache salt has %d bytes, at most %d are allowed", len(r.CacheSalt), MaxSalt)
	}
	if err := e.checkKeys(r, bad); err != nil {
		return err
	}
	for _, s := range r.StopStrings {
		if s == "" || len(s) > MaxStopBytes {
			return bad("stop", "a stop string has %d bytes, must have 1 to %d", len(s), MaxStopBytes)
		}
	}
	if i := slices.IndexFunc(r.Prompt, outside); i >= 0 {
		return bad("prompt", "token %d of the prompt is %d, the vocabulary ends at %d", i, r.Prompt[i], vocab-1)
	}
	if i := slices.IndexFunc(r.StopTokens, outside); i >= 0 {
		return bad("stop_token_ids", "stop token %d is %d, the vocabulary ends at %d", i, r.StopTokens[i], vocab-1)
	}
	if err := r.Sampling.Validate(); err != nil {
		return bad("sampling", "%w", err)
	}
	return nil
}

// checkKeys refuses what KV cannot be keyed by.
func (e *Engine) checkKeys(r *Request, bad func(field, format string, args ...any) error) error {
	switch {
	case r.Adapter != "" && e.adapters[r.Adapter] == nil:
		return bad("model", "there is no adapter %.100q; this engine has %d: %.300v", r.Adapter, len(e.cfg.Adapters), e.cfg.Adapters)
	case len(r.Extras) > MaxExtras:
		return bad("extra_keys", "%d extra keys, at most %d are allowed", len(r.Extras), MaxExtras)
	}
	for _, x := range r.Extras {
		if len(x) > MaxSalt {
			return bad("extra_keys", "an extra key has %d bytes, at most %d are allowed", len(x), MaxSalt)
		}
	}
	return nil
}

// live is one request as the loop knows it, which owns it except for the stream's own lock and
// unfollow.
type live struct {
	Request
	stream *Stream
	text   *text
	ends   []kv.Token // that end it and have no text

	tierTokens map[string]int // by tier

	ended    bool
	lease    kv.Generation               // under which it has ended with blocks for a peer; 0 if it has none
	unfollow atomic.Pointer[func() bool] // stops following the client's context

	// Of the token that the machine is about to be told.
	piece   string
	logProb float64
}

func newLive(e *Engine, r Request) *live {
	l := &live{Request: r, stream: newStream(), text: newText(e.Tokenizer(), r.StopStrings), ends: r.StopTokens}
	if !r.IgnoreEOS {
		l.ends = slices.Concat(r.StopTokens, e.cfg.Model.Config().EOS)
	}
	l.stream.abort = func() { e.send(abort{live: l}) }
	return l
}

// follow aborts the request when its client's context ends.
func (l *live) follow(ctx context.Context) {
	stop := context.AfterFunc(ctx, l.stream.Close)
	l.unfollow.Store(&stop)
	l.stream.mu.Lock()
	ended := l.stream.mu.ended
	l.stream.mu.Unlock()
	if ended { // perhaps before unfollow was set
		stop()
	}
	if ctx.Err() != nil { // since before it was submitted, maybe: it may have ended with a hold by now
		l.stream.Discard()
	}
}

func (l *live) coreRequest() core.Request {
	return core.Request{
		ID: l.ID, Prompt: l.Prompt, MaxTokens: l.MaxTokens, StopTokens: l.StopTokens, IgnoreEOS: l.IgnoreEOS,
		Keys: core.Keys{Salt: l.CacheSalt, Adapter: l.Adapter, Extras: l.Extras}, Params: l.Params,
		Tier: core.TierSpec{MaxLoad: l.Tier.MaxLoad, MaxStore: l.Tier.MaxOffload, Whole: l.Tier.Decoder != ""}, Together: l.Together,
	}
}
