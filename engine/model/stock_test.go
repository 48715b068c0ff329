package model

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
)

// stockRecord is what vLLM 0.32.0 made of a checkpoint on a CPU, in float32 and greedily. It is recorded by
// test/interop/checkpoint.sh with -update.
type stockRecord struct {
	Prompts []struct {
		Text   string       `json:"text"` // what Tokens are the tokens of; empty where there is none
		Tokens []kv.Token   `json:"tokens"`
		Steps  [][3]float64 `json:"steps"` // token, its log-probability, that of the second best
		Answer string       `json:"answer"`
	} `json:"prompts"`
	Chat []struct {
		Role    string `json:"role"`
		Content any    `json:"content"`
	} `json:"chat"`
	ChatTokens []kv.Token `json:"chat_tokens"`
}

// stockRounding is how far log-probabilities may be from those of a stock engine, which adds in another order and
// whose rotation frequencies differ by a last bit: an angle's error grows with the position.
const stockRounding = 2e-4

// The built-in model, as a checkpoint of Save, and a checkpoint that the stock library wrote, with a tied head, a
// vocabulary beyond the tokenizer's and heads that are together wider than the model: a stock engine gives the same.
func TestStockEngineGivesTheSame(t *testing.T) {
	made, err := Load("testdata/stock-made")
	if err != nil {
		t.Fatal(err)
	}
	tiny := t.TempDir()
	if err := Tiny().Save(tiny, BF16); err != nil {
		t.Fatal(err)
	}
	saved, err := Load(tiny)
	if err != nil {
		t.Fatal(err)
	}
	for name, m := range map[string]*Model{"stock-tiny": saved, "stock-made": made} {
		data, err := os.ReadFile("testdata/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var rec stockRecord
		if err := json.Unmarshal(data, &rec); err != nil {
			t.Fatal(err)
		}
		worst := 0.0
		for _, p := range rec.Prompts {
			if p.Text != "" {
				if d := cmp.Diff(p.Tokens, m.tok.Encode(p.Text)); d != "" {
					t.Errorf("%s: %q has other tokens (-stock +ours): %s", name, p.Text, d)
				}
			}
			worst = max(worst, compareSteps(t, m, fmt.Sprintf("%s: prompt of %d tokens", name, len(p.Tokens)), p.Tokens, p.Steps))
			var answer []kv.Token
			for _, s := range p.Steps {
				answer = append(answer, kv.Token(s[0]))
			}
			if got := m.tok.Decode(answer); got != p.Answer {
				t.Errorf("%s: %v is %q, stock says %q", name, answer, got, p.Answer)
			}
		}
		t.Logf("%s: %d prompts, log-probabilities differ by at most %.1g", name, len(rec.Prompts), worst)
		var chat []Message
		for _, c := range rec.Chat {
			chat = append(chat, Message{c.Role, lines(c.Content)})
		}
		if d := cmp.Diff(rec.ChatTokens, m.tok.Encode(ChatPrompt(chat))); d != "" {
			t.Errorf("%s: the chat has other tokens (-stock +ours): %s", name, d)
		}
	}
}

// compareSteps generates along the recorded tokens and returns the largest difference of a log-probability.
func compareSteps(t *testing.T, m *Model, name string, prompt []kv.Token, steps [][3]float64) (worst float64) {
	t.Helper()
	r := NewRunner(m, 1)
	shape := CacheShape{BlockSize: 16, NumBlocks: (len(prompt)+len(steps))/16 + 1}
	c := newCache(t, m.cfg, shape)
	blocks := table(0, shape.NumBlocks)
	logits := run(t, r, c, prompt, 0, blocks)
	for i, want := range steps {
		best, err := argmax(logits)
		if err != nil {
			t.Fatal(err)
		}
		second := (best + 1) % kv.Token(len(logits))
		for x := range logits {
			if kv.Token(x) != best && logits[x] > logits[second] {
				second = kv.Token(x)
			}
		}
		got := [3]float64{float64(best), logProb(logits, logits[best], best), logProb(logits, logits[best], second)}
		far := max(math.Abs(got[1]-want[1]), math.Abs(got[2]-want[2]))
		worst = max(worst, far)
		if got[0] != want[0] || far > stockRounding {
			t.Errorf("%s: step %d is %v, stock gives %v", name, i, got, want)
			return worst
		}
		logits = run(t, r, c, []kv.Token{best}, len(prompt)+i, blocks)
	}
	return worst
}

// lines are the text of a message: itself, or a line for each of its parts.
func lines(content any) string {
	text, whole := content.(string)
	if whole {
		return text
	}
	for i, part := range content.([]any) {
		if i > 0 {
			text += "\n"
		}
		text += part.(map[string]any)["text"].(string)
	}
	return text
}
