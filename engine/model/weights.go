package model

import "fmt"

// Weights are the parameters of a model, immutable once a Model is made of them. A matrix is row
// major, one row per output, as checkpoints store it.
type Weights struct {
	Embed  []float32 // [vocab][hidden]
	Layers []LayerWeights
	Norm   []float32 // [hidden]
	Head   []float32 // [vocab][hidden]; nil when tied
}

// LayerWeights are the parameters of one decoder layer.
type LayerWeights struct {
	AttnNorm []float32 // [hidden]
	Q        []float32 // [heads*headDim][hidden]
	K        []float32 // [kvHeads*headDim][hidden]
	V        []float32 // [kvHeads*headDim][hidden]
	O        []float32 // [hidden][heads*headDim]
	FFNNorm  []float32 // [hidden]
	Gate     []float32 // [ffn][hidden]
	Up       []float32 // [ffn][hidden]
	Down     []float32 // [hidden][ffn]
}

// tensor is one parameter: its name in a checkpoint, its shape, and where it is kept.
type tensor struct {
	name string
	rows int // 0 for a vector
	cols int
	data *[]float32
}

func (t tensor) size() int {
	if t.rows == 0 {
		return t.cols
	}
	return t.rows * t.cols
}

func (t tensor) shape() []int {
	if t.rows == 0 {
		return []int{t.cols}
	}
	return []int{t.rows, t.cols}
}

// tensors lists the parameters that a model of this shape has, in a fixed order. w.Layers must
// have cfg.Layers entries.
func (w *Weights) tensors(cfg Config) []tensor {
	q, kv, h := cfg.Heads*cfg.HeadDim, cfg.KVHeads*cfg.HeadDim, cfg.Hidden
	list := []tensor{{"model.embed_tokens.weight", cfg.Vocab, h, &w.Embed}}
	for i := range w.Layers {
		l := &w.Layers[i]
		p := fmt.Sprintf("model.layers.%d.", i)
		list = append(list,
			tensor{p + "input_layernorm.weight", 0, h, &l.AttnNorm},
			tensor{p + "self_attn.q_proj.weight", q, h, &l.Q},
			tensor{p + "self_attn.k_proj.weight", kv, h, &l.K},
			tensor{p + "self_attn.v_proj.weight", kv, h, &l.V},
			tensor{p + "self_attn.o_proj.weight", h, q, &l.O},
			tensor{p + "post_attention_layernorm.weight", 0, h, &l.FFNNorm},
			tensor{p + "mlp.gate_proj.weight", cfg.FFN, h, &l.Gate},
			tensor{p + "mlp.up_proj.weight", cfg.FFN, h, &l.Up},
			tensor{p + "mlp.down_proj.weight", h, cfg.FFN, &l.Down})
	}
	list = append(list, tensor{"model.norm.weight", 0, h, &w.Norm})
	if !cfg.Tied {
		list = append(list, tensor{"lm_head.weight", cfg.Vocab, h, &w.Head})
	}
	return list
}

// Model is a decoder with its weights. It is immutable and may be shared by any number of
// goroutines, each with a Runner of its own.
type Model struct {
	cfg     Config
	weights Weights
	rope    *ropeTable
	tok     *Tokenizer
}

// New checks that the weights have the shape that cfg describes. The Model keeps w's slices;
// nobody may change them afterwards.
func New(cfg Config, w Weights, tok *Tokenizer) (*Model, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if len(w.Layers) != cfg.Layers {
		return nil, fmt.Errorf("model weights: %d layers, config has %d", len(w.Layers), cfg.Layers)
	}
	for _, t := range w.tensors(cfg) {
		if len(*t.data) != t.size() {
			return nil, fmt.Errorf("model weights: %s has %d elements, shape %v needs %d",
				t.name, len(*t.data), t.shape(), t.size())
		}
	}
	if cfg.Tied && w.Head != nil {
		return nil, fmt.Errorf("model weights: an output head is given, but config ties it to the embedding")
	}
	if tok == nil {
		return nil, fmt.Errorf("model: no tokenizer")
	}
	if tok.Vocab() > cfg.Vocab {
		return nil, fmt.Errorf("model: tokenizer has %d tokens, the model's vocabulary only %d", tok.Vocab(), cfg.Vocab)
	}
	return &Model{cfg: cfg, weights: w, rope: newRopeTable(cfg), tok: tok}, nil
}

// Config is the model's shape.
func (m *Model) Config() Config {
	c := m.cfg
	c.EOS = append(c.EOS[:0:0], c.EOS...)
	return c
}

// Tokenizer is the one that belongs to the weights.
func (m *Model) Tokenizer() *Tokenizer { return m.tok }

func (m *Model) head() []float32 {
	if m.cfg.Tied {
		return m.weights.Embed
	}
	return m.weights.Head
}
