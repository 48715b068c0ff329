package api

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

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
