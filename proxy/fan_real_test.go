package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/connector"
	kvengine "github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/engine/api"
	"github.com/kvferry/kvferry/openai"
)

// startEngine runs a real engine and gives its address.
func startEngine(t *testing.T, role connector.Role, change ...func(*kvengine.Config)) string {
	t.Helper()
	return startBehind(t, func(h http.Handler) http.Handler { return h }, role, change...)
}

// startBehind runs a real engine behind a handler of the test.
func startBehind(t *testing.T, behind func(http.Handler) http.Handler, role connector.Role, change ...func(*kvengine.Config)) string {
	t.Helper()
	cfg := kvengine.Config{Role: role, NumBlocks: 256}
	for _, f := range change {
		f(&cfg)
	}
	e, err := kvengine.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s, err := api.New(api.Config{Engine: e})
	if err != nil {
		t.Fatal(err)
	}
	h := httptest.NewUnstartedServer(nil)
	h.Config = s.Server()
	h.Config.Handler = behind(h.Config.Handler)
	h.Start()
	t.Cleanup(func() {
		h.Close()
		_ = e.Close(t.Context())
	})
	return h.URL
}

// choice is one answer with everything that a client can see of it.
type choice struct {
	Text, Finish, Stop string
	Tokens, Prompt     []int
}

// answered is a whole answer, streamed or not.
type answered struct {
	Choices []choice
	Usage   *openai.Usage
}

// readAnswer puts an answer together and checks its form.
func readAnswer(t *testing.T, resp *http.Response, body []byte, n int) answered {
	t.Helper()
	out := answered{Choices: make([]choice, n)}
	type wireChoice struct {
		Index   int
		Text    string
		Message struct{ Content string }
		Delta   struct{ Role, Content string }
		Finish  *string `json:"finish_reason"`
		Stop    any     `json:"stop_reason"`
		Tokens  []int   `json:"token_ids"`
		Prompt  []int   `json:"prompt_token_ids"`
	}
	ids := map[string]bool{}
	add := func(data []byte) {
		var a struct {
			ID      string
			Created int64
			Choices []wireChoice
			Usage   *openai.Usage
		}
		if err := json.Unmarshal(data, &a); err != nil {
			t.Fatalf("%v in %s", err, data)
		}
		ids[fmt.Sprintf("%s at %d", a.ID, a.Created)] = true
		if a.Usage != nil {
			if out.Usage != nil {
				t.Errorf("usage twice: %s", body)
			}
			out.Usage = a.Usage
		}
		for _, c := range a.Choices {
			if c.Index < 0 || c.Index >= n {
				t.Fatalf("choice %d of %d: %s", c.Index, n, data)
			}
			o := &out.Choices[c.Index]
			if o.Finish != "" {
				t.Errorf("choice %d goes on after its end: %s", c.Index, data)
			}
			o.Text += c.Text + c.Message.Content + c.Delta.Content
			o.Tokens = append(o.Tokens, c.Tokens...)
			o.Prompt = append(o.Prompt, c.Prompt...)
			if c.Finish != nil {
				o.Finish = *c.Finish
			}
			if c.Stop != nil {
				o.Stop = fmt.Sprint(c.Stop)
			}
		}
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), openai.EventStream) {
		var r openai.EventReader
		last := ""
		if err := r.Feed(body, func(ev openai.Event) error {
			if last == openai.Done {
				t.Errorf("%s after the end", ev.Data)
			}
			if last = string(ev.Data); last != openai.Done {
				add(ev.Data)
			}
			return nil
		}); err != nil || last != openai.Done || len(r.Pending()) > 0 {
			t.Errorf("%v, the last event is %q", err, last)
		}
	} else {
		add(body)
	}
	if len(ids) != 1 {
		t.Errorf("one answer has several names: %v", ids)
	}
	return out
}

// TestSeveralAnswersEqualOneEngine asks a pair and a single engine the same, token by token.
func TestSeveralAnswersEqualOneEngine(t *testing.T) {
	p, d, alone := startEngine(t, connector.Producer), startEngine(t, connector.Consumer), startEngine(t, connector.Both)
	r := newRig(t, Config{Prefill: []Target{{URL: p}}, Decode: []Target{{URL: d}}})
	long := strings.Repeat("All of these keys and values come from another engine. ", 1)
	for _, c := range []struct {
		name, path, body string
		n                int
	}{
		{"n", "/v1/completions", `"prompt":"` + long + `","n":3,"seed":7,"temperature":1.3`, 3},
		{"n, greedy", "/v1/completions", `"prompt":"` + long + `","n":2,"temperature":0`, 2},
		{"n, the largest seed", "/v1/completions", `"prompt":"` + long + `","n":3,"seed":9223372036854775807`, 3},
		{"several prompts", "/v1/completions", `"prompt":["` + long + `","short","` + long + `and another"],"seed":3`, 3},
		{"token lists, n", "/v1/completions", `"prompt":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],[20,21]],"n":2,"seed":-5`, 4},
		{"a list of one", "/v1/completions", `"prompt":["` + long + `"],"seed":3`, 1},
		{"more than run at a time", "/v1/completions", `"prompt":"x","n":20,"seed":11,"temperature":2`, 20},
		{"stop", "/v1/completions", `"prompt":"` + long + `","n":4,"seed":1,"temperature":2,"stop":["e","a"],"stop_token_ids":[100,101,102,103,104,105,106,107,108,109]`, 4},
		{"chat", "/v1/chat/completions", `"messages":[{"role":"user","content":"` + long + `"}],"n":3,"seed":5`, 3},
	} {
		for _, mode := range []string{``, `,"stream":true`, `,"stream":true,"stream_options":{"include_usage":true}`} {
			if mode == `,"stream":true` && c.name != "n" && c.name != "chat" {
				continue
			}
			t.Run(c.name+mode, func(t *testing.T) {
				body := `{"max_tokens":4,"return_token_ids":true,` + c.body + mode + `}`
				want := ask(t, alone+c.path, body, c.n)
				resp, got, err := r.post(t, c.path, body)
				if err != nil || resp.StatusCode != 200 {
					t.Fatalf("%v %s", err, got)
				}
				route := "push"
				if c.n > 1 {
					route += fmt.Sprintf("; pairs=%d", c.n)
				}
				if resp.Header.Get("X-Kvferry-Route") != route {
					t.Errorf("%v", resp.Header)
				}
				have := readAnswer(t, resp, []byte(got), c.n)
				// How much was cached depends on what was asked before.
				for _, u := range []*openai.Usage{want.Usage, have.Usage} {
					if u != nil {
						if u.PromptTokensDetails == nil {
							t.Fatal("no details")
						}
						u.PromptTokensDetails = nil
					}
				}
				if diff := cmp.Diff(want, have); diff != "" {
					t.Errorf("one engine (-), the pair (+):\n%s", diff)
				}
				if mode == `` && (have.Usage == nil || len(have.Choices[0].Tokens) == 0) {
					t.Errorf("%+v", have)
				}
			})
		}
	}
	r.settled(t)
	if log := r.logs.String(); !strings.Contains(log, `"pairs":20`) || strings.Contains(log, `"error"`) {
		t.Errorf("log: %s", log)
	}
}

// TestSequentialPushEqualsOneEngine: P's own parameters, which name no transfer id, are enough for D.
func TestSequentialPushEqualsOneEngine(t *testing.T) {
	p, d, alone := startEngine(t, connector.Producer), startEngine(t, connector.Consumer), startEngine(t, connector.Both)
	r := newRig(t, Config{Prefill: []Target{{URL: p}}, Decode: []Target{{URL: d}}, Sequential: true})
	for i := range 3 {
		body := fmt.Sprintf(`{"prompt":"%d: the prompt of a pair that pushes one after the other","max_tokens":6,"temperature":0,"n":%d,"return_token_ids":true}`, i, 1+i%2)
		want := ask(t, alone+"/v1/completions", body, 1+i%2)
		resp, got, err := r.post(t, "/v1/completions", body)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v %s", err, got)
		}
		have := readAnswer(t, resp, []byte(got), 1+i%2)
		want.Usage.PromptTokensDetails, have.Usage.PromptTokensDetails = nil, nil
		if diff := cmp.Diff(want, have); diff != "" {
			t.Errorf("one engine (-), the pair (+):\n%s", diff)
		}
	}
	if status, got := fetchURL(t, d+"/metrics"); status != 200 || !strings.Contains(got, "kvferry_engine_received_total 4\n") {
		t.Error("D has not received the KV of all four answers")
	}
}

func fetchURL(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := httpClient.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func ask(t *testing.T, url, body string, n int) answered {
	t.Helper()
	resp, err := httpClient.Post(url, "application/json", bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %s", err, b)
	}
	return readAnswer(t, resp, b, n)
}
