package model

import (
	"math"

	"github.com/kvferry/kvferry/kv"
)

// TinyName is the served name of the built-in model.
const TinyName = "kvferry-tiny"

const (
	tinyBOS kv.Token = 256 + iota
	tinyEOS
	tinyPad
	tinyVocab
)

// The gains of the built-in weights. They are what makes its output a fingerprint of the whole KV
// cache (TestTinyFeelsEveryBlock and its siblings): the scores of a query have a standard deviation
// of tinySharp^2, so that a few positions matter much to each query and every position to some
// query; values are large against the residual stream, so that what was attended to decides
// the next token and the last token alone cannot. A small rope theta makes every score change within
// tens of tokens of distance, which keeps the output from falling into a loop.
const (
	tinySharp = 2.6
	tinyValue = 3.0
	tinySeed  = 0x6b76666572727931 // "kvferry1"
)

// Tiny is kvferry-tiny: a model with built-in seeded weights that needs no file and is the same on
// every machine. Its tokenizer has one token per byte and three specials. A prompt gets no BOS.
//
// Greedy tokens show any whole block that is wrong, in every prompt tried (blocks of 16 tokens or
// more; with 8 nearly always). A fault in one layer of one block may escape them in prompts of some
// hundred tokens and more: who must see that compares log-probabilities too, which are the same to
// the bit for the same KV.
//
// Its greedy output is printable ASCII and never ends by itself: the output head has rows of zeros
// for all other tokens. All weights are exact in bfloat16, so that a checkpoint saved in either
// type holds the same model.
func Tiny() *Model {
	cfg := Config{
		Name: TinyName, Vocab: int(tinyVocab), Hidden: 128, Layers: 4, Heads: 4, KVHeads: 2, HeadDim: 32, FFN: 320,
		RopeTheta: 20, NormEps: 1e-5, MaxPosition: 2048, BOS: tinyBOS, EOS: []kv.Token{tinyEOS},
	}
	w := Weights{Layers: make([]LayerWeights, cfg.Layers)}
	for i, t := range w.tensors(cfg) {
		rng := draws{state: mix(tinySeed + uint64(i))}
		gain := tinyGain(t.data, &w)
		data := make([]float32, t.size())
		for j := range data {
			switch {
			case t.rows == 0:
				data[j] = 1
			case t.data == &w.Head && !printable(j/t.cols):
			default:
				data[j] = fromBF16(toBF16(float32(rng.normal() * float32(gain/math.Sqrt(float64(t.cols))))))
			}
		}
		*t.data = data
	}
	m, err := New(cfg, w, newByteTokenizer("<|bos|>", "<|eos|>", "<|pad|>"))
	if err != nil {
		panic("model: built-in weights: " + err.Error()) // a constant: TestTiny would fail
	}
	return m
}

func printable(token int) bool { return token >= ' ' && token <= '~' }

// tinyGain is what a matrix multiplies the norm of a random vector by, roughly.
func tinyGain(m *[]float32, w *Weights) float64 {
	for i := range w.Layers {
		switch l := &w.Layers[i]; m {
		case &l.Q, &l.K:
			return tinySharp
		case &l.V:
			return tinyValue
		}
	}
	if m == &w.Embed {
		return math.Sqrt(128) // elements of deviation 1
	}
	return 1
}
