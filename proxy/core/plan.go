package core

import (
	"bytes"
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
	// Answers are the bodies of a request for several answers, or for a list of one prompt: each goes
	// to a pair of its own. Nil: the body is one request.
	Answers []*openai.Object
	// PerPrompt is how many neighbouring Answers have the same prompt.
	PerPrompt int
}

// NewPlan decides by the body. One hand-off describes one prompt and one answer; requests for more
// are split. D serves alone what cannot be split:
//
//   - best_of and beam search choose among answers;
//   - echo and prompt_logprobs need logits of the prompt, which D only has if it computes the prompt;
//   - usage counts in every chunk would be those of parts.
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
	if raw := body.Present("best_of"); raw != nil && isNumberAbove(raw, 1) {
		reason = "best_of is above 1"
	}
	for _, name := range []string{"echo", "use_beam_search"} {
		if string(body.Present(name)) == "true" {
			reason = name + " is set"
		}
	}
	if body.Present("prompt_logprobs") != nil {
		reason = "prompt_logprobs is set"
	}
	plan := Plan{API: api, PerPrompt: 1}
	if reason == "" {
		plan.Answers, plan.PerPrompt, reason = split(api, body)
	}
	if len(plan.Answers) > 1 && continuousUsage(body) {
		plan.Answers, reason = nil, "usage is asked for in every chunk"
	}
	plan.Disaggregate, plan.Reason = reason == "", reason
	return plan, nil
}

func continuousUsage(body *openai.Object) bool {
	o, err := openai.ParseObject(body.Present("stream_options"))
	return err == nil && string(o.Present("continuous_usage_stats")) == "true"
}

func isNumberAbove(raw []byte, bound float64) bool {
	f, err := strconv.ParseFloat(string(raw), 64)
	return err == nil && f > bound
}

// severalPrompts recognises a list of prompts, whatever its length.
func severalPrompts(raw []byte) bool {
	if len(raw) == 0 || raw[0] != '[' {
		return false
	}
	first := bytes.TrimLeft(raw[1:], " \t\r\n")
	return first[0] == '"' || first[0] == '['
}
