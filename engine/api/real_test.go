package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/openai"
)

func startEngine(t *testing.T, role connector.Role) *rig {
	t.Helper()
	e, err := engine.New(engine.Config{Role: role, NumBlocks: 64})
	if err != nil {
		t.Fatal(err)
	}
	return serveEngine(t, e)
}

func serveEngine(t *testing.T, e *engine.Engine) *rig {
	t.Helper()
	s, err := New(Config{Engine: e})
	if err != nil {
		t.Fatal(err)
	}
	h := httptest.NewUnstartedServer(nil)
	h.Config = s.Server()
	h.Start()
	t.Cleanup(func() {
		h.Close()
		if err := e.Close(t.Context()); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	return &rig{s, h.URL}
}

func completion(t *testing.T, body string) openai.Completion {
	t.Helper()
	var c openai.Completion
	if err := json.Unmarshal([]byte(body), &c); err != nil || len(c.Choices) == 0 {
		t.Fatalf("%v in %s", err, body)
	}
	return c
}

// TestRealEngine asks one engine the same in every form.
func TestRealEngine(t *testing.T) {
	r := startEngine(t, connector.Both)
	const prompt = "The ferry leaves at noon, and"
	ask := func(more string) string {
		resp, got := r.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"model":"kvferry-tiny","prompt":%q,"temperature":0,"max_tokens":8%s}`, prompt, more))
		if resp.StatusCode != 200 {
			t.Fatal(got)
		}
		return got
	}
	whole := completion(t, ask(""))
	text := whole.Choices[0].Text
	if len(text) != 8 || *whole.Choices[0].FinishReason != "length" || whole.Usage.PromptTokens != len(prompt) || whole.Usage.CompletionTokens != 8 {
		t.Errorf("%+v %+v", whole.Choices[0], whole.Usage)
	}
	var streamed strings.Builder
	var events openai.EventReader
	done := false
	if err := events.Feed([]byte(ask(`,"stream":true`)), func(ev openai.Event) error {
		if done = string(ev.Data) == openai.Done; !done {
			streamed.WriteString(completion(t, string(ev.Data)).Choices[0].Text)
		}
		return nil
	}); err != nil || !done || streamed.String() != text {
		t.Errorf("streamed %q, want %q, %v", streamed.String(), text, err)
	}
	for _, c := range completion(t, ask(`,"n":3`)).Choices {
		if c.Text != text {
			t.Errorf("answer %d of three: %q", c.Index, c.Text)
		}
	}
	resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":[5,9999]}`)
	if resp.StatusCode != 400 || !strings.Contains(got, `"param":"prompt"`) {
		t.Errorf("a token outside the vocabulary: %d %s", resp.StatusCode, got)
	}
	if resp, got := r.do(t, "GET", "/metrics", ""); !strings.Contains(got, "kvferry_engine_blocks_total 64\n") || !strings.Contains(got, "kvferry_engine_blocks_free 64\n") {
		t.Errorf("%d, blocks are not back:\n%s", resp.StatusCode, got)
	}
}

// TestLoadFailurePolicy: a decode leg whose peer is not there is a 502 that names the phase, or the
// answer that one engine alone gives, as the request wants.
func TestLoadFailurePolicy(t *testing.T) {
	d := startEngine(t, connector.Consumer)
	const prompt = "Nobody has the keys and values of this."
	ask := func(params string) (int, string) {
		resp, got := d.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"temperature":0,"max_tokens":8%s}`, prompt, params))
		return resp.StatusCode, got
	}
	nowhere := strings.Replace(decodeParams, `"remote_host":"h","remote_port":5600`, `"remote_host":"127.0.0.1","remote_port":1`, 1)
	if status, got := ask(`,"kv_transfer_params":` + nowhere); status != 502 || !strings.Contains(got, `"code":"kv_transfer_handshake"`) {
		t.Errorf("%d %s", status, got)
	}
	status, got := ask(`,"kv_transfer_params":` + strings.Replace(nowhere, "{", `{"kv_load_failure_policy":"recompute",`, 1))
	if status != 200 {
		t.Fatalf("%d %s", status, got)
	}
	_, alone := ask("")
	if a, b := completion(t, got).Choices[0].Text, completion(t, alone).Choices[0].Text; a != b {
		t.Errorf("recomputed %q, alone it is %q", a, b)
	}
	if _, got := d.do(t, "GET", "/metrics", ""); !strings.Contains(got, "kvferry_engine_recomputed_total 1\n") ||
		!strings.Contains(got, "kvferry_engine_receive_failures_total 2\n") {
		t.Error("the metrics do not tell of it")
	}
}

// TestClosingEngine answers what it has taken, and refuses what comes.
func TestClosingEngine(t *testing.T) {
	e, err := engine.New(engine.Config{NumBlocks: 64, Role: connector.Producer})
	if err != nil {
		t.Fatal(err)
	}
	r := serveEngine(t, e)
	// Its blocks are held for somebody who does not come, so that closing takes as long as it may.
	if resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"a b c","max_tokens":1,"kv_transfer_params":`+prefillParams+`}`); resp.StatusCode != 200 {
		t.Fatal(got)
	}
	if resp, got := r.do(t, "POST", "/kv/reset-prefix-cache?wait=0.01", ""); resp.StatusCode != 409 || !strings.Contains(got, "blocks of 1 are held") {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
	ctx, giveUp := context.WithCancel(t.Context())
	closed := make(chan error)
	go func() { closed <- e.Close(ctx) }()
	for e.Ready() == nil {
		time.Sleep(time.Millisecond)
	}
	if resp, got := r.do(t, "GET", "/ready", ""); resp.StatusCode != 503 || !strings.Contains(got, "shutting down") {
		t.Errorf("/ready: %d %s", resp.StatusCode, got)
	}
	resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"a"}`)
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !strings.Contains(got, `"unavailable"`) {
		t.Errorf("%d %s %v", resp.StatusCode, got, resp.Header)
	}
	if resp, _ := r.do(t, "GET", "/health", ""); resp.StatusCode != 200 {
		t.Errorf("/health: %s", resp.Status)
	}
	giveUp()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if resp, _ := r.do(t, "POST", "/kv/reset-prefix-cache", ""); resp.StatusCode != 503 {
		t.Errorf("a reset of a closed engine: %s", resp.Status)
	}
}

// TestRealPair sends both legs as the router does and compares with one engine alone.
func TestRealPair(t *testing.T) {
	p, d, alone := startEngine(t, connector.Producer), startEngine(t, connector.Consumer), startEngine(t, connector.Both)
	prompt := strings.Repeat("All of the keys and values of this prompt come from the other engine. ", 3)
	_, got := alone.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"temperature":0,"max_tokens":8}`, prompt))
	want := completion(t, got).Choices[0].Text

	_, got = p.do(t, "GET", "/kv/coordinates", "")
	var c engine.Coordinates
	if err := json.Unmarshal([]byte(got), &c); err != nil {
		t.Fatal(err)
	}
	params := fmt.Sprintf(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":%q,"remote_host":%q,"remote_port":%d,"tp_size":%d,"pp_size":%d,"remote_request_id":"R","transfer_id":"xfer-1"}`,
		c.EngineID, c.Host, c.Port, c.TPSize, c.PPSize)
	var legs sync.WaitGroup
	var prefill, decode string
	legs.Go(func() {
		_, prefill = p.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"kv_transfer_params":%s}`, prompt, prefillParams), "X-Request-Id", "R")
	})
	legs.Go(func() {
		_, decode = d.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"temperature":0,"max_tokens":8,"kv_transfer_params":%s}`, prompt, params), "X-Request-Id", "R")
	})
	legs.Wait()
	if a := completion(t, decode); a.Choices[0].Text != want {
		t.Errorf("the pair says %q, one engine %q", a.Choices[0].Text, want)
	} else if n := a.Usage.PromptTokensDetails.CachedTokens; n != len(prompt)-1 {
		t.Errorf("D reports %d of %d prompt tokens as not computed, want all but one", n, len(prompt))
	}
	if a := completion(t, prefill); a.KVTransferParams == nil {
		t.Errorf("P's answer has no parameters: %s", prefill)
	}
	if _, got := d.do(t, "GET", "/metrics", ""); !strings.Contains(got, "kvferry_engine_received_total 1\n") || strings.Contains(got, "kvferry_engine_received_bytes_total 0\n") {
		t.Error("the transfer is not in D's metrics")
	}
}
