package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// stockPython names an interpreter with vLLM; test/interop/checkpoint.sh says what it needs.
const stockPython = "KVFERRY_STOCK_PYTHON"

const (
	stockSteps = 24 // tokens generated per prompt
	// stockTie is the lead, in natural logarithms of probability, below which rounding may choose: sums are
	// taken in another order there, and rotation frequencies differ by a last bit.
	stockTie = 5e-4
	// stockRecorded bounds the prompts that are recorded for engine/model, in tokens.
	stockRecorded = 320
)

// stockRecord is what a stock engine makes of a checkpoint, and the file of it in engine/model/testdata.
type stockRecord struct {
	Prompts []stockPrompt `json:"prompts"`
	Chat    []chatMessage `json:"chat"`
	// ChatTokens are the prompt that the chat template makes of it.
	ChatTokens []int `json:"chat_tokens"`
}

type chatMessage struct {
	Role    string `json:"role"`
	Content any    `json:"content"` // text, or a list of parts
}

type stockPrompt struct {
	Text   string      `json:"text,omitempty"` // what Tokens are the tokens of; empty where there is none
	Tokens []int       `json:"tokens"`
	Steps  []stockStep `json:"steps"`
	Answer string      `json:"answer"` // the text of the steps
}

// stockStep is a generated token, its log-probability and that of the second best token.
type stockStep [3]float64

func (p stockPrompt) answer() []int {
	var out []int
	for _, s := range p.Steps {
		out = append(out, int(s[0]))
	}
	return out
}

// TestStockCheckpointLive runs the same checkpoints in a stock vLLM and in an engine of ours, all in float32, and
// compares token by token: the built-in model as `kvferry checkpoint` writes it, the same as the stock library writes
// it again, and a model that the stock library made. With -update it records two of them for engine/model.
func TestStockCheckpointLive(t *testing.T) {
	if os.Getenv(stockPython) == "" {
		t.Skip(stockPython + " is not set: see test/interop/checkpoint.sh")
	}
	s := startStockModel(t)
	dir := func(name string) string { return filepath.Join(t.TempDir(), name) }
	bf16, f32, again, made := dir("bf16"), dir("f32"), dir("again"), dir("made")
	if *update {
		made = "../../engine/model/testdata/stock-made"
	}
	for path, weights := range map[string]string{bf16: "bf16", f32: "f32"} {
		p := launch(t, "checkpoint", path, "--weights", weights)
		if p.wait() != 0 {
			t.Fatal(p.output())
		}
	}
	s.call(t, nil, "load", bf16)
	s.call(t, nil, "rewrite", again, "float16")
	// What kvferry-tiny is not: tied, with a vocabulary beyond the tokenizer's, several ends and no beginning, and
	// with heads that are together wider than the model.
	s.call(t, nil, "make", made, "bfloat16", map[string]any{
		"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
		"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
		"tie_word_embeddings": true, "initializer_range": 0.3, "bos_token_id": nil, "eos_token_id": []int{257, 258},
	}, 1)
	for _, c := range []struct {
		name, path string
		context    int
		record     string
	}{
		{"bf16", bf16, 2048, "stock-tiny"},
		{"f32", f32, 2048, ""},
		{"written by the stock library", again, 2048, ""},
		{"made by the stock library", made, 1024, "stock-made"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.call(t, nil, "load", c.path)
			r := s.record(t, c.context)
			compareWithStock(t, c.path, r)
			if *update && c.record != "" {
				writeStockRecord(t, "../../engine/model/testdata/"+c.record+".json", r)
			}
		})
	}
}

// record asks the stock engine for everything.
func (s *stockModel) record(t *testing.T, context int) stockRecord {
	t.Helper()
	r := stockRecord{Chat: []chatMessage{
		{"system", "Be brief."}, {"user", "Où est le ferry ?\n<3"}, {"assistant", " Là. "},
		{"user", []map[string]string{{"type": "text", "text": "Merci,"}, {"type": "text", "text": "bien."}}},
	}}
	var texts []string
	for i, n := range []int{1, 2, 15, 16, 17, 32, 33, 64, 100, 127, 128, 129, 300, 511, 777, context - stockSteps} {
		texts = append(texts, text(i+1, n))
	}
	texts = append(texts, "Grüße, 世界 🚢\n\tà  la carte ", "e\u0301 \u00ad\u200d\x00 \ufffd 'll I'm 12345  x")
	var tokens [][]int
	s.call(t, &tokens, "encode", texts)
	for i, text := range texts {
		r.Prompts = append(r.Prompts, stockPrompt{Text: text, Tokens: tokens[i]})
	}
	// No text has these: specials, and bytes that are no UTF-8.
	r.Prompts = append(r.Prompts, stockPrompt{Tokens: []int{256, 72, 105, 257, 258, 256}}, stockPrompt{Tokens: []int{0, 255, 0x80, 0xc3, 0xc3, 10}})
	var ask [][]int
	for _, p := range r.Prompts {
		ask = append(ask, p.Tokens)
	}
	var steps [][]stockStep
	s.call(t, &steps, "generate", ask, stockSteps)
	var answers [][]int
	for i := range r.Prompts {
		r.Prompts[i].Steps = steps[i]
		answers = append(answers, r.Prompts[i].answer())
	}
	var shown []string
	s.call(t, &shown, "decode", answers)
	for i := range r.Prompts {
		r.Prompts[i].Answer = shown[i]
	}
	s.call(t, &r.ChatTokens, "chat", r.Chat)
	return r
}

// compareWithStock asks an engine with the same checkpoint, each prompt once as tokens and once as text.
func compareWithStock(t *testing.T, path string, r stockRecord) {
	t.Helper()
	e := serverUp(t, "engine", "--model", path, "--served-model-name", "m", "--listen", "127.0.0.1:0")
	ask := func(endpoint, field string, prompt any) (got struct {
		Choices []struct {
			Text   string `json:"text"`
			Prompt []int  `json:"prompt_token_ids"`
			Tokens []int  `json:"token_ids"`
		} `json:"choices"`
		Prompt []int `json:"prompt_token_ids"`
	}) {
		t.Helper()
		body, err := json.Marshal(map[string]any{"model": "m", field: prompt, "max_tokens": stockSteps, "temperature": 0, "ignore_eos": true, "return_token_ids": true})
		if err != nil {
			t.Fatal(err)
		}
		a := post(context.Background(), e.ready["url"]+endpoint, string(body))
		if err := json.Unmarshal([]byte(a.body), &got); a.status != 200 || err != nil || len(got.Choices) != 1 {
			t.Fatalf("status %d, %v %v: %s", a.status, a.err, err, a.body)
		}
		return got
	}
	same, ties := 0, 0
	for _, p := range r.Prompts {
		name := fmt.Sprintf("prompt of %d tokens", len(p.Tokens))
		got, want := ask("/v1/completions", "prompt", p.Tokens).Choices[0], p.answer()
		at := 0
		for at < min(len(got.Tokens), len(want)) && got.Tokens[at] == want[at] {
			at++
		}
		same += at
		switch {
		case len(got.Tokens) != len(want):
			t.Errorf("%s: %d tokens, stock gives %d", name, len(got.Tokens), len(want))
		case at < len(want) && p.Steps[at][1]-p.Steps[at][2] < stockTie:
			ties++
			t.Logf("%s: token %d is %d, stock gives %d by a lead of %g", name, at, got.Tokens[at], want[at], p.Steps[at][1]-p.Steps[at][2])
		case at < len(want):
			t.Errorf("%s: token %d is %d, stock gives %d by a lead of %g", name, at, got.Tokens[at], want[at], p.Steps[at][1]-p.Steps[at][2])
		case got.Text != p.Answer:
			t.Errorf("%s: text is %q, stock gives %q", name, got.Text, p.Answer)
		}
		if p.Text == "" {
			continue
		}
		if d := cmp.Diff(p.Tokens, ask("/v1/completions", "prompt", p.Text).Choices[0].Prompt); d != "" {
			t.Errorf("%q has other tokens (-stock +ours): %s", p.Text, d)
		}
	}
	if d := cmp.Diff(r.ChatTokens, ask("/v1/chat/completions", "messages", r.Chat).Prompt); d != "" {
		t.Errorf("the chat has other tokens (-stock +ours): %s", d)
	}
	t.Logf("%d prompts, %d equal tokens, %d prompts end in a tie", len(r.Prompts), same, ties)
}

func writeStockRecord(t *testing.T, path string, r stockRecord) {
	t.Helper()
	r.Prompts = slices.DeleteFunc(r.Prompts, func(p stockPrompt) bool { return len(p.Tokens) > stockRecorded })
	out, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(out, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// stockModel is a stock engine in a process of its own.
type stockModel struct {
	in  io.Writer
	out *bufio.Reader
}

func startStockModel(t *testing.T) *stockModel {
	t.Helper()
	cmd := exec.Command(os.Getenv(stockPython), "../../test/interop/checkpoint_stock_node.py")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	return &stockModel{in: in, out: bufio.NewReader(out)}
}

// call sends a command and reads its answer. Loading takes as long as the machine needs: the test's own timeout
// bounds it.
func (s *stockModel) call(t *testing.T, into any, command ...any) {
	t.Helper()
	begun := time.Now()
	line, err := json.Marshal(command)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(s.in, "%s\n", line); err != nil {
		t.Fatal(err)
	}
	got, err := s.out.ReadBytes('\n')
	if err != nil {
		t.Fatalf("%v: %v", command[0], err)
	}
	var answer struct {
		OK    json.RawMessage
		Error string
	}
	if err := json.Unmarshal(got, &answer); err != nil || answer.Error != "" {
		t.Fatalf("%v: %s (%v)", command[0], got, err)
	}
	if into == nil {
		t.Logf("%v: %.1f s", command[:min(2, len(command))], time.Since(begun).Seconds())
		return
	}
	if err := json.Unmarshal(answer.OK, into); err != nil {
		t.Fatalf("%v: %s: %v", command[0], got, err)
	}
}
