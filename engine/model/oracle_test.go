package model

import (
	"math"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// oracle is the textbook decoder: float64, package math, no cache, no pages, every position from
// scratch. It shares no code with the package.
func oracle(m *Model, tokens []kv.Token) []float64 {
	cfg, w := m.cfg, m.weights
	n, hd := len(tokens), cfg.HeadDim
	x := make([][]float64, n)
	for p, t := range tokens {
		for _, v := range w.Embed[int(t)*cfg.Hidden : (int(t)+1)*cfg.Hidden] {
			x[p] = append(x[p], float64(v))
		}
	}
	for _, l := range w.Layers {
		var q, k, v [][]float64
		for p := range x {
			h := oracleNorm(x[p], l.AttnNorm, cfg.NormEps)
			q = append(q, oracleRope(oracleMul(l.Q, h), p, hd, cfg.RopeTheta))
			k = append(k, oracleRope(oracleMul(l.K, h), p, hd, cfg.RopeTheta))
			v = append(v, oracleMul(l.V, h))
		}
		for p := range x {
			mixed := make([]float64, cfg.Heads*hd)
			for head := range cfg.Heads {
				g := head / (cfg.Heads / cfg.KVHeads)
				var e []float64
				sum := 0.0
				for j := 0; j <= p; j++ {
					s := 0.0
					for d := range hd {
						s += q[p][head*hd+d] * k[j][g*hd+d]
					}
					e = append(e, math.Exp(s/math.Sqrt(float64(hd))))
					sum += e[j]
				}
				for j := 0; j <= p; j++ {
					for d := range hd {
						mixed[head*hd+d] += e[j] / sum * v[j][g*hd+d]
					}
				}
			}
			for i, y := range oracleMul(l.O, mixed) {
				x[p][i] += y
			}
			h := oracleNorm(x[p], l.FFNNorm, cfg.NormEps)
			gate, up := oracleMul(l.Gate, h), oracleMul(l.Up, h)
			for i, g := range gate {
				gate[i] = g / (1 + math.Exp(-g)) * up[i]
			}
			for i, y := range oracleMul(l.Down, gate) {
				x[p][i] += y
			}
		}
	}
	head := w.Head
	if cfg.Tied {
		head = w.Embed
	}
	return oracleMul(head, oracleNorm(x[n-1], w.Norm, cfg.NormEps))
}

func oracleNorm(x []float64, weight []float32, eps float64) []float64 {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	out := make([]float64, len(x))
	for i, v := range x {
		out[i] = v / math.Sqrt(sum/float64(len(x))+eps) * float64(weight[i])
	}
	return out
}

func oracleMul(weight []float32, x []float64) []float64 {
	var out []float64
	for ; len(weight) > 0; weight = weight[len(x):] {
		s := 0.0
		for i, v := range x {
			s += float64(weight[i]) * v
		}
		out = append(out, s)
	}
	return out
}

func oracleRope(x []float64, position, hd int, theta float64) []float64 {
	out := make([]float64, len(x))
	for h := 0; h < len(x); h += hd {
		for i := range hd / 2 {
			s, c := math.Sincos(float64(position) * math.Pow(theta, -2*float64(i)/float64(hd)))
			a, b := x[h+i], x[h+i+hd/2]
			out[h+i], out[h+i+hd/2] = a*c-b*s, b*c+a*s
		}
	}
	return out
}

func TestAgainstTheOracle(t *testing.T) {
	for name, m := range map[string]*Model{"tiny": Tiny(), "small": small(t, false), "tied": small(t, true)} {
		r := NewRunner(m, 1)
		for _, n := range []int{1, 2, 9, 70} {
			for _, keys := range []Keys{PlainKeys, RotatedKeys} {
				prompt := m.tok.Encode(text(n, n))
				c := newCache(t, m.cfg, CacheShape{Keys: keys, BlockSize: 8, NumBlocks: 9})
				got, want := run(t, r, c, prompt, 0, table(0, 9)), oracle(m, prompt)
				for i := range want {
					if d := math.Abs(float64(got[i]) - want[i]); !(d < 2e-3) {
						t.Fatalf("%s, %d tokens, %v keys: logit %d is %v, want %v", name, n, keys, i, got[i], want[i])
					}
				}
			}
		}
	}
}

func TestPortableFunctions(t *testing.T) {
	rng := draws{state: 1}
	for range 20000 {
		x := float64(float32(uniformAt(rng.next(), 0)*175 - 87))
		if got, want := float64(exp32(float32(x))), math.Exp(x); math.Abs(got-want) > 3e-7*want {
			t.Fatalf("exp32(%v) = %v, want %v", x, got, want)
		}
		if got, want := exp64(x), math.Exp(x); math.Abs(got-want) > 1e-14*want {
			t.Fatalf("exp64(%v) = %v, want %v", x, got, want)
		}
		y := uniformAt(rng.next(), 0)*1e6 + 1e-9
		if got, want := log64(y), math.Log(y); math.Abs(got-want) > 1e-15*math.Abs(want)+1e-15 {
			t.Fatalf("log64(%v) = %v, want %v", y, got, want)
		}
		z := uniformAt(rng.next(), 0) * MaxContext
		s, c := sincos64(z)
		if ws, wc := math.Sincos(z); math.Abs(s-ws) > 1e-14 || math.Abs(c-wc) > 1e-14 {
			t.Fatalf("sincos64(%v) = %v, %v, want %v, %v", z, s, c, ws, wc)
		}
		v := float32(x / 2)
		if got, want := float64(silu(v)), float64(v)/(1+math.Exp(-float64(v))); math.Abs(got-want) > 1e-6*math.Abs(want) {
			t.Fatalf("silu(%v) = %v, want %v", v, got, want)
		}
	}
	for _, x := range []float32{-88, -1e30, float32(math.Inf(-1)), float32(math.NaN())} {
		if exp32(x) != 0 {
			t.Errorf("exp32(%v) = %v", x, exp32(x))
		}
	}
	if x := float32(math.NaN()); silu(x) == silu(x) || silu(float32(math.Inf(-1))) > 0 {
		t.Error("silu hides what is no number")
	}
}
