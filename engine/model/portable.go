package model

import "math"

// The elementary functions below use only additions, multiplications, divisions and bit
// operations, each rounded on its own: a product is converted explicitly before it is added,
// because the language lets a compiler fuse x*y+z otherwise, and package math uses assembly on
// some machines. A model therefore gives the same bits on every architecture.

const (
	log2e  = 1.4426950408889634
	ln2Hi  = 0.693145751953125      // 16 bits: a product with a small integer is exact
	ln2Lo  = 1.42860682030941723e-6 // ln 2 - ln2Hi
	ln2    = 0.6931471805599453
	expMax = 700 // beyond, exp64 is clamped: nothing here needs larger values
)

// exp32 is e**x for x <= 88, with a relative error below 3e-7; 0 for x < -87.
func exp32(x float32) float32 {
	if !(x >= -87) {
		return 0
	}
	// Adding and taking away 1.5*2^23 rounds to the nearest integer.
	const magic = 12582912
	n := float32(float32(x*log2e)+magic) - magic
	r := x - float32(n*ln2Hi)
	r -= float32(n * ln2Lo)
	p := float32(1.0 / 5040)
	p = float32(p*r) + 1.0/720
	p = float32(p*r) + 1.0/120
	p = float32(p*r) + 1.0/24
	p = float32(p*r) + 1.0/6
	p = float32(p*r) + 0.5
	p = float32(p*r) + 1
	p = float32(p*r) + 1
	return float32(p * math.Float32frombits(uint32(int32(n)+127)<<23))
}

// expShifted replaces each s[i] by exp(s[i]-top) and returns their sum, added in index order.
func expShifted(s []float32, top float32) float32 {
	const magic = 12582912
	var sum float32
	for i, v := range s {
		x := v - top
		if !(x >= -87) {
			// NaN stays visible: a score that is not a number must not turn into a weight of 0.
			if x != x {
				s[i], sum = x, x
				continue
			}
			s[i] = 0
			continue
		}
		n := float32(float32(x*log2e)+magic) - magic
		r := x - float32(n*ln2Hi)
		r -= float32(n * ln2Lo)
		p := float32(1.0 / 5040)
		p = float32(p*r) + 1.0/720
		p = float32(p*r) + 1.0/120
		p = float32(p*r) + 1.0/24
		p = float32(p*r) + 1.0/6
		p = float32(p*r) + 0.5
		p = float32(p*r) + 1
		p = float32(p*r) + 1
		e := float32(p * math.Float32frombits(uint32(int32(n)+127)<<23))
		s[i] = e
		sum += e
	}
	return sum
}

// silu is x * sigmoid(x).
func silu(x float32) float32 {
	if x != x {
		return x
	}
	if x < -80 {
		x = -80 // the value is below 1e-32 already; keeps exp32 in range
	}
	return x / (1 + exp32(-x))
}

// exp64 is e**x in float64, for x clamped to ±expMax.
func exp64(x float64) float64 {
	x = max(-expMax, min(expMax, x))
	n := math.Floor(float64(x*log2e) + 0.5)
	r := x - float64(n*ln2Hi)
	r -= float64(n * ln2Lo)
	p := 1.0
	for i := 18; i >= 1; i-- {
		p = 1 + float64(float64(p*r)/float64(i))
	}
	return math.Ldexp(p, int(n))
}

// log64 is the natural logarithm of a finite x > 0.
func log64(x float64) float64 {
	f, e := math.Frexp(x)
	if f < math.Sqrt2/2 {
		f, e = float64(f*2), e-1
	}
	// ln f = 2 artanh z, and |z| < 0.172 makes the series short.
	z := (f - 1) / (f + 1)
	zz := float64(z * z)
	s := 0.0
	for i := 27; i >= 1; i -= 2 {
		s = 1/float64(i) + float64(s*zz)
	}
	return float64(float64(e)*ln2) + float64(float64(2*z)*s)
}

// sincos64 returns sine and cosine of 0 <= x < 2^20.
func sincos64(x float64) (sin, cos float64) {
	// pi/2 in two 33-bit pieces and a rest, so that the products with n are exact or negligible.
	const (
		twoOverPi = 0.6366197723675814
		piA       = 1.5707963267341256
		piB       = 6.077100506303966e-11
		piC       = 2.0222662487959506e-21
	)
	n := math.Floor(float64(x*twoOverPi) + 0.5)
	r := x - float64(n*piA)
	r -= float64(n * piB)
	r -= float64(n * piC)
	rr := float64(r * r)
	s, c := 1.0, 1.0
	for i := 18; i >= 2; i -= 2 {
		s = 1 - float64(float64(s*rr)/float64(i*(i+1)))
		c = 1 - float64(float64(c*rr)/float64(i*(i-1)))
	}
	s = float64(s * r)
	switch int64(n) & 3 {
	case 0:
		return s, c
	case 1:
		return c, -s
	case 2:
		return -s, -c
	default:
		return -c, s
	}
}
