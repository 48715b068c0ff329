package core

import (
	"bytes"
	"fmt"
	"strconv"

	"github.com/kvferry/kvferry/openai"
)

// API is the endpoint of a request.
type API uint8

const (
	Completions API = iota
	ChatCompletions
)

// Path is the endpoint's path, the same at the router and at the engines.
func (a API) Path() string {
	if a == Completions {
		return "/v1/completions"
	}
	return "/v1/chat/completions"
}

// Plan says which way a request goes.
type Plan struct {
	API API
	// Disaggregate: both legs. Otherwise D serves the request alone, for the Reason given.
	Disaggregate bool
	Reason       string
}

// NewPlan decides by the body. D serves alone what one hand-off cannot describe:
//
//   - several answers (n, best_of, beam search) and several prompts become engine requests of their
//     own, while the hand-off parameters name one; the others would wait for KV that never comes;
//   - echo and prompt_logprobs need logits of the prompt, which D only has if it computes the prompt.
//
// A hand-off that the client brings along is refused: it names hosts and blocks (B-117 of
// field-reports.md). Fields of a wrong type are left to the engine, which names them.
func NewPlan(api API, body *openai.Object) (Plan, error) {
	if body.Present("kv_transfer_params") != nil {
		return Plan{}, &openai.Error{
			Status: 400, Type: openai.TypeInvalidRequest, Param: "kv_transfer_params", Code: openai.CodeUnsupported,
			Message: "kv_transfer_params is the router's to give; leave it out, or send the request to an engine.",
		}
	}
	reason := ""
	for _, name := range []string{"n", "best_of"} {
		if raw := body.Present(name); raw != nil && isNumberAbove(raw, 1) {
			reason = fmt.Sprintf("%s is above 1", name)
		}
	}
	for _, name := range []string{"echo", "use_beam_search"} {
		if string(body.Present(name)) == "true" {
			reason = name + " is set"
		}
	}
	if body.Present("prompt_logprobs") != nil {
		reason = "prompt_logprobs is set"
	}
	if api == Completions && severalPrompts(body.Present("prompt")) {
		reason = "several prompts"
	}
	return Plan{API: api, Disaggregate: reason == "", Reason: reason}, nil
}

func isNumberAbove(raw []byte, bound float64) bool {
	f, err := strconv.ParseFloat(string(raw), 64)
	return err == nil && f > bound
}

// severalPrompts recognises a list of prompts, whatever its length: a list of one gets no exception,
// because the engine's ids for it are those of a list.
func severalPrompts(raw []byte) bool {
	if len(raw) == 0 || raw[0] != '[' {
		return false
	}
	first := bytes.TrimLeft(raw[1:], " \t\r\n")
	return first[0] == '"' || first[0] == '['
}
