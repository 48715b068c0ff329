package openai

import (
	"encoding/json"
	"math"

	"github.com/kvferry/kvferry/kv"
)

// Prompt is one prompt: text, or token ids. Exactly one of them is not empty.
type Prompt struct {
	Text   string
	Tokens []kv.Token
}

// Sampling is how answers are drawn and where they end.
type Sampling struct {
	MaxTokens   int     // generated tokens per answer; 0: not told
	N           int     // answers per prompt, 1 … MaxN
	Temperature float64 // 0 … MaxTemperature; 0 is greedy
	TopP        float64 // above 0, up to 1
	TopK        int     // 0: all tokens
	Seed        *int64  // nil: not told
	Stop        []string
	StopTokens  []kv.Token // stop_token_ids, as vLLM's
	IgnoreEOS   bool
	CacheSalt   string // only requests of equal salt share cached blocks; empty: none
}

// Output is how answers are sent.
type Output struct {
	Stream         bool
	IncludeUsage   bool // a last chunk with usage and no choices; only with Stream
	ReturnTokenIDs bool // token ids beside the text, as vLLM's return_token_ids
}

// CompletionRequest is a checked body of /v1/completions.
type CompletionRequest struct {
	Model   string // empty: not told
	Prompts []Prompt
	Sampling
	Output
	KVTransferParams json.RawMessage // as written; nil when absent or null
}

// ChatRequest is a checked body of /v1/chat/completions.
type ChatRequest struct {
	Model    string // empty: not told
	Messages []Message
	Sampling
	Output
	KVTransferParams json.RawMessage // as written; nil when absent or null
}

// Message is one turn. Text parts are joined without anything between them.
type Message struct {
	Role    string // system, developer, user or assistant
	Content string
}

// DefaultCompletionTokens is the max_tokens of /v1/completions when it is not told, as far as the
// context has room. A chat has no default but that room.
const DefaultCompletionTokens = 16

// ParseCompletion reads and checks a body of /v1/completions. Errors are of type *Error, with
// status 400 and the field at fault in Param.
func ParseCompletion(body []byte) (*CompletionRequest, error) {
	p, err := newParser(body)
	if err != nil {
		return nil, err
	}
	r := &CompletionRequest{Model: p.str("model"), KVTransferParams: p.obj.Present("kv_transfer_params")}
	p.unsupported(completionNeutral)
	r.Prompts = p.prompts("prompt")
	r.Sampling = p.sampling()
	r.Output = p.output()
	if p.err == nil && len(r.Prompts)*r.N > MaxChoices {
		p.fail(wrongValue("n", "times the number of prompts is %d; at most %d answers per request are possible.",
			len(r.Prompts)*r.N, MaxChoices))
	}
	if p.err != nil {
		return nil, p.err
	}
	return r, nil
}

// ParseChat reads and checks a body of /v1/chat/completions. Errors are as ParseCompletion's.
func ParseChat(body []byte) (*ChatRequest, error) {
	p, err := newParser(body)
	if err != nil {
		return nil, err
	}
	r := &ChatRequest{Model: p.str("model"), KVTransferParams: p.obj.Present("kv_transfer_params")}
	p.unsupported(chatNeutral)
	r.Messages = p.messages("messages")
	r.Sampling = p.sampling()
	if n := p.integer("max_completion_tokens", 0, 1, MaxMaxTokens); n > 0 {
		r.MaxTokens = int(n) // it replaces max_tokens, which the API calls deprecated
	}
	r.Output = p.output()
	if p.err != nil {
		return nil, p.err
	}
	return r, nil
}

func (p *parser) sampling() Sampling {
	s := Sampling{
		MaxTokens:   int(p.integer("max_tokens", 0, 1, MaxMaxTokens)),
		N:           int(p.integer("n", 1, 1, MaxN)),
		Temperature: p.number("temperature", 1),
		TopP:        p.number("top_p", 1),
		TopK:        int(max(0, p.integer("top_k", 0, -1, math.MaxInt32))), // -1 is all tokens, too
		Stop:        p.stop("stop"),
		StopTokens:  p.stopTokens("stop_token_ids"),
		IgnoreEOS:   p.boolean("ignore_eos"),
		CacheSalt:   p.str("cache_salt"),
	}
	if s.Temperature < 0 || s.Temperature > MaxTemperature {
		p.fail(wrongValue("temperature", "is %v; it must be between 0 and %v.", s.Temperature, MaxTemperature))
	}
	if s.TopP <= 0 || s.TopP > 1 {
		p.fail(wrongValue("top_p", "is %v; it must be above 0 and at most 1.", s.TopP))
	}
	if len(s.CacheSalt) > MaxSaltBytes {
		p.fail(wrongValue("cache_salt", "has %d bytes; it may have %d.", len(s.CacheSalt), MaxSaltBytes))
	}
	if p.obj.Present("seed") != nil {
		seed := p.integer("seed", 0, -1<<63, 1<<63-1)
		s.Seed = &seed
	}
	return s
}

func (p *parser) output() Output {
	o := Output{Stream: p.boolean("stream"), ReturnTokenIDs: p.boolean("return_token_ids")}
	raw := p.obj.Present("stream_options")
	switch {
	case raw == nil:
		return o
	case raw[0] != '{':
		p.fail(wrongType("stream_options", "an object", raw))
		return o
	case !o.Stream:
		p.fail(wrongValue("stream_options", "can only be given together with \"stream\": true."))
		return o
	}
	inner := p.inner("stream_options", raw)
	o.IncludeUsage = inner.boolean("include_usage")
	if inner.boolean("continuous_usage_stats") {
		p.fail(badRequest("stream_options.continuous_usage_stats", CodeUnsupported,
			"stream_options.continuous_usage_stats is not supported here; leave it out or set it to false."))
	}
	p.fail(inner.err)
	return o
}
