package api

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/engine"
)

// An adapter is a model of its own to clients: listed, asked for by name, with other tokens.
func TestAdapters(t *testing.T) {
	e, err := engine.New(engine.Config{NumBlocks: 64, Adapters: []string{"formal", "terse"}})
	if err != nil {
		t.Fatal(err)
	}
	r := serveEngine(t, e)
	ask := func(path, name, prompt string) (int, string) {
		resp, body := r.do(t, "POST", path, fmt.Sprintf(`{"model":%q,%s,"temperature":0,"max_tokens":8}`, name, prompt))
		return resp.StatusCode, body
	}
	texts := map[string]string{}
	for _, name := range []string{"kvferry-tiny", "formal", "terse"} {
		status, body := ask("/v1/completions", name, `"prompt":"The ferry leaves at noon, and"`)
		if status != 200 || !strings.Contains(body, `"model":"`+name+`"`) {
			t.Fatalf("%s: %d %s", name, status, body)
		}
		text := completion(t, body).Choices[0].Text
		if other, ok := texts[text]; ok {
			t.Errorf("%s answers as %s", name, other)
		}
		texts[text] = name
		if status, body := ask("/v1/chat/completions", name, `"messages":[{"role":"user","content":"x"}]`); status != 200 {
			t.Errorf("chat with %s: %d %s", name, status, body)
		}
	}
	if status, body := ask("/v1/completions", "verbose", `"prompt":"x"`); status != 404 || !strings.Contains(body, "kvferry-tiny, formal, terse") {
		t.Errorf("an unknown name: %d %s", status, body)
	}
	if _, body := r.do(t, "GET", "/v1/models", ""); strings.Count(body, `"parent":"kvferry-tiny"`) != 2 || !strings.Contains(body, `"id":"terse"`) {
		t.Errorf("models: %s", body)
	}
}
