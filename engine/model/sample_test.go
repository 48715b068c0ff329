package model

import (
	"errors"
	"math"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

func choose(t *testing.T, logits []float32, p Sampling, position int) Choice {
	t.Helper()
	var s Sampler
	c, err := s.Choose(logits, p, position)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestGreedy(t *testing.T) {
	c := choose(t, []float32{-1, 3, 3, 2}, Sampling{}, 7)
	if c.Token != 1 {
		t.Errorf("token %d, ties go to the lowest id", c.Token)
	}
	want := 3 - math.Log(math.Exp(-1)+2*math.Exp(3)+math.Exp(2))
	if math.Abs(c.LogProb-want) > 1e-12 {
		t.Errorf("log-probability %v, want %v", c.LogProb, want)
	}
	// A very low temperature is almost greedy, and may not overflow.
	if c := choose(t, []float32{-1, 3, 2.9}, Sampling{Temperature: 1e-6}, 0); c.Token != 1 {
		t.Errorf("token %d at a temperature near 0", c.Token)
	}
}

func TestNotFinite(t *testing.T) {
	var s Sampler
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, temperature := range []float64{0, 1} {
			if _, err := s.Choose([]float32{1, float32(bad), 2}, Sampling{Temperature: temperature}, 0); !errors.Is(err, ErrNotFinite) {
				t.Errorf("%v: %v", bad, err)
			}
		}
	}
	if _, err := s.Choose(nil, Sampling{}, 0); err == nil {
		t.Error("a token was chosen from nothing")
	}
}

// Over many positions tokens come as often as the distribution after both cuts says.
func TestFrequencies(t *testing.T) {
	logits := []float32{float32(math.Log(1)), float32(math.Log(4)), float32(math.Log(2)), float32(math.Log(3))}
	for _, c := range []struct {
		p    Sampling
		want [4]float64
	}{
		{Sampling{Temperature: 1}, [4]float64{.1, .4, .2, .3}},
		{Sampling{Temperature: 1, TopP: 1, TopK: 9}, [4]float64{.1, .4, .2, .3}},
		{Sampling{Temperature: 0.5}, [4]float64{1. / 30, 16. / 30, 4. / 30, 9. / 30}},
		{Sampling{Temperature: 1, TopK: 2}, [4]float64{0, 4. / 7, 0, 3. / 7}},
		{Sampling{Temperature: 1, TopP: 0.65}, [4]float64{0, 4. / 7, 0, 3. / 7}},
		{Sampling{Temperature: 1, TopP: 0.8}, [4]float64{0, 4. / 9, 2. / 9, 3. / 9}},
		{Sampling{Temperature: 1, TopK: 3, TopP: 0.6}, [4]float64{0, 4. / 7, 0, 3. / 7}},
		{Sampling{Temperature: 1, TopP: 1e-9}, [4]float64{0, 1, 0, 0}},
		{Sampling{Temperature: 1, TopK: 1}, [4]float64{0, 1, 0, 0}},
	} {
		const n = 40000
		var got [4]float64
		c.p.Seed = 11
		for i := range n {
			got[choose(t, logits, c.p, i).Token] += 1.0 / n
		}
		for i := range got {
			if math.Abs(got[i]-c.want[i]) > 0.012 || c.want[i] == 0 && got[i] > 0 {
				t.Errorf("%+v: frequencies %.3f, want %.3f", c.p, got, c.want)
				break
			}
		}
	}
}

// Seed and position alone fix the random number, and seeds give different sequences.
func TestSeeds(t *testing.T) {
	logits := make([]float32, 50)
	sequence := func(seed uint64, positions ...int) (out []kv.Token) {
		for _, p := range positions {
			out = append(out, choose(t, logits, Sampling{Temperature: 1, Seed: seed}, p).Token)
		}
		return out
	}
	forward, backward := sequence(1, 0, 1, 2, 3, 4, 5, 6, 7), sequence(1, 7, 6, 5, 4, 3, 2, 1, 0)
	same := 0
	other := sequence(2, 0, 1, 2, 3, 4, 5, 6, 7)
	for i := range forward {
		if forward[i] != backward[7-i] {
			t.Errorf("position %d depends on the order of calls", i)
		}
		if forward[i] == other[i] {
			same++
		}
	}
	if same > 3 {
		t.Errorf("two seeds agree on %d of 8 tokens", same)
	}
}

func TestSamplingValidate(t *testing.T) {
	for _, p := range []Sampling{{}, {Temperature: 2, TopP: 1, TopK: 5}} {
		if err := p.Validate(); err != nil {
			t.Error(err)
		}
	}
	for _, p := range []Sampling{{Temperature: -1}, {Temperature: math.NaN()}, {TopP: 1.1}, {TopP: math.NaN()}, {TopK: -1}, {Temperature: math.Inf(1)}} {
		if p.Validate() == nil {
			t.Errorf("%+v accepted", p)
		}
	}
}
