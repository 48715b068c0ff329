package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
)

var created = regexp.MustCompile(`"created":\d+`)

// same compares an answer without its time.
func same(t *testing.T, got, want string) {
	t.Helper()
	if d := cmp.Diff(want, created.ReplaceAllString(got, `"created":0`)); d != "" {
		t.Error(d)
	}
}

func TestCompletion(t *testing.T) {
	f := newFake(say("ab", "c"))
	r := newRig(t, f, Config{})
	resp, got := r.do(t, "POST", "/v1/completions", `{"model":"m","prompt":"hello","max_tokens":2,"seed":7,"stop":"x","temperature":0.5}`, "X-Request-Id", "R")
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/json" || resp.Header.Get("X-Request-Id") != "R" {
		t.Fatal(resp.Status, resp.Header, got)
	}
	same(t, got, `{"id":"cmpl-R","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":"abc","logprobs":null,"finish_reason":"length","stop_reason":null}],`+
		`"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}}`)
	q := f.takeAll(t)[0]
	if !regexp.MustCompile(`^cmpl-R-0-[0-9a-f]{8}$`).MatchString(string(q.ID)) {
		t.Errorf("internal id %s", q.ID)
	}
	if string(tiny().Tokenizer().Decode(q.Prompt)) != "hello" || q.MaxTokens != 2 || q.Sampling.Seed != 7 || q.Sampling.Temperature != 0.5 ||
		q.StopStrings[0] != "x" || q.Params != nil {
		t.Errorf("%+v", q)
	}
}

func TestCompletionStream(t *testing.T) {
	r := newRig(t, newFake(say("a", "", "b")), Config{})
	resp, got := r.do(t, "POST", "/v1/completions",
		`{"prompt":[1,2],"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true}`, "X-Request-Id", "R")
	if resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || resp.Header.Get("X-Accel-Buffering") != "no" {
		t.Error(resp.Header)
	}
	chunk := func(choices, more string) string {
		return `data: {"id":"cmpl-R","object":"text_completion","created":0,"model":"m","choices":[` + choices + `]` + more + "}\n\n"
	}
	same(t, got, chunk(`{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1,2],"token_ids":[0]}`, "")+
		chunk(`{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[1]}`, "")+
		chunk(`{"index":0,"text":"b","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[2]}`, "")+
		chunk("", `,"usage":{"prompt_tokens":2,"total_tokens":5,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}`)+
		"data: [DONE]\n\n")
}

func TestChat(t *testing.T) {
	f := newFake(say("hi"))
	r := newRig(t, f, Config{})
	body := `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}],"max_completion_tokens":3%s}`
	_, got := r.do(t, "POST", "/v1/chat/completions", fmt.Sprintf(body, ""), "X-Request-Id", "R")
	same(t, got, `{"id":"chatcmpl-R","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"logprobs":null,"finish_reason":"length","stop_reason":null}],`+
		`"usage":{"prompt_tokens":29,"total_tokens":30,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":3}}}`)
	q := f.takeAll(t)[0]
	if got := tiny().Tokenizer().Decode(q.Prompt); got != "system: s\nuser: u\nassistant: " {
		t.Errorf("prompt %q", got)
	}
	if !regexp.MustCompile(`^chatcmpl-R-[0-9a-f]{8}$`).MatchString(string(q.ID)) || q.MaxTokens != 3 {
		t.Errorf("%+v", q)
	}
	_, got = r.do(t, "POST", "/v1/chat/completions", fmt.Sprintf(body, `,"stream":true`), "X-Request-Id", "R")
	chunk := func(delta, finish string) string {
		return `data: {"id":"chatcmpl-R","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":` + delta +
			`,"logprobs":null,"finish_reason":` + finish + "}]}\n\n"
	}
	same(t, got, chunk(`{"role":"assistant","content":""}`, "null")+chunk(`{"content":"hi"}`, `"length"`)+"data: [DONE]\n\n")
}

// TestInternalIDs: vLLM's rule, with and without the random suffix.
func TestInternalIDs(t *testing.T) {
	for _, c := range []struct {
		path, body, header string
		want               []string // regular expressions; \x stands for the suffix
		sharedSuffix       [][]int
	}{
		{"/v1/completions", `{"prompt":"a"}`, "R", []string{`cmpl-R-0\x`}, nil},
		{"/v1/completions", `{"prompt":["a","b"]}`, "R", []string{`cmpl-R-0\x`, `cmpl-R-1\x`}, nil},
		{"/v1/completions", `{"prompt":["a","b"],"n":2}`, "R", []string{`0_cmpl-R-0\x`, `1_cmpl-R-0\x`, `0_cmpl-R-1\x`, `1_cmpl-R-1\x`}, [][]int{{0, 1}, {2, 3}}},
		{"/v1/completions", `{"prompt":"a"}`, "", []string{`cmpl-[0-9a-f]{16}-0\x`}, nil},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}]}`, "R", []string{`chatcmpl-R\x`}, nil},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}],"n":2}`, "R", []string{`0_chatcmpl-R\x`, `1_chatcmpl-R\x`}, [][]int{{0, 1}}},
	} {
		for _, plain := range []bool{false, true} {
			f := newFake(say("x"))
			r := newRig(t, f, Config{NoRequestIDSuffix: plain})
			if resp, got := r.do(t, "POST", c.path, c.body, "X-Request-Id", c.header); resp.StatusCode != 200 {
				t.Fatal(got)
			}
			suffix := `-[0-9a-f]{8}`
			if plain {
				suffix = ""
			}
			qs := f.takeAll(t)
			if len(qs) != len(c.want) {
				t.Fatalf("%s: %d requests, want %d", c.body, len(qs), len(c.want))
			}
			for i, w := range c.want {
				if !regexp.MustCompile("^" + strings.ReplaceAll(w, `\x`, suffix) + "$").MatchString(string(qs[i].ID)) {
					t.Errorf("%s: id %s, want %s", c.body, qs[i].ID, w)
				}
			}
			for _, pair := range c.sharedSuffix {
				if a, b := qs[pair[0]].ID, qs[pair[1]].ID; a[1:] != b[1:] {
					t.Errorf("%s and %s differ in more than the number", a, b)
				}
			}
		}
	}
}

func TestSeveralAnswers(t *testing.T) {
	f := newFake(func(r engine.Request) []engine.Output { return say(string(r.ID[:1]) + fmt.Sprint(len(r.Prompt)))(r) })
	r := newRig(t, f, Config{NoRequestIDSuffix: true})
	_, got := r.do(t, "POST", "/v1/completions", `{"prompt":["a","bb"],"n":2,"seed":10}`, "X-Request-Id", "R")
	var c openai.Completion
	if err := json.Unmarshal([]byte(got), &c); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for i, ch := range c.Choices {
		if ch.Index != i {
			t.Errorf("choice %d has index %d", i, ch.Index)
		}
		texts = append(texts, ch.Text)
	}
	if d := cmp.Diff([]string{"01", "11", "02", "12"}, texts); d != "" {
		t.Error(d)
	}
	if c.Usage.PromptTokens != 3 || c.Usage.CompletionTokens != 4 {
		t.Errorf("%+v", c.Usage)
	}
	qs := f.takeAll(t)
	if qs[0].Sampling.Seed != 10 || qs[1].Sampling.Seed != 11 || qs[2].Sampling.Seed != 10 {
		t.Errorf("seeds %d %d %d", qs[0].Sampling.Seed, qs[1].Sampling.Seed, qs[2].Sampling.Seed)
	}
	_, got = r.do(t, "POST", "/v1/completions", `{"prompt":["a","bb"],"stream":true}`)
	if strings.Count(got, `"finish_reason":"length"`) != 2 || strings.Count(got, `"index":1`) != 1 || !strings.HasSuffix(got, "data: [DONE]\n\n") {
		t.Error(got)
	}
}

const (
	prefillParams = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null,"transfer_id":"xfer-1"}`
	decodeParams  = `{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"p","remote_host":"h","remote_port":5600,"tp_size":1,"pp_size":1,"remote_request_id":"R","transfer_id":"xfer-1"}`
)

func TestHandoff(t *testing.T) {
	f := newFake(func(r engine.Request) []engine.Output {
		out := say("x")(r)
		if r.Params != nil && r.Params.DoRemoteDecode {
			out[0].Params = &kv.TransferParams{
				DoRemotePrefill: true, RemoteEngineID: "e", RemoteRequestID: r.ID, RemoteHost: "h", RemotePort: 5600, TPSize: 1, DCPSize: 1, PPSize: 1,
				RemoteBlockIDs: kv.BlockIDs{{1, 2}}, RemoteNumTokens: 5, Mode: kv.Push,
			}
		}
		return out
	})
	r := newRig(t, f, Config{NoRequestIDSuffix: true})
	body := `{"prompt":"hello","max_tokens":1,"kv_transfer_params":%s%s}`
	_, got := r.do(t, "POST", "/v1/completions", fmt.Sprintf(body, prefillParams, ""), "X-Request-Id", "R")
	want := `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_request_id":"cmpl-R-0",` +
		`"remote_host":"h","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":5,"transfer_mode":"push","remote_prefill_cached_tokens":3}}`
	if !strings.HasSuffix(got, want) {
		t.Errorf("got %s\nwant …%s", got, want)
	}
	if q := f.takeAll(t)[0]; q.Params.TransferID != "xfer-1" || !q.Params.DoRemoteDecode {
		t.Errorf("%+v", q.Params)
	}
	if _, got := r.do(t, "POST", "/v1/completions", fmt.Sprintf(body, prefillParams, `,"stream":true`)); strings.Contains(got, "kv_transfer_params") {
		t.Errorf("a stream has parameters: %s", got)
	}
	f.takeAll(t)

	r.do(t, "POST", "/v1/completions", fmt.Sprintf(body, decodeParams, ""))
	if q := f.takeAll(t)[0]; q.Params.RemoteEngineID != "p" || q.Params.RemotePort != 5600 || q.Params.TransferID != "xfer-1" {
		t.Errorf("%+v", q.Params)
	}
	// Several answers cannot share a transfer id.
	r.do(t, "POST", "/v1/completions", fmt.Sprintf(body, decodeParams, `,"n":2`))
	for _, q := range f.takeAll(t) {
		if q.Params.TransferID != "" || q.Params.RemoteEngineID != "p" {
			t.Errorf("%+v", q.Params)
		}
	}
	// The router's word about P's cache, and P's token ids, go before the own.
	more := strings.Replace(decodeParams, "{", `{"remote_prefill_cached_tokens":4,"prompt_token_ids":[9,8],`, 1)
	_, got = r.do(t, "POST", "/v1/completions", fmt.Sprintf(body, more, ""))
	if !strings.Contains(got, `"cached_tokens":4`) {
		t.Error(got)
	}
	if q := f.takeAll(t)[0]; len(q.Prompt) != 2 || q.Prompt[0] != 9 {
		t.Errorf("prompt %v", q.Prompt)
	}
	for _, ordinary := range []string{"null", "{}", `{"do_remote_decode":false,"do_remote_prefill":false}`} {
		r.do(t, "POST", "/v1/completions", fmt.Sprintf(body, ordinary, ""))
		if q := f.takeAll(t)[0]; q.Params != nil {
			t.Errorf("%s: %+v", ordinary, q.Params)
		}
	}
}

func TestRefusals(t *testing.T) {
	f := newFake(say("x"))
	r := newRig(t, f, Config{MaxBody: 2000})
	long := strings.Repeat("a", 64)
	for _, c := range []struct {
		path, body, header string
		status             int
		param, message     string
	}{
		{"/v1/completions", `{`, "", 400, "", "not usable JSON"},
		{"/v1/completions", `{"prompt":"a","max_tokens":-1}`, "", 400, "max_tokens", "at least 1"},
		{"/v1/completions", `{"prompt":""}`, "", 400, "prompt", "at least one token"},
		{"/v1/completions", `{"prompt":"` + long + `"}`, "", 400, "prompt", "Shorten it to 63"},
		{"/v1/completions", `{"prompt":"` + long[1:] + `","max_tokens":2}`, "", 400, "max_tokens", "has room for 1 behind"},
		{"/v1/completions", `{"prompt":"a","max_tokens":1000000}`, "", 400, "max_tokens", "has room for 63 behind"},
		{"/v1/completions", `{"prompt":"a","model":"gpt"}`, "", 404, "model", "`gpt` does not exist"},
		{"/v1/completions", `{"prompt":"a"}`, "a,b", 400, "X-Request-Id", "','"},
		{"/v1/completions", `{"prompt":"a"}`, strings.Repeat("a", 257), 400, "X-Request-Id", "257 characters"},
		{"/v1/completions", `{"prompt":"` + strings.Repeat("a", 2000) + `"}`, "", 413, "", "larger than 2000 bytes"},
		{"/v1/completions", `{"prompt":"a","kv_transfer_params":[]}`, "", 400, "kv_transfer_params", "not a JSON object"},
		{"/v1/completions", `{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true}}`, "", 400, "kv_transfer_params.remote_engine_id", "missing"},
		{"/v1/completions", `{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"kv_load_failure_policy":"retry"}}`, "", 400, "kv_transfer_params.kv_load_failure_policy", "neither"},
		{"/v1/completions", `{"prompt":"a","kv_transfer_params":{"tp_size":0}}`, "", 400, "kv_transfer_params.tp_size", "tp_size"},
		{"/v1/completions", `{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":true}}`, "", 400, "kv_transfer_params.do_remote_prefill", "together"},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"` + long + `"}]}`, "", 400, "messages", "no room"},
		{"/v1/embeddings", `{}`, "", 404, "", "POST /v1/embeddings"},
	} {
		resp, got := r.do(t, "POST", c.path, c.body, "X-Request-Id", c.header)
		var e struct {
			Error struct {
				Message, Type string
				Param         *string
			}
		}
		if err := json.Unmarshal([]byte(got), &e); err != nil {
			t.Fatalf("%v in %s", err, got)
		}
		param := ""
		if e.Error.Param != nil {
			param = *e.Error.Param
		}
		if resp.StatusCode != c.status || param != c.param || !strings.Contains(e.Error.Message, c.message) || e.Error.Type == "" {
			t.Errorf("%.80s: %d %s, want %d about %q: %s", c.body, resp.StatusCode, got, c.status, c.param, c.message)
		}
	}
	if n := len(f.submitted()); n != 0 {
		t.Errorf("%d requests reached the engine", n)
	}
	// Each field that a decode leg needs, removed in turn.
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(decodeParams), &all); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"} {
		less := map[string]json.RawMessage{}
		for k, v := range all {
			if k != name {
				less[k] = v
			}
		}
		p, _ := json.Marshal(less)
		resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"a","kv_transfer_params":`+string(p)+`}`)
		if resp.StatusCode != 400 || !strings.Contains(got, `"param":"kv_transfer_params.`+name+`"`) {
			t.Errorf("without %s: %d %s", name, resp.StatusCode, got)
		}
	}
}

// TestDefaultLimits: what is not told is as much as there is room for, 16 for a completion.
func TestDefaultLimits(t *testing.T) {
	f := newFake(say("x"))
	r := newRig(t, f, Config{})
	for body, want := range map[string]int{
		`{"prompt":"a"}`: 16,
		`{"prompt":"` + strings.Repeat("a", 60) + `"}`: 4,
	} {
		r.do(t, "POST", "/v1/completions", body)
		if q := f.takeAll(t)[0]; q.MaxTokens != want {
			t.Errorf("%s: max_tokens %d, want %d", body, q.MaxTokens, want)
		}
	}
	r.do(t, "POST", "/v1/chat/completions", `{"messages":[{"role":"user","content":"a"}]}`)
	if q := f.takeAll(t)[0]; q.MaxTokens != 64-len(q.Prompt) {
		t.Errorf("a chat of %d tokens has max_tokens %d", len(q.Prompt), q.MaxTokens)
	}
}

func TestEngineErrors(t *testing.T) {
	for _, c := range []struct {
		err    *engine.RequestError
		status int
		want   string
	}{
		{&engine.RequestError{Kind: engine.KindInvalid, Field: "stop"}, 400, `"param":"stop"`},
		{&engine.RequestError{Kind: engine.KindInvalid, Field: "request_id"}, 400, `"param":"X-Request-Id"`},
		{&engine.RequestError{Kind: engine.KindOverload}, 429, `"type":"rate_limit_error"`},
		{&engine.RequestError{Kind: engine.KindUnavailable}, 503, `"code":"unavailable"`},
		{&engine.RequestError{Kind: engine.KindInternal}, 500, `"type":"server_error"`},
	} {
		c.err.Err = errors.New("cause")
		f := newFake(say("x"))
		n := 0
		f.refuse = func(engine.Request) error { // the second child, so that the first must be ended
			if n++; n == 2 {
				return c.err
			}
			return nil
		}
		resp, got := newRig(t, f, Config{}).do(t, "POST", "/v1/completions", `{"prompt":["a","b"]}`)
		if resp.StatusCode != c.status || !strings.Contains(got, c.want) || !strings.Contains(got, "cause") ||
			(resp.Header.Get("Retry-After") != "") != (c.status == 429 || c.status == 503) {
			t.Errorf("%s: %d %s %v", c.err.Kind, resp.StatusCode, got, resp.Header)
		}
		f.takeAll(t)
	}
}

func TestRequestsThatFail(t *testing.T) {
	word := engine.Output{Text: "a", Tokens: []kv.Token{1}}
	for name, c := range map[string]struct {
		script   func(engine.Request) []engine.Output
		status   int
		code     string
		streamed bool // a token came before
	}{
		"transfer":         {failing(engine.KindTransfer, string(connector.PhaseHandshake)), 502, `"kv_transfer_handshake"`, false},
		"transfer, later":  {failing(engine.KindTransfer, string(connector.PhaseWait), word), 502, `"kv_transfer_wait"`, true},
		"internal":         {failing(engine.KindInternal, "model"), 500, `"internal_error"`, false},
		"engine closes":    {failing(engine.KindAborted, "close", word), 503, `"aborted"`, true},
		"stream is broken": {func(engine.Request) []engine.Output { return []engine.Output{{Text: "ERROR"}} }, 500, `"server_error"`, false},
		"stream panics":    {func(engine.Request) []engine.Output { return []engine.Output{word, {Text: "PANIC"}} }, 500, `"server_error"`, true},
		"abort, no reason": {func(engine.Request) []engine.Output { return []engine.Output{{Finish: connector.FinishAbort}} }, 500, `"server_error"`, false},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, stream %v", name, stream), func(t *testing.T) {
				f := newFake(c.script)
				resp, got := newRig(t, f, Config{}).do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":"a","stream":%v}`, stream))
				status := c.status
				if stream && c.streamed {
					status = 200
					if !strings.Contains(got, "\n\ndata: {\"error\":{") || strings.Contains(got, "[DONE]") {
						t.Errorf("got %q", got)
					}
				}
				if resp.StatusCode != status || !strings.Contains(got, c.code) {
					t.Errorf("%d %s", resp.StatusCode, got)
				}
				f.takeAll(t)
			})
		}
	}
}

func TestStopReasons(t *testing.T) {
	for want, out := range map[string]engine.Output{
		`"finish_reason":"stop","stop_reason":"END"`:  {Text: "a", Tokens: []kv.Token{1}, Finish: connector.FinishStop, StopString: "END"},
		`"finish_reason":"stop","stop_reason":7`:      {Text: "a", Tokens: []kv.Token{1, 7}, Finish: connector.FinishStop},
		`"finish_reason":"stop","stop_reason":null`:   {Text: "a", Tokens: []kv.Token{257}, Finish: connector.FinishStop},
		`"finish_reason":"length","stop_reason":null`: {Text: "a", Tokens: []kv.Token{7}, Finish: connector.FinishLength},
	} {
		f := newFake(func(engine.Request) []engine.Output { return []engine.Output{out} })
		r := newRig(t, f, Config{})
		for _, stream := range []string{"false", "true"} {
			if _, got := r.do(t, "POST", "/v1/completions", `{"prompt":"a","stop":"END","stop_token_ids":[7],"stream":`+stream+`}`); !strings.Contains(got, want) {
				t.Errorf("got %s, want %s", got, want)
			}
		}
	}
}

// TestClientLeaves: the requests are aborted, whether tokens came or not.
func TestClientLeaves(t *testing.T) {
	for _, words := range [][]engine.Output{nil, {{Text: "a", Tokens: []kv.Token{1}}}} {
		admitted := make(chan struct{})
		f := newFake(func(engine.Request) []engine.Output {
			close(admitted)
			return words
		})
		r := newRig(t, f, Config{})
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			resp, err := r.send(ctx, "POST", "/v1/completions", `{"prompt":"a","stream":true}`)
			if err != nil {
				return
			}
			defer resp.Body.Close()
			_, _ = io.ReadFull(resp.Body, make([]byte, 10))
			leave()
		}()
		<-admitted
		if words == nil {
			leave()
		}
		<-gone
		leave()
		f.takeAll(t)
	}
}

// TestClientThatDoesNotRead is taken for gone, and its request is aborted.
func TestClientThatDoesNotRead(t *testing.T) {
	f := newFake(func(engine.Request) []engine.Output {
		out := make([]engine.Output, 64)
		for i := range out {
			out[i] = engine.Output{Text: strings.Repeat("x", 1<<20), Tokens: []kv.Token{1}}
		}
		return out
	})
	r := newRig(t, f, Config{}, func(s *Server) { s.patience = 100 * time.Millisecond })
	resp, err := r.send(t.Context(), "POST", "/v1/completions", `{"prompt":"a","stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	f.takeAll(t)
}

func TestEndpoints(t *testing.T) {
	f := newFake(say("x"))
	f.stats = engine.Stats{BlocksFree: 9, BlocksTotal: 10, Finished: map[connector.FinishReason]uint64{connector.FinishStop: 3}}
	r := newRig(t, f, Config{})
	r.do(t, "POST", "/v1/completions", `{"prompt":"a"}`)
	for path, want := range map[string]string{
		"/health":         `{"status":"ok"}`,
		"/ready":          `{"ready":true}`,
		"/kv/coordinates": `{"engine_id":"e","host":"h","port":5600,"tp_size":1,"pp_size":1,"transfer_mode":"push","block_size":16,"model":"m","role":"both"}`,
		"/v1/models":      `"max_model_len":64`,
	} {
		if resp, got := r.do(t, "GET", path, ""); resp.StatusCode != 200 || !strings.Contains(got, want) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, got)
		}
	}
	const counted = "kvferry_engine_http_requests_total{path=\"POST /v1/completions\",status=\"200\"} 1\n"
	got := ""
	for end := time.Now().Add(10 * time.Second); !strings.Contains(got, counted) && time.Now().Before(end); {
		_, got = r.do(t, "GET", "/metrics", "") // an answer is counted when its client may have it already
	}
	for _, want := range []string{
		"\nkvferry_engine_blocks_free 9\n", "\nkvferry_engine_blocks_total 10\n", "kvferry_engine_requests_finished_total{reason=\"stop\"} 3\n",
		counted,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("/metrics lacks %q", want)
		}
	}
	f.ready = errors.New("the side channel is closed")
	if resp, got := r.do(t, "GET", "/ready", ""); resp.StatusCode != 503 || !strings.Contains(got, "the side channel is closed") {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
}

// TestPanicCostsOneRequest: before an answer it is a 500, behind its beginning the connection is cut.
func TestPanicCostsOneRequest(t *testing.T) {
	f := newFake(func(engine.Request) []engine.Output { panic("a broken engine") })
	r := newRig(t, f, Config{})
	if resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"a"}`); resp.StatusCode != 500 || !strings.Contains(got, `"error"`) {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
	r.mux.HandleFunc("GET /cut", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "half an ans")
		panic("later")
	})
	resp, err := r.send(t.Context(), "GET", "/cut", "")
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		resp.Body.Close()
	}
	if err == nil {
		t.Error("half an answer looks like a whole one")
	}
	if resp, _ := r.do(t, "GET", "/health", ""); resp.StatusCode != 200 {
		t.Error("the server does not live any more")
	}
}

// TestAnswersAreSubmittedTogether: the first of a request's answers says how many there are.
func TestAnswersAreSubmittedTogether(t *testing.T) {
	f := newFake(say("x"))
	r := newRig(t, f, Config{})
	for body, want := range map[string]int{`{"prompt":"a"}`: 1, `{"prompt":["a","b"],"n":2}`: 4} {
		r.do(t, "POST", "/v1/completions", body)
		got := f.takeAll(t)
		if len(got) != want || got[0].Together != want {
			t.Errorf("%s: %d requests, together %d", body, len(got), got[0].Together)
		}
		for _, q := range got[1:] {
			if q.Together != 0 {
				t.Errorf("%s: a later one says %d", body, q.Together)
			}
		}
	}
}
