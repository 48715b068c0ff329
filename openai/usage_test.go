package openai

import "testing"

func TestAddUsage(t *testing.T) {
	for _, c := range []struct {
		dst, src string
		prompt   bool
		want     string
	}{
		{`{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}`, `{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}`, false,
			`{"prompt_tokens":5,"total_tokens":10,"completion_tokens":5}`},
		{`{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}`, `{"prompt_tokens":6,"total_tokens":9,"completion_tokens":3}`, true,
			`{"prompt_tokens":11,"total_tokens":16,"completion_tokens":5}`},
		{`{"prompt_tokens":1,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}`, `{"prompt_tokens":1,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":3,"audio_tokens":2}}`, true,
			`{"prompt_tokens":2,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":7,"audio_tokens":2}}`},
		{`{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}`, `{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":3}}`, false,
			`{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}`},
		{`{"completion_tokens_details":null}`, `{"completion_tokens_details":{"reasoning_tokens":3},"x":"y","z":[1],"f":1.5}`, false,
			`{"completion_tokens_details":{"reasoning_tokens":3}}`},
		{`{"new":"text"}`, `{"new":3,"other":4}`, false, `{"new":"text","other":4}`},
	} {
		dst, err := ParseObject([]byte(c.dst))
		if err != nil {
			t.Fatal(err)
		}
		src, err := ParseObject([]byte(c.src))
		if err != nil {
			t.Fatal(err)
		}
		AddUsage(dst, src, c.prompt)
		if got := string(dst.Bytes()); got != c.want {
			t.Errorf("%s + %s = %s, want %s", c.dst, c.src, got, c.want)
		}
		if got := string(src.Bytes()); got != c.src {
			t.Errorf("the other became %s", got)
		}
	}
}

func TestElements(t *testing.T) {
	for in, want := range map[string]string{`[ 1 , "a,]" ,[2]]`: `[1,"a,]",[2]]`, `[]`: `[]`} {
		items, ok := Elements([]byte(in), 3)
		if got := string(JoinElements(items)); !ok || got != want {
			t.Errorf("%s: %s, %v", in, got, ok)
		}
	}
	for _, in := range []string{`{}`, ``, `[1,2,3,4]`} {
		if _, ok := Elements([]byte(in), 3); ok {
			t.Errorf("%q was taken", in)
		}
	}
}
