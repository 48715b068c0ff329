package model

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvferry/kvferry/kv"
	"pgregory.net/rapid"
)

func TestBytesAreTokens(t *testing.T) {
	tok := Tiny().Tokenizer()
	in := "Grüße, 世界 🚢\n<|eos|>"
	tokens := tok.Encode(in)
	if len(tokens) != len(in) {
		t.Fatalf("%d tokens of %d bytes", len(tokens), len(in))
	}
	for i, x := range tokens {
		if x != kv.Token(in[i]) {
			t.Fatalf("byte %#02x is token %d", in[i], x)
		}
	}
	if got := tok.Decode(tokens); got != in {
		t.Errorf("comes back as %q", got)
	}
	if got := tok.Decode([]kv.Token{tinyBOS, 'a', tinyEOS, -1, 1 << 20, 'b', tinyPad}); got != "ab" {
		t.Errorf("specials and unknown ids give %q", got)
	}
	if !tok.Special(tinyEOS) || tok.Special('a') || tok.Special(-1) || tok.Special(1<<20) {
		t.Error("Special is wrong")
	}
}

// The table of Unicode 3.9 for broken text, one replacement per maximal subpart.
func TestBrokenText(t *testing.T) {
	tok := Tiny().Tokenizer()
	for in, want := range map[string]string{
		"a\xf1\x80\x80\xe1\x80\xc2b\x80c\x80\xbfd": "a\ufffd\ufffd\ufffdb\ufffdc\ufffd\ufffdd",
		"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82A":        "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffdA",
		"\xed\xa0\x80\xff":                         "\ufffd\ufffd\ufffd\ufffd",
		"\xf4\x91\x92\x93":                         "\ufffd\ufffd\ufffd\ufffd",
		"\xe2\x82":                                 "\ufffd",
		"\xf0\x9f\x9a":                             "\ufffd",
		"\ufffd":                                   "\ufffd",
	} {
		if got := tok.Decode(tok.Encode(in)); got != want {
			t.Errorf("%q gives %q, want %q", in, got, want)
		}
	}
}

// What a decoder gives out is never taken back: pieces are whole characters and join to the same
// text, whatever the bytes.
func TestStreamedText(t *testing.T) {
	tok := Tiny().Tokenizer()
	rapid.Check(t, func(t *rapid.T) {
		in := string(rapid.SliceOfN(rapid.SampledFrom([]byte("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x9a\xa2\xff\xed")), 0, 40).Draw(t, "bytes"))
		d := tok.NewDecoder()
		var b strings.Builder
		for _, x := range tok.Encode(in) {
			s := d.Next(x)
			if !utf8.ValidString(s) {
				t.Fatalf("%q is cut in a character", s)
			}
			if len(d.pending) > 3 {
				t.Fatalf("%d bytes are held back", len(d.pending))
			}
			b.WriteString(s)
		}
		b.WriteString(d.Flush())
		if utf8.ValidString(in) && b.String() != in {
			t.Fatalf("%q streams as %q", in, b.String())
		}
		if d.Flush() != "" {
			t.Fatal("Flush gives text twice")
		}
		// Independent of the package: valid stretches come through, in order.
		plain := strings.ReplaceAll(b.String(), "\ufffd", "")
		if want := strings.ToValidUTF8(in, ""); plain != want {
			t.Fatalf("%q: valid text is %q, want %q", in, plain, want)
		}
	})
}

func TestCharacterDecoder(t *testing.T) {
	vocab := map[string]kv.Token{}
	for b, r := range spelling {
		vocab[string(r)] = kv.Token(b)
	}
	vocab["一"] = 300
	tok, err := newTokenizer(vocab, nil)
	if err != nil {
		t.Fatal(err)
	}
	tok.replace = []replacement{{"Ġ", " "}}
	for i, e := range tok.entries {
		tok.pieces[i] = tok.decoded(e)
	}
	if got := tok.Decode([]kv.Token{'a', ' ', 0xe9, 0x80, 299, 300}); got != "a éĢ一" {
		t.Errorf("decodes to %q", got)
	}
}

func TestChatPrompt(t *testing.T) {
	got := ChatPrompt([]Message{{"system", "Be brief."}, {"user", "Hi"}})
	if want := "system: Be brief.\nuser: Hi\nassistant: "; got != want {
		t.Errorf("%q", got)
	}
}
