package model

// ropeTable holds cosine and sine of every (position, pair).
type ropeTable struct {
	half int
	cos  []float32 // [position][half]
	sin  []float32
}

// newRopeTable computes the table as stock engines do: frequency and angle are rounded to float32
// before the angle's sine and cosine are taken.
func newRopeTable(cfg Config) *ropeTable {
	half := cfg.HeadDim / 2
	t := &ropeTable{half: half,
		cos: make([]float32, cfg.MaxPosition*half), sin: make([]float32, cfg.MaxPosition*half)}
	lnTheta := log64(cfg.RopeTheta)
	for i := range half {
		freq := float32(exp64(-float64(lnTheta * (float64(2*i) / float64(cfg.HeadDim)))))
		for p := range cfg.MaxPosition {
			s, c := sincos64(float64(float32(float32(p) * freq)))
			t.cos[p*half+i], t.sin[p*half+i] = float32(c), float32(s)
		}
	}
	return t
}

// rotate turns the pairs (i, i+half) of each head in x to the position.
func (t *ropeTable) rotate(x []float32, position int) {
	cos := t.cos[position*t.half:][:t.half]
	sin := t.sin[position*t.half:][:t.half]
	for ; len(x) >= 2*t.half; x = x[2*t.half:] {
		lo, hi := x[:t.half], x[t.half:2*t.half]
		for i, a := range lo {
			b := hi[i]
			lo[i] = float32(a*cos[i]) - float32(b*sin[i])
			hi[i] = float32(b*cos[i]) + float32(a*sin[i])
		}
	}
}
