package model

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/kv"
)

const (
	tokenizerFile       = "tokenizer.json"
	tokenizerConfigFile = "tokenizer_config.json"
)

func badTokenizer(where, format string, args ...any) error {
	return &FormatError{File: tokenizerFile, Where: where, Reason: fmt.Sprintf(format, args...)}
}

// addedToken is a token outside the byte-pair vocabulary.
type addedToken struct {
	ID         kv.Token `json:"id"`
	Content    string   `json:"content"`
	SingleWord bool     `json:"single_word"`
	LStrip     bool     `json:"lstrip"`
	RStrip     bool     `json:"rstrip"`
	Normalized bool     `json:"normalized"`
	Special    bool     `json:"special"`
}

// parseTokenizer reads a tokenizer.json of the byte-level kind without merges. Anything that would
// turn text into other tokens than one per byte is an UnsupportedError.
func parseTokenizer(data []byte) (*Tokenizer, error) {
	f := parseFields(tokenizerFile, "", data)
	f.only("normalizer")
	if f.has("post_processor") && !addsNothing(f.members["post_processor"], true) {
		f.unsupported("post_processor", "null or one that adds no tokens to a text")
	}
	f.only("truncation")
	f.only("padding")
	pre := f.object("pre_tokenizer")
	pre.only("type", `"ByteLevel"`)
	pre.only("add_prefix_space", "false")
	if pre.err == nil && (!pre.has("type") || !pre.has("add_prefix_space")) {
		pre.fail("type", "and add_prefix_space must be given")
	}
	m := f.object("model")
	m.only("type", `"BPE"`)
	m.only("merges", "[]")
	m.only("byte_fallback", "false")
	for _, name := range []string{"dropout", "unk_token"} {
		m.only(name)
	}
	for _, name := range []string{"continuing_subword_prefix", "end_of_word_suffix"} {
		m.only(name, `""`)
	}
	var vocab map[string]kv.Token
	m.need("vocab", &vocab)
	var added []addedToken
	f.read("added_tokens", &added)
	for _, err := range []error{f.err, pre.err, m.err} {
		if err != nil {
			return nil, err
		}
	}
	t, err := newTokenizer(vocab, added)
	if err != nil {
		return nil, err
	}
	if t.replace, err = parseDecoder(f); err != nil {
		return nil, err
	}
	for i, entry := range t.entries {
		if !t.special[i] {
			t.pieces[i] = t.decoded(entry)
		}
	}
	return t, nil
}

// addsNothing tells a post-processor that leaves the tokens of a single text as they are: the offsets of a
// byte-level one, and the template without specials that stock libraries write for a tokenizer
// that had none. A sequence of such is one, too, but not a sequence of sequences.
func addsNothing(raw json.RawMessage, sequence bool) bool {
	var p struct {
		Type       string                       `json:"type"`
		Single     []map[string]json.RawMessage `json:"single"`
		Processors []json.RawMessage            `json:"processors"`
	}
	if json.Unmarshal(raw, &p) != nil {
		return false
	}
	switch p.Type {
	case "ByteLevel":
		return true
	case "TemplateProcessing":
		if len(p.Single) != 1 || len(p.Single[0]) != 1 {
			return false
		}
		var text struct {
			ID string `json:"id"`
		}
		return json.Unmarshal(p.Single[0]["Sequence"], &text) == nil && text.ID == "A"
	case "Sequence":
		return sequence && !slices.ContainsFunc(p.Processors, func(one json.RawMessage) bool { return !addsNothing(one, false) })
	}
	return false
}

// newTokenizer places the entries; pieces are left to the caller.
func newTokenizer(vocab map[string]kv.Token, added []addedToken) (*Tokenizer, error) {
	size := 0
	for entry, id := range vocab {
		if id < 0 || id >= MaxVocab {
			return nil, badTokenizer("model.vocab", "token id %d of %q is not in 0 to %d", id, short(entry), MaxVocab-1)
		}
		size = max(size, int(id)+1)
	}
	for _, a := range added {
		if a.ID < 0 || a.ID >= MaxVocab {
			return nil, badTokenizer("added_tokens", "token id %d is not in 0 to %d", a.ID, MaxVocab-1)
		}
		if !a.Special {
			return nil, &UnsupportedError{File: tokenizerFile, Field: "added_tokens", Value: fmt.Sprintf("%q, not special", short(a.Content)), Need: "special tokens"}
		}
		size = max(size, int(a.ID)+1)
	}
	t := &Tokenizer{entries: make([]string, size), pieces: make([]string, size), special: make([]bool, size)}
	taken := make([]bool, size)
	for entry, id := range vocab {
		if taken[id] || entry == "" {
			return nil, badTokenizer("model.vocab", "token %d is empty or given twice", id)
		}
		taken[id], t.entries[id] = true, entry
	}
	for _, a := range added {
		// A special may also be listed in the vocabulary, under the same name.
		if a.Content == "" || t.special[a.ID] || taken[a.ID] && t.entries[a.ID] != a.Content {
			return nil, badTokenizer("added_tokens", "token %d is empty or given twice", a.ID)
		}
		taken[a.ID], t.special[a.ID], t.entries[a.ID] = true, true, a.Content
	}
	for b, r := range spelling {
		id, ok := vocab[string(r)]
		if !ok || t.special[id] {
			return nil, badTokenizer("model.vocab", "has no token for byte %#02x, spelt %q", b, r)
		}
		t.encode[b] = id
	}
	return t, nil
}

// parseDecoder returns nil for a decoder that turns spelt bytes back, and the replacements of one
// that works on characters.
func parseDecoder(f *fields) ([]replacement, error) {
	d := f.object("decoder")
	var kind string
	d.need("type", &kind)
	if d.err != nil {
		return nil, d.err
	}
	const need = `ByteLevel, or a Sequence of Replace with strings and a final Fuse`
	if kind == "ByteLevel" {
		return nil, nil
	}
	d.only("type", `"Sequence"`)
	var steps []struct {
		Type    string                     `json:"type"`
		Pattern map[string]json.RawMessage `json:"pattern"`
		Content string                     `json:"content"`
	}
	d.need("decoders", &steps)
	if d.err != nil {
		return nil, d.err
	}
	out := []replacement{}
	for i, s := range steps {
		var from string
		raw, plain := s.Pattern["String"]
		switch {
		case s.Type == "Fuse" && i == len(steps)-1:
			return out, nil
		case s.Type == "Replace" && plain && len(s.Pattern) == 1 && json.Unmarshal(raw, &from) == nil && from != "":
			out = append(out, replacement{from: from, to: s.Content})
		default:
			d.unsupported("decoders", need)
			return nil, d.err
		}
	}
	d.unsupported("decoders", need)
	return nil, d.err
}

// decoded is what a vocabulary entry stands for in output.
func (t *Tokenizer) decoded(entry string) string {
	if t.replace != nil {
		for _, r := range t.replace {
			entry = strings.ReplaceAll(entry, r.from, r.to)
		}
		return entry
	}
	out := make([]byte, 0, len(entry))
	for _, r := range entry {
		b, ok := spelt[r]
		if !ok {
			return entry // not spelt in bytes: stock decoders pass it through as it is
		}
		out = append(out, b)
	}
	return string(out)
}

// formatTokenizer is the inverse of parseTokenizer.
func formatTokenizer(t *Tokenizer) ([]byte, error) {
	vocab := map[string]kv.Token{}
	added := []addedToken{}
	for i, entry := range t.entries {
		switch {
		case t.special[i]:
			added = append(added, addedToken{ID: kv.Token(i), Content: entry, Special: true})
		case entry != "":
			vocab[entry] = kv.Token(i)
		}
	}
	decoder := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
	if t.replace != nil {
		steps := []any{}
		for _, r := range t.replace {
			steps = append(steps, map[string]any{"type": "Replace", "pattern": map[string]string{"String": r.from}, "content": r.to})
		}
		decoder = map[string]any{"type": "Sequence", "decoders": append(steps, map[string]string{"type": "Fuse"})}
	}
	return indented(map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil, "post_processor": nil,
		"added_tokens":  added,
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
		"decoder":       decoder,
		"model": map[string]any{
			"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil,
			"end_of_word_suffix": nil, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
			"vocab": vocab, "merges": []string{},
		},
	})
}

// formatTokenizerConfig is what stock engines read besides tokenizer.json.
func formatTokenizerConfig(m *Model) ([]byte, error) {
	out := map[string]any{
		"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": m.cfg.MaxPosition,
		"clean_up_tokenization_spaces": false, "chat_template": ChatTemplate,
	}
	name := func(key string, t kv.Token) {
		if m.tok.Special(t) {
			out[key] = m.tok.entries[t]
		}
	}
	name("bos_token", m.cfg.BOS)
	if len(m.cfg.EOS) > 0 {
		name("eos_token", m.cfg.EOS[0])
	}
	return indented(out)
}
