package model

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/kvferry/kvferry/kv"
)

const configFile = "config.json"

// parseConfig reads the config.json of a Llama checkpoint. Fields that change the computation and
// are not supported are errors; fields without influence on it are ignored.
func parseConfig(data []byte) (Config, error) {
	f := parseFields(configFile, "", data)
	var archs []string
	f.need("architectures", &archs)
	if f.err == nil && !slices.Equal(archs, []string{"LlamaForCausalLM"}) {
		f.unsupported("architectures", `["LlamaForCausalLM"]`)
	}
	c := Config{RopeTheta: 10000, NormEps: 1e-6, BOS: -1}
	f.only("model_type", `"llama"`)
	f.only("hidden_act", `"silu"`)
	for _, name := range []string{"attention_bias", "mlp_bias", "use_sliding_window"} {
		f.only(name, "false")
	}
	for _, name := range []string{"quantization_config", "sliding_window", "layer_types", "logit_scale", "num_local_experts"} {
		f.only(name)
	}
	f.only("partial_rotary_factor", "1", "1.0")
	f.need("vocab_size", &c.Vocab)
	f.need("hidden_size", &c.Hidden)
	f.need("intermediate_size", &c.FFN)
	f.need("num_hidden_layers", &c.Layers)
	f.need("num_attention_heads", &c.Heads)
	f.need("max_position_embeddings", &c.MaxPosition)
	f.read("rms_norm_eps", &c.NormEps)
	f.read("tie_word_embeddings", &c.Tied)
	f.read("bos_token_id", &c.BOS)
	if !f.read("num_key_value_heads", &c.KVHeads) {
		c.KVHeads = c.Heads
	}
	if !f.read("head_dim", &c.HeadDim) && c.Heads > 0 {
		c.HeadDim = c.Hidden / c.Heads
	}
	f.rope(&c)
	f.eos(&c)
	if f.err != nil {
		return Config{}, f.err
	}
	if err := c.Validate(); err != nil {
		return Config{}, &FormatError{File: configFile, Reason: err.Error()}
	}
	return c, nil
}

// rope reads the rotation from the older fields or from rope_parameters, which newer writers use.
func (f *fields) rope(c *Config) {
	f.read("rope_theta", &c.RopeTheta)
	for _, name := range []string{"rope_scaling", "rope_parameters"} {
		if f.err != nil || !f.has(name) {
			continue
		}
		p := f.object(name)
		p.only("rope_type", `"default"`)
		p.only("type", `"default"`)
		p.only("factor", "1", "1.0")
		p.only("partial_rotary_factor", "1", "1.0")
		p.read("rope_theta", &c.RopeTheta)
		f.err = p.err
	}
}

// eos reads one end token, a list of them, or none.
func (f *fields) eos(c *Config) {
	if !f.has("eos_token_id") {
		return
	}
	if bytes.HasPrefix(bytes.TrimSpace(f.members["eos_token_id"]), []byte("[")) {
		f.read("eos_token_id", &c.EOS)
		return
	}
	var one kv.Token
	if f.read("eos_token_id", &one) {
		c.EOS = []kv.Token{one}
	}
}

// formatConfig is the inverse of parseConfig. dtype is the name that stock engines give the type
// of the weights.
func formatConfig(c Config, dtype string) ([]byte, error) {
	var bos, eos any
	if c.BOS >= 0 {
		bos = c.BOS
	}
	switch len(c.EOS) {
	case 0:
	case 1:
		eos = c.EOS[0]
	default:
		eos = c.EOS
	}
	return indented(map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "hidden_act": "silu",
		"vocab_size": c.Vocab, "hidden_size": c.Hidden, "intermediate_size": c.FFN,
		"num_hidden_layers": c.Layers, "num_attention_heads": c.Heads, "num_key_value_heads": c.KVHeads,
		"head_dim": c.HeadDim, "max_position_embeddings": c.MaxPosition, "rms_norm_eps": c.NormEps,
		"rope_theta": c.RopeTheta, "attention_bias": false, "mlp_bias": false,
		"tie_word_embeddings": c.Tied, "torch_dtype": dtype, "bos_token_id": bos, "eos_token_id": eos,
	})
}

func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	err := e.Encode(v)
	return b.Bytes(), err
}
