package model

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvferry/kvferry/kv"
)

// Sampling says how a request chooses its tokens. The zero value is greedy.
type Sampling struct {
	Temperature float64 // 0: the most likely token, ties to the lowest id
	TopP        float64 // keep the most likely tokens up to this much probability; 0 and 1: all
	TopK        int     // keep this many of the most likely tokens; 0: all
	Seed        uint64  // same seed, same logits, same position: same token
}

// Validate reports the first parameter outside its range.
func (s Sampling) Validate() error {
	switch {
	case !(s.Temperature >= 0 && s.Temperature <= 100):
		return fmt.Errorf("temperature is %v, must be 0 to 100", s.Temperature)
	case !(s.TopP >= 0 && s.TopP <= 1):
		return fmt.Errorf("top_p is %v, must be 0 to 1", s.TopP)
	case s.TopK < 0:
		return fmt.Errorf("top_k is %d, must not be negative", s.TopK)
	}
	return nil
}

// ErrNotFinite means that logits have a NaN or infinity: the KV that they were computed from is
// damaged. No token is chosen from them.
var ErrNotFinite = errors.New("logits are not finite: the KV cache behind them is damaged")

// Choice is a chosen token.
type Choice struct {
	Token kv.Token
	// LogProb is the natural logarithm of the token's probability under the model itself, before
	// temperature and cuts, as stock engines report it.
	LogProb float64
}

// Sampler chooses tokens. It holds scratch memory and belongs to one goroutine.
type Sampler struct {
	candidates []candidate
}

type candidate struct {
	token  kv.Token
	logit  float32
	weight float64
}

// Choose picks the token for position, the absolute position that the token will have. The random
// number is a function of seed and position only, so that neither batching nor a resumption
// elsewhere changes it. Parameters are as valid as Validate demands.
func (s *Sampler) Choose(logits []float32, p Sampling, position int) (Choice, error) {
	best, err := argmax(logits)
	if err != nil {
		return Choice{}, err
	}
	token := best
	if p.Temperature > 0 {
		token = s.draw(logits, float64(logits[best]), p, uniformAt(p.Seed, position))
	}
	return Choice{Token: token, LogProb: logProb(logits, logits[best], token)}, nil
}

func argmax(logits []float32) (kv.Token, error) {
	best := 0
	for i, v := range logits {
		if math.Float32bits(v)&0x7f800000 == 0x7f800000 {
			return 0, ErrNotFinite
		}
		if v > logits[best] {
			best = i
		}
	}
	if len(logits) == 0 {
		return 0, ErrNotFinite
	}
	return kv.Token(best), nil
}

func logProb(logits []float32, top float32, token kv.Token) float64 {
	sum := 0.0
	for _, v := range logits {
		sum += exp64(float64(v) - float64(top))
	}
	return float64(logits[token]) - float64(top) - log64(sum)
}

// draw cuts to top-k first and to top-p of the rest then, as stock engines do.
func (s *Sampler) draw(logits []float32, top float64, p Sampling, u float64) kv.Token {
	c := s.candidates[:0]
	for i, v := range logits {
		c = append(c, candidate{token: kv.Token(i), logit: v})
	}
	s.candidates = c
	slices.SortFunc(c, func(a, b candidate) int {
		switch {
		case a.logit > b.logit:
			return -1
		case a.logit < b.logit:
			return 1
		}
		return int(a.token - b.token)
	})
	if p.TopK > 0 && p.TopK < len(c) {
		c = c[:p.TopK]
	}
	sum := 0.0
	for i := range c {
		c[i].weight = exp64((float64(c[i].logit) - top) / p.Temperature)
		sum += c[i].weight
	}
	if p.TopP > 0 && p.TopP < 1 {
		limit, kept := float64(sum*p.TopP), 0.0
		for i := range c {
			kept += c[i].weight
			if kept >= limit {
				c, sum = c[:i+1], kept
				break
			}
		}
	}
	at := float64(u * sum)
	for i := range c {
		at -= c[i].weight
		if at < 0 {
			return c[i].token
		}
	}
	return c[len(c)-1].token // rounding only
}
