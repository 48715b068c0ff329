package model

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
)

// Config is the shape of a Llama-style decoder. It is a plain value; sizes are in elements.
type Config struct {
	Name string // served model name

	Vocab   int
	Hidden  int
	Layers  int
	Heads   int // query heads
	KVHeads int // key/value heads; divides Heads
	HeadDim int // even, because rotation pairs element i with i+HeadDim/2
	FFN     int

	RopeTheta   float64
	NormEps     float64
	MaxPosition int // tokens of context, prompt and output together

	BOS  kv.Token   // -1: none
	EOS  []kv.Token // empty: none
	Tied bool       // the output head is the embedding matrix
}

// Group is the number of query heads that share one KV head.
func (c Config) Group() int { return c.Heads / c.KVHeads }

// contentDim is K and V of one head and token, side by side.
func (c Config) contentDim() int { return 2 * c.HeadDim }

// Validate reports the first field that no model can have.
func (c Config) Validate() error {
	for _, f := range []struct {
		name  string
		value int
		limit int
	}{
		{"vocabulary", c.Vocab, MaxVocab},
		{"hidden size", c.Hidden, MaxHidden},
		{"layer count", c.Layers, MaxLayers},
		{"query head count", c.Heads, MaxHeads},
		{"KV head count", c.KVHeads, MaxHeads},
		{"head dimension", c.HeadDim, MaxHeadDim},
		{"feed-forward size", c.FFN, MaxFFN},
		{"context length", c.MaxPosition, MaxContext},
	} {
		if f.value < 1 || f.value > f.limit {
			return fmt.Errorf("model config: %s is %d, must be 1 to %d", f.name, f.value, f.limit)
		}
	}
	switch {
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("model config: %d query heads cannot share %d KV heads evenly", c.Heads, c.KVHeads)
	case c.HeadDim%2 != 0:
		return fmt.Errorf("model config: head dimension %d is odd, rotation needs pairs", c.HeadDim)
	case !(c.RopeTheta >= 1 && c.RopeTheta <= 1e12):
		return fmt.Errorf("model config: rope theta is %v, must be 1 to 1e12", c.RopeTheta)
	case !(c.NormEps > 0 && c.NormEps < 1):
		return fmt.Errorf("model config: norm epsilon is %v, must lie between 0 and 1", c.NormEps)
	case c.BOS < -1 || int(c.BOS) >= c.Vocab:
		return fmt.Errorf("model config: BOS token %d is not in a vocabulary of %d", c.BOS, c.Vocab)
	case c.params() > MaxParams:
		return fmt.Errorf("model config: %d weights, at most %d are supported", c.params(), int64(MaxParams))
	}
	for _, t := range c.EOS {
		if t < 0 || int(t) >= c.Vocab {
			return fmt.Errorf("model config: EOS token %d is not in a vocabulary of %d", t, c.Vocab)
		}
	}
	return nil
}

func (c Config) params() int64 {
	h, hd := int64(c.Hidden), int64(c.HeadDim)
	layer := 2*h + h*hd*int64(2*c.Heads+2*c.KVHeads) + 3*h*int64(c.FFN)
	n := layer*int64(c.Layers) + h*int64(c.Vocab) + h
	if !c.Tied {
		n += h * int64(c.Vocab)
	}
	return n
}
