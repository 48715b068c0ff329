package model

// mix is the finaliser of splitmix64: a bijection on 64 bits that leaves no visible structure.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

const golden = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio

// draws is the splitmix64 sequence of a seed. Only integer operations: the same on every machine.
type draws struct{ state uint64 }

func (d *draws) next() uint64 {
	d.state += golden
	return mix(d.state)
}

// normal is a sample of mean 0 and standard deviation 1 to a good approximation: the sum of four
// uniform 16-bit numbers, exact in float32.
func (d *draws) normal() float32 {
	x := d.next()
	sum := int32(x&0xffff) + int32(x>>16&0xffff) + int32(x>>32&0xffff) + int32(x>>48)
	const deviation = 37837.226 // 65536 * sqrt(4/12)
	return float32(sum-2*65535) / deviation
}

// uniformAt is the random number in [0, 1) that belongs to a seed and a position.
func uniformAt(seed uint64, position int) float64 {
	x := mix(mix(seed+golden) + golden*uint64(position+1))
	return float64(x>>11) / (1 << 53)
}
