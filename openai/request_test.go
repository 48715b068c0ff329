package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
)

func TestParseCompletion(t *testing.T) {
	seed := int64(-9223372036854775808)
	plain := Sampling{N: 1, Temperature: 1, TopP: 1}
	for _, c := range []struct {
		in   string
		want CompletionRequest
	}{
		{`{"prompt":"hi"}`, CompletionRequest{Prompts: []Prompt{{Text: "hi"}}, Sampling: plain}},
		{`{"model":"m","prompt":["a","b"]}`, CompletionRequest{Model: "m", Prompts: []Prompt{{Text: "a"}, {Text: "b"}}, Sampling: plain}},
		{`{"prompt":[ 1 ,2147483647]}`, CompletionRequest{Prompts: []Prompt{{Tokens: []kv.Token{1, 2147483647}}}, Sampling: plain}},
		{`{"prompt":[[1],[2,3]]}`, CompletionRequest{Prompts: []Prompt{{Tokens: []kv.Token{1}}, {Tokens: []kv.Token{2, 3}}}, Sampling: plain}},
		{
			`{"prompt":"\u00e9","max_tokens":1,"n":3,"temperature":0,"top_p":0.5,"seed":-9223372036854775808,"stop":"x",
			 "top_k":7,"stop_token_ids":[3],"cache_salt":"s",
			 "ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true,
			 "kv_transfer_params":{"a":1},"user":"u","unheard_of":[{}]}`,
			CompletionRequest{
				Prompts:          []Prompt{{Text: "é"}},
				Sampling:         Sampling{MaxTokens: 1, N: 3, TopP: 0.5, Seed: &seed, Stop: []string{"x"}, IgnoreEOS: true, TopK: 7, StopTokens: []kv.Token{3}, CacheSalt: "s"},
				Output:           Output{Stream: true, IncludeUsage: true, ReturnTokenIDs: true},
				KVTransferParams: json.RawMessage(`{"a":1}`),
			},
		},
		{ // nulls are absent, neutral values are allowed
			`{"prompt":"a","max_tokens":null,"n":null,"seed":null,"stop":null,"stream_options":null,"kv_transfer_params":null,
			 "echo":false,"logprobs":null,"best_of":1,"suffix":"","presence_penalty":0.0,"frequency_penalty":-0,"logit_bias":{ },
			 "top_k":-1,"min_p":0,"repetition_penalty":1.0,"response_format":{"type": "text"},"min_tokens":0}`,
			CompletionRequest{Prompts: []Prompt{{Text: "a"}}, Sampling: plain},
		},
		{`{"prompt":"a","stop":["1","2","3","4"]}`, CompletionRequest{Prompts: []Prompt{{Text: "a"}},
			Sampling: Sampling{N: 1, Temperature: 1, TopP: 1, Stop: []string{"1", "2", "3", "4"}}}},
		{`{"prompt":"a","prompt":"b"}`, CompletionRequest{Prompts: []Prompt{{Text: "b"}}, Sampling: plain}},
	} {
		got, err := ParseCompletion([]byte(c.in))
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
		} else if d := cmp.Diff(&c.want, got); d != "" {
			t.Errorf("%s:\n%s", c.in, d)
		}
	}
}

func TestParseChat(t *testing.T) {
	got, err := ParseChat([]byte(`{"model":"m","messages":[{"role":"system","content":"s"},
		{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},{"role":"assistant","content":"","tool_calls":[]}],
		"max_tokens":5,"max_completion_tokens":7,"logprobs":false,"tools":[],"tool_choice":"none"}`))
	if err != nil {
		t.Fatal(err)
	}
	want := &ChatRequest{
		Model:    "m",
		Messages: []Message{{"system", "s"}, {"user", "a\nb"}, {"assistant", ""}},
		Sampling: Sampling{MaxTokens: 7, N: 1, Temperature: 1, TopP: 1},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	got, err = ParseChat([]byte(`{"messages":[{"role":"user","content":"x"}]}`))
	if err != nil || got.MaxTokens != 0 {
		t.Errorf("max_tokens of a chat that tells none: %v, %v", got, err)
	}
}

func TestRequestErrors(t *testing.T) {
	list := func(n int, item string) string {
		return "[" + strings.TrimSuffix(strings.Repeat(item+",", n), ",") + "]"
	}
	type refusal struct{ body, param, code string }
	completion := func(field, value string) string {
		if field == "prompt" {
			return fmt.Sprintf(`{"prompt":%s}`, value)
		}
		return fmt.Sprintf(`{"prompt":"x",%q:%s}`, field, value)
	}
	cases := []refusal{
		{`{"prompt":"x"`, "", CodeInvalidJSON},
		{`[]`, "", CodeInvalidJSON},
		{`{}`, "prompt", CodeMissing},
		{`{"prompt":null}`, "prompt", CodeMissing},
	}
	for _, c := range []refusal{
		{"model", "1", CodeInvalidType},
		{"prompt", "1", CodeInvalidType},
		{"prompt", "{}", CodeInvalidType},
		{"prompt", `""`, CodeInvalidValue},
		{"prompt", "[]", CodeInvalidValue},
		{"max_tokens", "0", CodeInvalidValue},
		{"max_tokens", "-1", CodeInvalidValue},
		{"max_tokens", "1e3", CodeInvalidType},
		{"max_tokens", "1.0", CodeInvalidType},
		{"max_tokens", `"1"`, CodeInvalidType},
		{"max_tokens", "99999999999999999999999", CodeInvalidValue},
		{"max_tokens", "-99999999999999999999999", CodeInvalidValue},
		{"max_tokens", "1073741825", CodeInvalidValue},
		{"n", "0", CodeInvalidValue},
		{"n", "129", CodeInvalidValue},
		{"temperature", "-0.1", CodeInvalidValue},
		{"temperature", "2.1", CodeInvalidValue},
		{"temperature", "1e999", CodeInvalidValue},
		{"temperature", "true", CodeInvalidType},
		{"top_p", "0", CodeInvalidValue},
		{"top_p", "1.1", CodeInvalidValue},
		{"seed", "9223372036854775808", CodeInvalidValue},
		{"seed", "1.5", CodeInvalidType},
		{"stop", "1", CodeInvalidType},
		{"stop", `""`, CodeInvalidValue},
		{"stop", list(5, `"a"`), CodeInvalidValue},
		{"stream", "1", CodeInvalidType},
		{"stream_options", "{}", CodeInvalidValue},
		{"stream_options", "[]", CodeInvalidType},
		{"ignore_eos", `"yes"`, CodeInvalidType},
		{"echo", "true", CodeUnsupported},
		{"logprobs", "0", CodeUnsupported},
		{"best_of", "2", CodeUnsupported},
		{"suffix", `"s"`, CodeUnsupported},
		{"presence_penalty", "0.1", CodeUnsupported},
		{"logit_bias", `{"1":2}`, CodeUnsupported},
		{"top_k", "-2", CodeInvalidValue},
		{"stop_token_ids", "1", CodeInvalidType},
		{"stop_token_ids", list(129, "1"), CodeInvalidValue},
		{"cache_salt", "1", CodeInvalidType},
		{"cache_salt", `"` + strings.Repeat("s", 1025) + `"`, CodeInvalidValue},
		{"response_format", `{"type":"json_object"}`, CodeUnsupported},
		{"prompt_logprobs", "1", CodeUnsupported},
		{"min_tokens", "2", CodeUnsupported},
	} {
		cases = append(cases, refusal{completion(c.body, c.param), c.body, c.code})
	}
	cases = append(cases, []refusal{
		{completion("prompt", `[1,"a"]`), "prompt[1]", CodeInvalidType},
		{completion("prompt", `[1,-1]`), "prompt[1]", CodeInvalidValue},
		{completion("prompt", `[1,2147483648]`), "prompt[1]", CodeInvalidValue},
		{completion("prompt", `[1,1.5]`), "prompt[1]", CodeInvalidType},
		{completion("prompt", `["a",[1]]`), "prompt[1]", CodeInvalidType},
		{completion("prompt", `["a",""]`), "prompt[1]", CodeInvalidValue},
		{completion("prompt", `[[1],[]]`), "prompt[1]", CodeInvalidValue},
		{completion("prompt", `[[1],[2,"x"]]`), "prompt[1][1]", CodeInvalidType},
		{completion("prompt", `[null]`), "prompt[0]", CodeInvalidType},
		{completion("prompt", `[{}]`), "prompt[0]", CodeInvalidType},
		{completion("prompt", list(129, `"a"`)), "prompt", CodeInvalidValue},
		{completion("stop_token_ids", `[1,-1]`), "stop_token_ids[1]", CodeInvalidValue},
		{completion("stop", `["a",1]`), "stop[1]", CodeInvalidType},
		{`{"prompt":["a","b","c"],"n":100}`, "n", CodeInvalidValue},
		{`{"prompt":"a","stream":true,"stream_options":{"include_usage":1}}`, "stream_options.include_usage", CodeInvalidType},
		{`{"prompt":"a","stream":true,"stream_options":{"continuous_usage_stats":true}}`, "stream_options.continuous_usage_stats", CodeUnsupported},
	}...)
	for _, c := range cases {
		_, err := ParseCompletion([]byte(c.body))
		checkRefusal(t, c.body, err, c.param, c.code)
	}

	chat := func(message string) string { return `{"messages":[{"role":"user","content":"x"},` + message + `]}` }
	for _, c := range []refusal{
		{`{"prompt":"x"}`, "messages", CodeMissing},
		{`{"messages":"x"}`, "messages", CodeInvalidType},
		{`{"messages":[]}`, "messages", CodeInvalidValue},
		{chat("1"), "messages[1]", CodeInvalidType},
		{chat("{}"), "messages[1].role", CodeMissing},
		{chat(`{"role":1}`), "messages[1].role", CodeInvalidType},
		{chat(`{"role":"tool","content":"x"}`), "messages[1].role", CodeUnsupported},
		{chat(`{"role":"user"}`), "messages[1].content", CodeMissing},
		{chat(`{"role":"user","content":1}`), "messages[1].content", CodeInvalidType},
		{chat(`{"role":"user","content":[1]}`), "messages[1].content[0]", CodeInvalidType},
		{chat(`{"role":"user","content":[{"type":"image_url"}]}`), "messages[1].content[0].type", CodeUnsupported},
		{chat(`{"role":"user","content":[{"type":"text"}]}`), "messages[1].content[0].text", CodeMissing},
		{chat(`{"role":"user","content":[{"type":"text","text":[]}]}`), "messages[1].content[0].text", CodeInvalidType},
		{chat(`{"role":"assistant","content":"x","tool_calls":[{}]}`), "messages[1].tool_calls", CodeUnsupported},
		{`{"messages":[{"role":"user","content":"x"}],"max_completion_tokens":0}`, "max_completion_tokens", CodeInvalidValue},
		{`{"messages":[{"role":"user","content":"x"}],"tools":[{}]}`, "tools", CodeUnsupported},
		{`{"messages":[{"role":"user","content":"x"}],"logprobs":true}`, "logprobs", CodeUnsupported},
	} {
		_, err := ParseChat([]byte(c.body))
		checkRefusal(t, c.body, err, c.param, c.code)
	}
}

func checkRefusal(t *testing.T, body string, err error, param, code string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("%.80s: got %v, want an error about %s", body, err, param)
		return
	}
	if e.Param != param || e.Code != code || e.Status != 400 || e.Type != TypeInvalidRequest || !strings.Contains(e.Message, param) {
		t.Errorf("%.80s: got %+v, want %s about %s", body, *e, code, param)
	}
}

func TestErrorShape(t *testing.T) {
	e := &Error{Status: 404, Message: `no "x"`, Type: TypeNotFound, Param: "model", Code: CodeModelNotFound}
	want := `{"error":{"message":"no \"x\"","type":"not_found_error","param":"model","code":"model_not_found"}}`
	if got := string(e.AppendJSON(nil)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	want = `{"error":{"message":"m","type":"server_error","param":null,"code":null}}`
	if got := string((&Error{Message: "m", Type: TypeServer}).AppendJSON(nil)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func FuzzRequests(f *testing.F) {
	f.Add([]byte(`{"prompt":[[1,2],[3]],"stop":["a"],"stream":true,"stream_options":{"include_usage":true},"seed":1}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"max_tokens":3}`))
	f.Add([]byte(`{"prompt":["\ud800","é"],"temperature":1e-400}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		check := func(err error) {
			var e *Error
			if err != nil && (!errors.As(err, &e) || e.Status != 400 || e.Message == "" || !json.Valid(e.AppendJSON(nil))) {
				t.Fatalf("%q: %#v", body, err)
			}
		}
		c, err := ParseCompletion(body)
		check(err)
		if err == nil {
			for _, p := range c.Prompts {
				if (p.Text == "") == (len(p.Tokens) == 0) {
					t.Fatalf("%q: prompt %+v", body, p)
				}
			}
			if c.MaxTokens < 0 || c.N < 1 || len(c.Prompts)*c.N > MaxChoices || len(c.Prompts) == 0 {
				t.Fatalf("%q: %+v", body, c)
			}
		}
		m, err := ParseChat(body)
		check(err)
		if err == nil && (len(m.Messages) == 0 || m.MaxTokens < 0) {
			t.Fatalf("%q: %+v", body, m)
		}
	})
}

func BenchmarkParseTokens(b *testing.B) {
	body := []byte(`{"prompt":[` + strings.TrimSuffix(strings.Repeat("12345,", 100_000), ",") + `]}`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, err := ParseCompletion(body); err != nil {
			b.Fatal(err)
		}
	}
}
