package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestObjectKeepsEveryOtherByte(t *testing.T) {
	const in = " {\n \"big\" : 9007199254740993123 ,\t\"a\\u0062c\":\"\\u00e9\\/\",\"n\": 1.0e+02\n, \"model\" :\"m\" } \n"
	for _, c := range []struct {
		name string
		edit func(*Object)
		want string
	}{
		{"nothing", func(*Object) {}, in},
		{"set in place", func(o *Object) { o.Set("n", []byte("1")) }, strings.Replace(in, "1.0e+02", "1", 1)},
		{"set an escaped name", func(o *Object) { o.Set("abc", []byte("0")) }, strings.Replace(in, `"\u00e9\/"`, "0", 1)},
		{"add", func(o *Object) { o.Set("x\"", []byte("{}")) }, strings.Replace(in, "} \n", ",\"x\\\"\":{}} \n", 1)},
		{"delete the first", func(o *Object) { o.Delete("big") }, strings.Replace(in, "\n \"big\" : 9007199254740993123 ,", "", 1)},
		{"delete the last", func(o *Object) { o.Delete("model") }, strings.Replace(in, ", \"model\" :\"m\" }", "}", 1)},
	} {
		o, err := ParseObject([]byte(in))
		if err != nil {
			t.Fatal(err)
		}
		c.edit(o)
		if got := string(o.Bytes()); got != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.name, got, c.want)
		}
	}
}

func TestObjectDuplicates(t *testing.T) {
	o, err := ParseObject([]byte(`{"a":1,"b":2,"\u0061":3}`))
	if err != nil {
		t.Fatal(err)
	}
	if got := string(o.Raw("a")); got != "3" {
		t.Errorf("the last of several counts, got %s", got)
	}
	c := o.Clone()
	c.Set("a", []byte("4"))
	if got, want := string(c.Bytes()), `{"b":2,"\u0061":4}`; got != want {
		t.Errorf("Set: got %s, want %s", got, want)
	}
	if !c.Delete("a") || c.Delete("a") {
		t.Error("Delete must report what was there")
	}
	if got, want := string(o.Bytes()), `{"a":1,"b":2,"\u0061":3}`; got != want {
		t.Errorf("the original of a clone changed to %s", got)
	}
}

func TestObjectErrors(t *testing.T) {
	for in, want := range map[string]string{
		"":                                 "the body is empty at byte 0",
		"  ":                               "the body is empty at byte 2",
		"[1]":                              "the body must be a JSON object at byte 0",
		"{":                                "unexpected end of JSON at byte 1",
		`{"a":1}x`:                         "there is more text after the JSON object at byte 7",
		`{"a" 1}`:                          "a colon is missing after a field name at byte 5",
		`{"a":1,}`:                         "a field name in quotes is missing at byte 7",
		`{"a":[1 2]}`:                      "a comma or ] is missing after a list element at byte 8",
		`{"a":01}`:                         "a comma or } is missing after a field at byte 6",
		`{"a":-}`:                          "a digit is missing in a number at byte 6",
		`{"a":1.}`:                         "a digit is missing in a number at byte 7",
		`{"a":1e}`:                         "a digit is missing in a number at byte 7",
		`{"a":NaN}`:                        "a JSON value should begin here, but does not at byte 5",
		`{"a":nul}`:                        "invalid literal, expected null at byte 8",
		"{\"a\":\"\n\"}":                   "a control character in a string must be escaped at byte 6",
		`{"a":"\x"}`:                       "unknown escape in a string at byte 7",
		`{"a":"\u12g4"}`:                   "\\u needs four hexadecimal digits at byte 10",
		"{\"a\":\"\xff\"}":                 "the body is not valid UTF-8 at byte 6",
		`{"a":` + strings.Repeat("[", 200): "JSON nests deeper than 128 at byte 132",
	} {
		_, err := ParseObject([]byte(in))
		var syntax *SyntaxError
		if !errors.As(err, &syntax) || err.Error() != want {
			t.Errorf("%q: got %v, want %s", in, err, want)
		}
	}
	many := "{" + strings.Repeat(`"a":1,`, MaxFields) + `"a":1}`
	if _, err := ParseObject([]byte(many)); err == nil {
		t.Error("too many fields were accepted")
	}
}

// anyJSON draws JSON text with white space, escapes, long numbers and duplicates.
func anyJSON(depth int) *rapid.Generator[string] {
	space := rapid.SampledFrom([]string{"", "", " ", "\n\t", "\r "})
	leaf := rapid.SampledFrom([]string{
		"null", "true", "false", "0", "-0", "12345678901234567890123", "1e400", "-1.50E-3", `""`, `"a"`,
		`"\ud83d\ude00"`, `"\u0000\\\""`, `"é😀"`, `"\/"`, "[]", "{}", "[ ]", "{\n}",
	})
	if depth == 0 {
		return leaf
	}
	return rapid.Custom(func(t *rapid.T) string {
		sep := func(s string) string { return space.Draw(t, "s") + s + space.Draw(t, "s") }
		switch rapid.IntRange(0, 2).Draw(t, "kind") {
		case 0:
			items := rapid.SliceOfN(anyJSON(depth-1), 0, 4).Draw(t, "items")
			for i := range items {
				items[i] = sep(items[i])
			}
			return "[" + strings.Join(items, ",") + "]"
		case 1:
			return anyObject(depth).Draw(t, "object")
		}
		return leaf.Draw(t, "leaf")
	})
}

var names = []string{"a", "b", "max_tokens", "A", "é", "", "x y"}

func anyObject(depth int) *rapid.Generator[string] {
	space := rapid.SampledFrom([]string{"", "", " ", "\n\t"})
	return rapid.Custom(func(t *rapid.T) string {
		n := rapid.IntRange(0, 6).Draw(t, "n")
		fields := make([]string, n)
		for i := range fields {
			key, _ := json.Marshal(rapid.SampledFrom(names).Draw(t, "key"))
			if rapid.Bool().Draw(t, "escaped") {
				key = bytes.Replace(key, []byte("a"), []byte(`\u0061`), 1)
			}
			s := func() string { return space.Draw(t, "s") }
			fields[i] = s() + string(key) + s() + ":" + s() + anyJSON(depth-1).Draw(t, "value") + s()
		}
		return "{" + strings.Join(fields, ",") + "}"
	})
}

// TestObjectEditsAgreeWithEncodingJSON compares every edit with one on a map.
func TestObjectEditsAgreeWithEncodingJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.SampledFrom([]string{"", " ", "\n"}).Draw(t, "before") + anyObject(3).Draw(t, "in")
		o, err := ParseObject([]byte(in))
		if err != nil {
			t.Fatalf("%q: %v", in, err)
		}
		if got := string(o.Bytes()); got != in {
			t.Fatalf("unedited: got %q, want %q", got, in)
		}
		model := map[string]json.RawMessage{}
		if err := json.Unmarshal([]byte(in), &model); err != nil {
			t.Fatal(err)
		}
		for range rapid.IntRange(0, 5).Draw(t, "edits") {
			name := rapid.SampledFrom(names).Draw(t, "name")
			_, has := model[name]
			if got := o.Raw(name); (got != nil) != has || string(got) != string(model[name]) {
				t.Fatalf("Raw(%q) = %q, want %q", name, got, model[name])
			}
			if rapid.Bool().Draw(t, "delete") {
				if o.Delete(name) != has {
					t.Fatalf("Delete(%q) does not tell whether the field was there", name)
				}
				delete(model, name)
			} else {
				value := anyJSON(1).Draw(t, "value")
				o.Set(name, []byte(value))
				model[name] = json.RawMessage(value)
			}
		}
		got := map[string]json.RawMessage{}
		out := o.Bytes()
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("%q: %v", out, err)
		}
		if d := cmp.Diff(model, got); d != "" {
			t.Fatalf("%q:\n%s", out, d)
		}
	})
}

func depthOf(b []byte) (deepest int) {
	depth, quoted := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			depth++
			deepest = max(deepest, depth)
		case c == '}' || c == ']':
			depth--
		}
	}
	return deepest
}

func FuzzParseObject(f *testing.F) {
	for _, s := range []string{"{}", `{"a":1}`, ` { "a" : [ 1 , {"b":"\u00e9"} ] , "a" : -0.1e+5 } `, `{"a":tru}`, "{\"\xff\":1}", `{"a":"\ud800"}`} {
		f.Add([]byte(s), "a")
	}
	f.Fuzz(func(t *testing.T, in []byte, name string) {
		o, err := ParseObject(in)
		trimmed := bytes.TrimLeft(in, " \t\r\n")
		want := json.Valid(in) && utf8.Valid(in) && trimmed[0] == '{' && depthOf(in) <= MaxDepth
		if err != nil {
			if want && !strings.Contains(err.Error(), "too many fields") {
				t.Fatalf("%q: refused with %v", in, err)
			}
			return
		}
		if !want {
			t.Fatalf("%q: accepted", in)
		}
		if !bytes.Equal(o.Bytes(), in) {
			t.Fatalf("%q became %q", in, o.Bytes())
		}
		if !utf8.ValidString(name) {
			return
		}
		o.Set(name, []byte("17"))
		got := map[string]json.RawMessage{}
		if err := json.Unmarshal(o.Bytes(), &got); err != nil || string(got[name]) != "17" {
			t.Fatalf("%q after Set(%q): %v, %s", in, name, err, o.Bytes())
		}
		o.Delete(name)
		if o.Raw(name) != nil || !json.Valid(o.Bytes()) {
			t.Fatalf("%q after Delete(%q): %s", in, name, o.Bytes())
		}
	})
}
