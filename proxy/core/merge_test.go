package core

import (
	"fmt"
	"math/rand"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/openai"
)

func bodies(list []*openai.Object) []string {
	var out []string
	for _, o := range list {
		out = append(out, string(o.Bytes()))
	}
	return out
}

func TestSplit(t *testing.T) {
	for _, c := range []struct {
		in        string
		perPrompt int
		want      []string
	}{
		{`{"prompt":"x","n":1,"seed":3}`, 1, nil},
		{`{"prompt":["x"],"seed":3,"big":9007199254740993}`, 1, []string{`{"prompt":"x","seed":3,"big":9007199254740993}`}},
		{`{"prompt":"x", "n":3,"seed":9223372036854775806}`, 3, []string{
			`{"prompt":"x", "n":1,"seed":9223372036854775806}`, `{"prompt":"x", "n":1,"seed":9223372036854775807}`, `{"prompt":"x", "n":1,"seed":-9223372036854775808}`,
		}},
		{`{"prompt":[ [1, 2] , [3]],"n":2,"seed":-1}`, 2, []string{
			`{"prompt":[1, 2],"n":1,"seed":-1}`, `{"prompt":[1, 2],"n":1,"seed":0}`, `{"prompt":[3],"n":1,"seed":-1}`, `{"prompt":[3],"n":1,"seed":0}`,
		}},
		{`{"prompt":["a","b"]}`, 1, []string{`{"prompt":"a"}`, `{"prompt":"b"}`}},
		{`{"prompt":"x","n":2,"seed":1.5}`, 2, []string{`{"prompt":"x","n":1,"seed":1.5}`, `{"prompt":"x","n":1,"seed":1.5}`}}, // the engine's to refuse
	} {
		p, err := NewPlan(Completions, object(t, c.in))
		if err != nil || !p.Disaggregate || p.PerPrompt != c.perPrompt {
			t.Errorf("%s: %+v, %v", c.in, p, err)
		}
		if d := cmp.Diff(c.want, bodies(p.Answers)); d != "" {
			t.Errorf("%s: %s", c.in, d)
		}
	}
	p, err := NewPlan(ChatCompletions, object(t, `{"messages":[],"n":2,"prompt":["a","b","c"]}`))
	if err != nil || len(p.Answers) != 2 {
		t.Errorf("a chat: %+v, %v", p, err)
	}
}

// TestMergeStreams cuts the streams of several parts into pieces of whole events in any order; every choice
// must come out whole and in order, with one end.
func TestMergeStreams(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 6).Draw(t, "parts")
		perPrompt := rapid.SampledFrom([]int{1, n}).Draw(t, "per prompt")
		withUsage := rapid.Bool().Draw(t, "usage")
		m := NewMerge("R", n, perPrompt, withUsage)
		left := make([][]string, n)
		for i := range left {
			for j := range rapid.IntRange(1, 5).Draw(t, "chunks") {
				left[i] = append(left[i], fmt.Sprintf("data: {\"id\":\"cmpl-R.%d\",\"created\":%d,\"choices\":[{\"index\":0,\"text\":\"%d.%d \"}],\"usage\":null}\n\n", i, 100+i, i, j))
			}
			if withUsage {
				left[i] = append(left[i], fmt.Sprintf("data: {\"id\":\"cmpl-R.%d\",\"created\":%d,\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":%d,\"total_tokens\":1}}\n\n", i, 100+i, i+1))
			}
			left[i] = append(left[i], ": ping\n\n", "data: [DONE]\n\n")
		}
		want := make([]string, n)
		for i, l := range left {
			for j := range l {
				if strings.Contains(l[j], `"text"`) {
					want[i] += fmt.Sprintf("%d.%d ", i, j)
				}
			}
		}
		var out []byte
		r := rand.New(rand.NewSource(rapid.Int64().Draw(t, "order")))
		for {
			var open []int
			for i := range left {
				if len(left[i]) > 0 {
					open = append(open, i)
				}
			}
			if len(open) == 0 {
				break
			}
			i := open[r.Intn(len(open))]
			k := 1 + r.Intn(len(left[i]))
			events, err := m.Events(i, []byte(strings.Join(left[i][:k], "")))
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, events...)
			left[i] = left[i][k:]
		}
		out = append(out, m.End()...)
		got := make([]string, n)
		var reader openai.EventReader
		usage, done := 0, false
		err := reader.Feed(out, func(ev openai.Event) error {
			switch {
			case ev.Data == nil:
				return nil
			case done:
				t.Fatalf("%s after the end", ev.Data)
			case string(ev.Data) == openai.Done:
				done = true
				return nil
			}
			o, err := openai.ParseObject(ev.Data)
			if err != nil || string(o.Raw("id")) != `"cmpl-R"` {
				t.Fatalf("%v %s", err, ev.Data)
			}
			choices, _ := openai.Elements(o.Raw("choices"), 10)
			if len(choices) == 0 {
				usage++
				prompts := 1
				if perPrompt == 1 {
					prompts = n
				}
				if want := fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, 10*prompts, n*(n+1)/2, 10*prompts+n*(n+1)/2); string(o.Raw("usage")) != want {
					t.Fatalf("%s, want %s", ev.Data, want)
				}
				return nil
			}
			c, err := openai.ParseObject(choices[0])
			if err != nil {
				t.Fatal(err)
			}
			var i int
			if _, err := fmt.Sscan(string(c.Raw("index")), &i); err != nil {
				t.Fatal(err)
			}
			got[i] += strings.Trim(string(c.Raw("text")), `"`)
			return nil
		})
		if err != nil || !done || usage > 1 || (usage == 1) != withUsage {
			t.Fatalf("%v, done %v, usage %d times", err, done, usage)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatal(d)
		}
	})
}

// TestMergeCached: of a prompt, what the answer that was computed first has found counts, once.
func TestMergeCached(t *testing.T) {
	for _, c := range []struct {
		perPrompt int
		cached    []int // -1: not told
		want      string
	}{
		{3, []int{32, 0, 32}, `{"cached_tokens":0}`},
		{3, []int{16, 48, 32}, `{"cached_tokens":16}`},
		{1, []int{32, 0, 16}, `{"cached_tokens":48}`},
		{2, []int{32, 16, 5, 7}, `{"cached_tokens":21}`},
		{2, []int{-1, 16, 7, -1}, `{"cached_tokens":7}`},
		{2, []int{-1, -1, -1, -1}, `null`},
	} {
		m := NewMerge("R", len(c.cached), c.perPrompt, false)
		for i, n := range c.cached {
			details := "null"
			if n >= 0 {
				details = fmt.Sprintf(`{"cached_tokens":%d}`, n)
			}
			body := fmt.Sprintf(`{"choices":[{"index":0}],"usage":{"prompt_tokens":50,"completion_tokens":2,"total_tokens":52,"prompt_tokens_details":%s}}`, details)
			if err := m.Whole(i, []byte(body)); err != nil {
				t.Fatal(err)
			}
		}
		prompts := len(c.cached) / c.perPrompt
		want := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":%s}`,
			50*prompts, 2*len(c.cached), 50*prompts+2*len(c.cached), c.want)
		if got, err := m.Body(); err != nil || !strings.Contains(string(got), want) {
			t.Errorf("%+v: %s, %v, want %s", c, got, err, want)
		}
	}
}

func TestMergeWhole(t *testing.T) {
	m := NewMerge("R", 3, 3, false)
	for i, s := range []string{
		`{ "id":"chatcmpl-R.0", "created":7, "choices":[ {"index":0,"message":{"content":"a"},"x":1.0} ], "usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6,"completion_tokens_details":{"reasoning_tokens":1},"prompt_tokens_details":null}, "kv_transfer_params":null }`,
		`{"id":"chatcmpl-R.1.2","created":8,"choices":[{"message":{"content":"b"},"index":0}],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"completion_tokens_details":{"reasoning_tokens":3}}}`,
		`{"id":"other","created":8,"choices":[{"index":0}],"usage":{"prompt_tokens":5,"completion_tokens":4,"total_tokens":9,"completion_tokens_details":null}}`,
	} {
		if err := m.Whole(i, []byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := m.Body()
	const want = `{ "id":"chatcmpl-R", "created":7, "choices":[{"index":0,"message":{"content":"a"},"x":1.0},{"message":{"content":"b"},"index":1},{"index":2}], ` +
		`"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12,"completion_tokens_details":{"reasoning_tokens":4},"prompt_tokens_details":null}, "kv_transfer_params":null }`
	if d := cmp.Diff(want, string(got)); err != nil || d != "" {
		t.Error(err, d)
	}
	if _, err := NewMerge("R", 2, 1, false).Body(); err == nil {
		t.Error("an answer of nothing")
	}
}

// FuzzMerge: no stream of a part can make more of the client's stream than whole events of that part.
func FuzzMerge(f *testing.F) {
	f.Add([]byte("data: {\"id\":\"R.1\",\"choices\":[{\"index\":0}]}\n\ndata: [DONE]\n\n"))
	f.Add([]byte("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n"))
	f.Add([]byte(": x\r\n\r\ndata: {\"error\":{}}\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := NewMerge("R", 2, 1, true)
		out, err := m.Events(1, b)
		if err != nil {
			return
		}
		var r openai.EventReader
		if err := r.Feed(append(out, m.End()...), func(ev openai.Event) error {
			if ev.Data == nil || string(ev.Data) == openai.Done {
				return nil
			}
			o, err := openai.ParseObject(ev.Data)
			if err != nil {
				t.Fatalf("%v in %q", err, ev.Data)
			}
			choices, ok := openai.Elements(o.Raw("choices"), MaxAnswers)
			if !ok {
				t.Fatalf("no choices: %q", ev.Data)
			}
			for _, c := range choices {
				if c, err := openai.ParseObject(c); err != nil || string(c.Raw("index")) != "1" {
					t.Fatalf("%v: %q", err, ev.Data)
				}
			}
			return nil
		}); err != nil || len(r.Pending()) > 0 {
			t.Fatalf("%v, pending %q", err, r.Pending())
		}
	})
}

func TestSetCached(t *testing.T) {
	for in, want := range map[string]string{
		`{"usage":{"prompt_tokens_details":{"cached_tokens":9}}}`:          `{"usage":{"prompt_tokens_details":{"cached_tokens":3}}}`,
		`{"usage":{"prompt_tokens_details":null},"x":"\"cached_tokens\""}`: "",
		`{"cached_tokens":9}`: "",
		`{"usage":null}`:      "",
		`not "cached_tokens"`: "",
		`{"usage":{ "prompt_tokens_details" : {"a":1e2, "cached_tokens" : -1 } ,"b":9007199254740993}}`: `{"usage":{ "prompt_tokens_details" : {"a":1e2, "cached_tokens" : 3 } ,"b":9007199254740993}}`,
	} {
		if want == "" {
			want = in
		}
		if got := string(SetCached([]byte(in), 3)); got != want {
			t.Errorf("%s: got %s", in, got)
		}
	}
}
