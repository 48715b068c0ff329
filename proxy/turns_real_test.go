package proxy

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/connector"
	kvengine "github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
)

// TestConversationEqualsOneEngine chats with a pair whose P reads back what D kept, and with one engine: the
// same words, and P computes of each turn only what is new. What no turn follows D does not keep.
func TestConversationEqualsOneEngine(t *testing.T) {
	pull := func(c *kvengine.Config) {
		c.Mode, c.Bidirectional, c.RecomputeThreshold, c.NoPrefixCache = kv.Pull, true, -1, true
	}
	p, d, alone := startEngine(t, connector.Producer, pull), startEngine(t, connector.Consumer, pull), startEngine(t, connector.Both)
	r := newRig(t, Config{Prefill: []Target{{URL: p}}, Decode: []Target{{URL: d}}})
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var chat []message
	for i := range 4 {
		chat = append(chat, message{"user", fmt.Sprintf("%d: what do you say to this, and to what was said before?", i)})
		said, err := json.Marshal(chat)
		if err != nil {
			t.Fatal(err)
		}
		body := fmt.Sprintf(`{"messages":%s,"max_tokens":12,"temperature":0,"return_token_ids":true,"stream":%v%%s}`, said, i%2 == 1)
		want := ask(t, alone+"/v1/chat/completions", fmt.Sprintf(body, ""), 1)
		resp, got, err := r.post(t, "/v1/chat/completions", fmt.Sprintf(body, `,"conversation_id":"one"`))
		if err != nil || resp.StatusCode != 200 || resp.Header.Get("X-Kvferry-Route") != "pull" || strings.Contains(got, "kv_transfer_params") {
			t.Fatalf("%v %s %v", err, got, resp)
		}
		have := readAnswer(t, resp, []byte(got), 1)
		if have.Usage != nil {
			if u := have.Usage.PromptTokensDetails; i > 0 && (u == nil || u.CachedTokens < have.Usage.PromptTokens/2) {
				t.Errorf("turn %d: %+v, most of the prompt is of earlier turns", i, u)
			}
			want.Usage.PromptTokensDetails, have.Usage.PromptTokensDetails = nil, nil
		}
		if diff := cmp.Diff(want, have); diff != "" {
			t.Errorf("turn %d: one engine (-), the pair (+):\n%s", i, diff)
		}
		chat = append(chat, message{"assistant", have.Choices[0].Text})
	}
	if _, got := fetchURL(t, p+"/metrics"); !strings.Contains(got, "kvferry_engine_received_total 3\n") {
		t.Error("P has not read three turns")
	}
	if _, got := fetchURL(t, d+"/metrics"); !strings.Contains(got, "kvferry_engine_requests_held 1\n") {
		t.Error("D does not keep the last turn")
	}
	// An answer of no conversation D keeps for nobody, and one that D gives alone goes on with no turn.
	if resp, got, err := r.post(t, "/v1/completions", `{"prompt":"of no conversation","max_tokens":4}`); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %s", err, got)
	}
	if _, _, err := r.post(t, "/v1/completions", `{"prompt":"x","echo":true,"conversation_id":"one"}`); err != nil {
		t.Fatal(err)
	}
	idle(t, p)
	idle(t, d)
}
