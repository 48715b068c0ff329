package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
)

func weightBits(m *Model) map[string][]float32 {
	out := map[string][]float32{}
	for _, t := range m.weights.tensors(m.cfg) {
		out[t.name] = *t.data
	}
	return out
}

func TestSaveAndLoad(t *testing.T) {
	for name, m := range map[string]*Model{"tiny": Tiny(), "small": small(t, false), "tied": small(t, true)} {
		for _, as := range []WeightType{F32, BF16} {
			dir := filepath.Join(t.TempDir(), m.cfg.Name)
			if err := m.Save(dir, as); err != nil {
				t.Fatal(err)
			}
			got, err := Load(dir)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(m.cfg, got.cfg); d != "" {
				t.Errorf("%s: config: %s", name, d)
			}
			want := weightBits(m)
			if name != "tiny" && as == BF16 {
				for n, w := range want {
					want[n] = append([]float32(nil), w...)
					for i, v := range w {
						want[n][i] = fromBF16(toBF16(v))
					}
				}
			}
			for n, w := range weightBits(got) {
				if !sameBits(w, want[n]) {
					t.Errorf("%s as %s: %s differs", name, as, n)
				}
			}
			if d := cmp.Diff(m.tok, got.tok, cmp.AllowUnexported(Tokenizer{}, replacement{})); d != "" {
				t.Errorf("%s: tokenizer: %s", name, d)
			}
			left, err := filepath.Glob(filepath.Join(dir, "*.part"))
			if err != nil || len(left) > 0 {
				t.Errorf("%s: left behind: %v %v", name, left, err)
			}
		}
	}
	if err := Tiny().Save(t.TempDir(), "F64"); err == nil {
		t.Error("unknown weight type accepted")
	}
}

// edit loads a saved checkpoint after a change to one of its files.
func edit(t *testing.T, file string, change func(old []byte) []byte) error {
	t.Helper()
	dir := t.TempDir()
	if err := small(t, false).Save(dir, F32); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, file)
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(old), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = Load(dir)
	return err
}

// editJSON sets members of the object at path; a nil value removes.
func editJSON(t *testing.T, file, path string, set map[string]any) error {
	t.Helper()
	return edit(t, file, func(old []byte) []byte {
		var doc map[string]any
		if err := json.Unmarshal(old, &doc); err != nil {
			t.Fatal(err)
		}
		at := doc
		if path != "" {
			at = doc[path].(map[string]any)
		}
		for k, v := range set {
			if v == nil {
				delete(at, k)
			} else {
				at[k] = v
			}
		}
		out, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		return out
	})
}

func TestConfigsThatAreRefused(t *testing.T) {
	type object = map[string]any
	for name, c := range map[string]struct {
		set         object
		unsupported bool
		message     string
	}{
		"other family":   {object{"architectures": []string{"MistralForCausalLM"}}, true, "LlamaForCausalLM"},
		"no family":      {object{"architectures": nil}, false, "architectures: is missing"},
		"type":           {object{"model_type": "gemma3_text"}, true, "model_type"},
		"long rope":      {object{"rope_scaling": object{"rope_type": "llama3", "factor": 8}}, true, "rope_scaling.rope_type"},
		"old rope":       {object{"rope_scaling": object{"type": "linear", "factor": 2}}, true, "rope_scaling.type"},
		"new rope":       {object{"rope_parameters": object{"rope_type": "yarn"}}, true, "rope_parameters.rope_type"},
		"rope is text":   {object{"rope_scaling": "x"}, false, "rope_scaling."},
		"bias":           {object{"attention_bias": true}, true, "attention_bias is true"},
		"ffn bias":       {object{"mlp_bias": true}, true, "mlp_bias"},
		"quantised":      {object{"quantization_config": object{"quant_method": "fp8"}}, true, "quantization_config"},
		"window":         {object{"sliding_window": 128}, true, "sliding_window"},
		"activation":     {object{"hidden_act": "gelu"}, true, "hidden_act"},
		"part rotary":    {object{"partial_rotary_factor": 0.5}, true, "partial_rotary_factor"},
		"no size":        {object{"hidden_size": nil}, false, "hidden_size: is missing"},
		"text size":      {object{"hidden_size": "22"}, false, "hidden_size: cannot be read"},
		"half size":      {object{"hidden_size": 22.5}, false, "hidden_size: cannot be read"},
		"huge":           {object{"vocab_size": 1 << 40}, false, "vocabulary"},
		"negative":       {object{"num_hidden_layers": -1}, false, "layer count"},
		"uneven heads":   {object{"num_key_value_heads": 4}, false, "evenly"},
		"odd head":       {object{"head_dim": 15}, false, "odd"},
		"eos outside":    {object{"eos_token_id": []int{1, 300}}, false, "EOS token 300"},
		"bos outside":    {object{"bos_token_id": 300}, false, "BOS token 300"},
		"eos text":       {object{"eos_token_id": "x"}, false, "eos_token_id"},
		"theta":          {object{"rope_theta": 0}, false, "theta"},
		"epsilon":        {object{"rms_norm_eps": 0}, false, "epsilon"},
		"too many":       {object{"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 256}, false, "weights"},
		"small vocab":    {object{"vocab_size": 258}, false, "shape"},
		"other weights":  {object{"intermediate_size": 38}, false, "shape"},
		"too many layer": {object{"num_hidden_layers": 3}, false, "model.layers.2.input_layernorm.weight: is missing"},
		"too few layers": {object{"num_hidden_layers": 1}, true, "model.layers.1."},
	} {
		err := editJSON(t, configFile, "", c.set)
		checkRefused(t, name, err, c.unsupported, c.message)
	}
	for _, text := range []string{"", "null", "[]", "{", "{} x"} {
		checkRefused(t, text, edit(t, configFile, func([]byte) []byte { return []byte(text) }), false, "")
	}
}

func checkRefused(t *testing.T, name string, err error, unsupported bool, message string) {
	t.Helper()
	var u *UnsupportedError
	var f *FormatError
	if err == nil || !strings.Contains(err.Error(), message) {
		t.Errorf("%s: error is %v, want one with %q", name, err, message)
	} else if unsupported && !errors.As(err, &u) || !unsupported && !errors.As(err, &f) {
		t.Errorf("%s: error %v has type %T", name, err, err)
	}
}

func TestConfigsThatAreAccepted(t *testing.T) {
	type object = map[string]any
	for name, set := range map[string]object{
		"default rope":    {"rope_scaling": object{"rope_type": "default"}},
		"rope parameters": {"rope_theta": nil, "rope_parameters": object{"rope_type": "default", "rope_theta": 500}},
		"unknown fields":  {"transformers_version": "5.0", "use_cache": true, "pad_token_id": 0},
		"several ends":    {"eos_token_id": []int{256, 257}},
	} {
		if err := editJSON(t, configFile, "", set); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	c, err := parseConfig([]byte(`{"architectures":["LlamaForCausalLM"],"vocab_size":259,"hidden_size":64,"intermediate_size":8,
		"num_hidden_layers":1,"num_attention_heads":4,"max_position_embeddings":16,"eos_token_id":7,"bos_token_id":null}`))
	want := Config{Vocab: 259, Hidden: 64, FFN: 8, Layers: 1, Heads: 4, KVHeads: 4, HeadDim: 16, MaxPosition: 16,
		RopeTheta: 10000, NormEps: 1e-6, BOS: -1, EOS: []kv.Token{7}}
	if d := cmp.Diff(want, c); err != nil || d != "" {
		t.Errorf("%v %s", err, d)
	}
}

// Parts of a post-processor, and the template made of some.
var (
	special = map[string]any{"SpecialToken": map[string]any{"id": "<|bos|>", "type_id": 0}}
	textA   = map[string]any{"Sequence": map[string]any{"id": "A", "type_id": 0}}
)

func template(parts ...map[string]any) map[string]any {
	return map[string]any{"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": map[string]any{}}
}

func TestTokenizersThatAreAccepted(t *testing.T) {
	type object = map[string]any
	for name, post := range map[string]object{
		"template": template(textA),
		"offsets":  {"type": "ByteLevel", "trim_offsets": false},
		"both":     {"type": "Sequence", "processors": []object{{"type": "ByteLevel"}, template(textA)}},
	} {
		if err := editJSON(t, tokenizerFile, "", object{"post_processor": post}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTokenizersThatAreRefused(t *testing.T) {
	type object = map[string]any
	for name, c := range map[string]struct {
		path        string
		set         object
		unsupported bool
		message     string
	}{
		"merges":        {"model", object{"merges": []string{"a b"}}, true, "model.merges"},
		"unigram":       {"model", object{"type": "Unigram"}, true, "model.type"},
		"fallback":      {"model", object{"byte_fallback": true}, true, "byte_fallback"},
		"no vocab":      {"model", object{"vocab": nil}, false, "model.vocab: is missing"},
		"missing byte":  {"model", object{"vocab": object{"a": 0}}, false, "no token for byte 0x00"},
		"id twice":      {"model", object{"vocab": object{"a": 0, "b": 0}}, false, "twice"},
		"id outside":    {"model", object{"vocab": object{"a": MaxVocab}}, false, "not in 0 to"},
		"normalizer":    {"", object{"normalizer": object{"type": "NFC"}}, true, "normalizer"},
		"no template":   {"", object{"post_processor": object{"type": "TemplateProcessing"}}, true, "post_processor"},
		"bos added":     {"", object{"post_processor": template(special, textA)}, true, "post_processor"},
		"no text":       {"", object{"post_processor": template(special)}, true, "post_processor"},
		"text twice":    {"", object{"post_processor": template(textA, textA)}, true, "post_processor"},
		"second text":   {"", object{"post_processor": template(object{"Sequence": object{"id": "B"}})}, true, "post_processor"},
		"one adds":      {"", object{"post_processor": object{"type": "Sequence", "processors": []object{{"type": "ByteLevel"}, template(textA, special)}}}, true, "post_processor"},
		"nested":        {"", object{"post_processor": object{"type": "Sequence", "processors": []object{{"type": "Sequence"}}}}, true, "post_processor"},
		"other post":    {"", object{"post_processor": object{"type": "BertProcessing"}}, true, "post_processor"},
		"post is text":  {"", object{"post_processor": "x"}, true, "post_processor"},
		"no pre":        {"", object{"pre_tokenizer": nil}, false, "pre_tokenizer: is missing"},
		"space":         {"pre_tokenizer", object{"add_prefix_space": true}, true, "add_prefix_space"},
		"untold space":  {"pre_tokenizer", object{"add_prefix_space": nil}, false, "add_prefix_space"},
		"split":         {"pre_tokenizer", object{"type": "Whitespace"}, true, "pre_tokenizer.type"},
		"decoder":       {"decoder", object{"type": "Metaspace"}, true, "decoder.type"},
		"steps":         {"", object{"decoder": object{"type": "Sequence", "decoders": []object{{"type": "Strip"}}}}, true, "decoders"},
		"regex":         {"", object{"decoder": object{"type": "Sequence", "decoders": []object{{"type": "Replace", "pattern": object{"Regex": "a"}}}}}, true, "decoders"},
		"no fuse":       {"", object{"decoder": object{"type": "Sequence", "decoders": []object{}}}, true, "decoders"},
		"ordinary":      {"", object{"added_tokens": []object{{"id": 256, "content": "x", "special": false}}}, true, "not special"},
		"added outside": {"", object{"added_tokens": []object{{"id": -1, "content": "x", "special": true}}}, false, "not in 0 to"},
		"added twice":   {"", object{"added_tokens": []object{{"id": 65, "content": "x", "special": true}}}, false, "twice"},
		"large":         {"", object{"added_tokens": []object{{"id": 259, "content": "x", "special": true}}}, false, ""},
	} {
		err := editJSON(t, tokenizerFile, c.path, c.set)
		if name == "large" {
			if err == nil || !strings.Contains(err.Error(), "vocabulary only 259") {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		checkRefused(t, name, err, c.unsupported, c.message)
	}
}

// withHeader is a safetensors file with a header and n bytes of data.
func withHeader(header string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), make([]byte, n)...)
}

func TestWeightFilesThatAreRefused(t *testing.T) {
	long := strings.Repeat("x", maxNameBytes+1)
	for name, c := range map[string]struct {
		data    []byte
		message string
	}{
		"empty":            {nil, "too few"},
		"header beyond":    {binary.LittleEndian.AppendUint64(nil, 9), "header of 9 bytes in a file of 8"},
		"header huge":      {binary.LittleEndian.AppendUint64(nil, math.MaxUint64), "at most"},
		"no object":        {withHeader(`[]`, 0), "does not begin"},
		"leading space":    {withHeader(` {}`, 0), "does not begin"},
		"cut":              {withHeader(`{"a":`, 0), "EOF"},
		"rubbish behind":   {withHeader(`{} {}`, 0), "behind its object"},
		"twice":            {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2), "listed twice"},
		"metadata twice":   {withHeader(`{"__metadata__":{},"__metadata__":{}}`, 0), "one map"},
		"metadata":         {withHeader(`{"__metadata__":{"a":1}}`, 0), "one map"},
		"long name":        {withHeader(`{"`+long+`":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1), "too long"},
		"unknown member":   {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}}`, 1), "unknown field"},
		"no type":          {withHeader(`{"a":{"shape":[1],"data_offsets":[0,1]}}`, 1), "needs dtype"},
		"no shape":         {withHeader(`{"a":{"dtype":"U8","data_offsets":[0,1]}}`, 1), "needs dtype"},
		"three offsets":    {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}`, 1), "needs dtype"},
		"type":             {withHeader(`{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}`, 1), "F4"},
		"negative shape":   {withHeader(`{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}`, 1), "negative"},
		"overflow":         {withHeader(`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,1]}}`, 1), "larger than the file"},
		"dimensions":       {withHeader(`{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}`, 1), "9 dimensions"},
		"beyond":           {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 1), "outside"},
		"reversed":         {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}`, 1), "outside"},
		"negative offset":  {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}}`, 1), "outside"},
		"wrong size":       {withHeader(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,2]}}`, 4), "its range 2"},
		"gap in front":     {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2), "gap"},
		"trailing data":    {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 2), "tensors cover 1"},
		"overlap":          {withHeader(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3), "overlaps"},
		"same range":       {withHeader(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 2), "overlaps"},
		"offset is text":   {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":["0",1]}}`, 1), "cannot unmarshal"},
		"entry is a list":  {withHeader(`{"a":[]}`, 0), "cannot unmarshal"},
		"nothing inside":   {withHeader(`{}`, 0), "is missing"},
		"header not whole": {withHeader(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}`, 1), "EOF"},
	} {
		_, err := readWeights(bytes.NewReader(c.data), int64(len(c.data)), small(t, false).cfg)
		if err == nil || !strings.Contains(err.Error(), c.message) {
			t.Errorf("%s: error is %v, want one with %q", name, err, c.message)
		}
	}
}

func TestWeightsThatAreRefused(t *testing.T) {
	nan := func(old []byte) []byte {
		binary.LittleEndian.PutUint32(old[len(old)-4:], math.Float32bits(float32(math.NaN())))
		return old
	}
	checkRefused(t, "NaN", edit(t, weightsFile, nan), false, "not finite")
	rename := func(old []byte) []byte {
		return bytes.Replace(old, []byte("model.norm.weight"), []byte("model.norm.weighs"), 1)
	}
	checkRefused(t, "renamed", edit(t, weightsFile, rename), false, "model.norm.weight: is missing")

	dir := t.TempDir()
	if err := small(t, false).Save(dir, F32); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, weightsFile)
	if err := os.Rename(path, path+".index.json"); err != nil {
		t.Fatal(err)
	}
	_, err := Load(dir)
	checkRefused(t, "sharded", err, true, "single")
	if _, err := Load(filepath.Join(dir, "nothing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing directory: %v", err)
	}
}

func TestHalfFormats(t *testing.T) {
	for h := range 1 << 16 {
		x := fromBF16(uint16(h))
		if back := toBF16(x); x == x && back != uint16(h) || x != x && fromBF16(back) == fromBF16(back) {
			t.Fatalf("bfloat16 %#04x comes back as %#04x", h, back)
		}
		sign, exp, frac := 1-2*float64(h>>15), h>>10&31, float64(h&1023)
		want := sign * math.Ldexp(1+frac/1024, exp-15)
		switch {
		case exp == 0:
			want = sign * math.Ldexp(frac, -24)
		case exp == 31 && frac == 0:
			want = math.Inf(int(sign))
		case exp == 31:
			want = math.NaN()
		}
		if got := float64(fromF16(uint16(h))); got != want && !(math.IsNaN(got) && math.IsNaN(want)) {
			t.Fatalf("half %#04x is %v, want %v", h, got, want)
		}
	}
	for _, c := range [][2]uint32{{0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0x7f7fffff, 0x7f80}} {
		if got := toBF16(math.Float32frombits(c[0])); got != uint16(c[1]) {
			t.Errorf("%#08x rounds to %#04x, want %#04x", c[0], got, c[1])
		}
	}
}

func FuzzSafetensorsHeader(f *testing.F) {
	f.Add([]byte(`{}`), int64(0))
	f.Add([]byte(`{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}  `), int64(24))
	f.Add([]byte(`{"a":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"F16","shape":[],"data_offsets":[0,2]}}`), int64(2))
	f.Fuzz(func(t *testing.T, header []byte, dataLen int64) {
		tensors, err := parseHeader(header, dataLen)
		if err != nil {
			return
		}
		covered := int64(0)
		for name, s := range tensors {
			n := dtypeBytes[s.dtype]
			for _, d := range s.shape {
				n *= d
			}
			if n == 0 && s.begin != s.end || s.begin < 0 || s.end > dataLen || s.end-s.begin != n {
				t.Fatalf("%q: %+v in %d bytes", name, s, dataLen)
			}
			covered += n
		}
		if covered != dataLen {
			t.Fatalf("tensors cover %d of %d bytes", covered, dataLen)
		}
	})
}

func FuzzConfig(f *testing.F) {
	good, err := formatConfig(Tiny().cfg, "float32")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"architectures":["LlamaForCausalLM"],"rope_parameters":{"rope_theta":1e9},"eos_token_id":[1,2]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseConfig(data)
		if err != nil {
			return
		}
		again, err := formatConfig(c, "float32")
		if err != nil {
			t.Fatal(err)
		}
		back, err := parseConfig(again)
		if len(c.EOS) == 0 {
			c.EOS, back.EOS = nil, nil
		}
		if d := cmp.Diff(c, back); err != nil || d != "" {
			t.Fatalf("%v %s", err, d)
		}
	})
}

func FuzzTokenizer(f *testing.F) {
	good, err := formatTokenizer(Tiny().tok)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(bytes.Replace(good, []byte(`"type": "ByteLevel",`), []byte(`"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "b"}, {"type": "Fuse"}],`), 1))
	f.Fuzz(func(t *testing.T, data []byte) {
		tok, err := parseTokenizer(data)
		if err != nil {
			return
		}
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		for _, x := range tok.Encode(string(all)) {
			if x < 0 || int(x) >= tok.Vocab() || tok.Special(x) {
				t.Fatalf("input gives token %d", x)
			}
		}
		again, err := formatTokenizer(tok)
		if err != nil {
			t.Fatal(err)
		}
		back, err := parseTokenizer(again)
		if err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(back.pieces) != fmt.Sprint(tok.pieces) || back.encode != tok.encode {
			t.Fatal("tokenizer changes when written and read")
		}
	})
}
