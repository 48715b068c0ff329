package model

import (
	"strings"
	"unicode/utf8"

	"github.com/kvferry/kvferry/kv"
)

// Tokenizer is a byte-level vocabulary without merges: every input byte is one token. It is
// immutable.
//
// What a token decodes to is a property of the vocabulary: of kvferry-tiny, the byte itself (so a
// character may take several tokens); of the tiny models for stock peers, one character of its own
// for every token.
type Tokenizer struct {
	encode  [256]kv.Token
	pieces  []string // what a token decodes to; "" for specials and gaps
	entries []string // the token's key in the vocabulary; "" for gaps
	special []bool
	replace []replacement // how pieces differ from entries; nil: entries are spelt bytes
}

// replacement is one step of a decoder that works on characters.
type replacement struct{ from, to string }

// spelling is the printable character that stands for a byte in a byte-level vocabulary: itself if
// it is printable Latin-1 other than space and soft hyphen, else the next one from U+0100 on.
var spelling, spelt = func() (table [256]rune, back map[rune]byte) {
	back = make(map[rune]byte, 256)
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if !(r >= '!' && r <= '~' || r >= 0xA1 && r <= 0xFF && r != 0xAD) {
			r = next
			next++
		}
		table[b], back[r] = r, byte(b)
	}
	return table, back
}()

// newByteTokenizer makes a vocabulary of the 256 bytes, token b for byte b, and the named specials
// behind them.
func newByteTokenizer(specials ...string) *Tokenizer {
	t := &Tokenizer{}
	for b := range 256 {
		t.encode[b] = kv.Token(b)
		t.entries = append(t.entries, string(spelling[b]))
		t.pieces = append(t.pieces, string([]byte{byte(b)}))
	}
	t.entries = append(t.entries, specials...)
	t.pieces = append(t.pieces, make([]string, len(specials))...)
	t.special = make([]bool, len(t.entries))
	for i := range specials {
		t.special[256+i] = true
	}
	return t
}

// Vocab is one more than the highest token.
func (t *Tokenizer) Vocab() int { return len(t.pieces) }

// Encode gives one token per byte. It adds no BOS, and the name of a special token in the text is
// ordinary text: a client cannot end a prompt or forge a role with it.
func (t *Tokenizer) Encode(text string) []kv.Token {
	out := make([]kv.Token, len(text))
	for i := range len(text) {
		out[i] = t.encode[text[i]]
	}
	return out
}

// Decode is the text of tokens, with U+FFFD for what is not UTF-8.
func (t *Tokenizer) Decode(tokens []kv.Token) string {
	d := t.NewDecoder()
	var b strings.Builder
	for _, x := range tokens {
		b.WriteString(d.Next(x))
	}
	b.WriteString(d.Flush())
	return b.String()
}

// Special reports whether a token has a role instead of text.
func (t *Tokenizer) Special(x kv.Token) bool {
	return x >= 0 && int(x) < len(t.special) && t.special[x]
}

// Decoder turns tokens into text as they come. It holds back bytes that may be the start of a
// character, at most three. It belongs to one goroutine.
type Decoder struct {
	tok     *Tokenizer
	pending []byte
}

// NewDecoder starts a text.
func (t *Tokenizer) NewDecoder() *Decoder { return &Decoder{tok: t} }

// Next is the text that became certain with token x, possibly none. Tokens without text, specials
// and ids outside the vocabulary, add nothing.
func (d *Decoder) Next(x kv.Token) string {
	if x < 0 || int(x) >= len(d.tok.pieces) {
		return ""
	}
	d.pending = append(d.pending, d.tok.pieces[x]...)
	var b strings.Builder
	for len(d.pending) > 0 && utf8.FullRune(d.pending) {
		n := writeRune(&b, d.pending)
		d.pending = append(d.pending[:0], d.pending[n:]...)
	}
	return b.String()
}

// Flush is the text of what is held back, at the end of a generation.
func (d *Decoder) Flush() string {
	if len(d.pending) == 0 {
		return ""
	}
	d.pending = d.pending[:0]
	return string(utf8.RuneError)
}

// writeRune writes the first character of p, which is complete or invalid, and returns its length.
// The longest piece that could have begun a character becomes a single U+FFFD (Unicode 3.9,
// "substitution of maximal subparts"), as stock decoders do.
func writeRune(b *strings.Builder, p []byte) int {
	r, n := utf8.DecodeRune(p)
	b.WriteRune(r)
	if r == utf8.RuneError && n == 1 {
		for n < len(p) && !utf8.FullRune(p[:n+1]) {
			n++
		}
	}
	return n
}
