package openai

import (
	"bytes"
	"strconv"
)

// neutral lists fields that would change the answer and are not implemented, with the values at
// which they change nothing. Null always is one of these. Numbers are compared by value.
type neutral struct {
	name   string
	values []string
}

var bothNeutral = []neutral{
	{"presence_penalty", []string{"0"}},
	{"frequency_penalty", []string{"0"}},
	{"repetition_penalty", []string{"1"}},
	{"length_penalty", []string{"1"}},
	{"logit_bias", []string{"{}"}},
	{"min_p", []string{"0"}},
	{"min_tokens", []string{"0"}},
	{"include_stop_str_in_output", []string{"false"}},
	{"use_beam_search", []string{"false"}},
	{"prompt_logprobs", nil},
	{"allowed_token_ids", nil},
	{"bad_words", []string{"[]"}},
	{"truncate_prompt_tokens", nil},
	{"prompt_embeds", nil},
	{"logits_processors", nil},
	{"guided_json", nil},
	{"guided_regex", nil},
	{"guided_choice", nil},
	{"guided_grammar", nil},
	{"structured_outputs", nil},
	{"response_format", []string{`{"type":"text"}`}},
	{"echo", []string{"false"}},
}

var completionNeutral = append([]neutral{
	{"logprobs", nil},
	{"best_of", []string{"1"}},
	{"suffix", []string{`""`}},
}, bothNeutral...)

var chatNeutral = append([]neutral{
	{"logprobs", []string{"false"}},
	{"top_logprobs", []string{"0"}},
	{"tools", []string{"[]"}},
	{"tool_choice", []string{`"none"`, `"auto"`}},
	{"functions", []string{"[]"}},
	{"function_call", []string{`"none"`, `"auto"`}},
	{"modalities", []string{`["text"]`}},
	{"audio", nil},
	{"prediction", nil},
	{"web_search_options", nil},
	{"chat_template", nil},
	{"chat_template_kwargs", []string{"{}"}},
	{"add_generation_prompt", []string{"true"}},
	{"continue_final_message", []string{"false"}},
}, bothNeutral...)

func (p *parser) unsupported(list []neutral) {
	for _, f := range list {
		raw := p.obj.Present(f.name)
		if raw == nil || f.allows(raw) {
			continue
		}
		p.fail(badRequest(f.name, CodeUnsupported,
			"%s is %s; it is not supported here and would change the answer. Leave it out.", f.name, describe(raw)))
		return
	}
}

func (f neutral) allows(raw []byte) bool {
	raw = compact(raw)
	for _, v := range f.values {
		if string(raw) == v {
			return true
		}
		want, err := strconv.ParseFloat(v, 64)
		if got, gotErr := strconv.ParseFloat(string(raw), 64); err == nil && gotErr == nil && isNumber(raw) && got == want {
			return true
		}
	}
	return false
}

// compact drops the white space of short values; long ones are never neutral.
func compact(raw []byte) []byte {
	if len(raw) > maxQuoted {
		return raw
	}
	return bytes.Map(func(r rune) rune {
		if r == ' ' || r == '\n' || r == '\t' || r == '\r' {
			return -1
		}
		return r
	}, raw)
}
