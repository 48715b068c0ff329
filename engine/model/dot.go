package model

// Every product of two vectors in this package is computed in one order: a single float32
// accumulator starts at 0 and takes x[0]*y[0], x[1]*y[1], … in turn, each product rounded before
// it is added. The kernels below compute several such sums at once, which changes how often
// memory is read but not one bit of any sum. That is what makes a request's result independent of
// its company in a batch, of chunking and of the number of threads.
//
// One row times six: the compiler keeps six accumulators and one operand in registers and reads
// the other operand from memory; with eight it spills and runs at half the speed.

const rowPanel = 32 // rows that share one pass over the weights; 16 KiB at 128 columns

// mulT sets dst[r][o] = a[r] · b[o] for r < rows and o < outs. Vectors have k elements; aStep,
// bStep and dstStep are the distances between consecutive rows.
func mulT(dst []float32, dstStep int, a []float32, aStep, rows int, b []float32, bStep, outs, k int) {
	for r0 := 0; r0 < rows; r0 += rowPanel {
		r1 := min(r0+rowPanel, rows)
		for o := 0; o < outs; {
			n := dotWidth(outs - o)
			w := b[o*bStep:]
			for r := r0; r < r1; r++ {
				dotN(n, dst[r*dstStep+o:], a[r*aStep:][:k], w, bStep)
			}
			o += n
		}
	}
}

// dotWidth says how many of the left rows the next kernel takes.
func dotWidth(left int) int {
	switch {
	case left >= 6 && left != 8:
		return 6
	case left >= 4:
		return 4
	}
	return 1
}

// dotN sets dst[0..n-1] to the products of x with n rows of b; n is a dotWidth.
func dotN(n int, dst, x, b []float32, bStep int) {
	switch n {
	case 6:
		dot6(dst, x, b, bStep)
	case 4:
		dot4(dst, x, b, bStep)
	default:
		dst[0] = dot(x, b)
	}
}

func dot(x, y []float32) float32 {
	y = y[:len(x)]
	var s float32
	for i, v := range x {
		s += float32(v * y[i])
	}
	return s
}

func dot4(dst, x, b []float32, bStep int) {
	n := len(x)
	y0 := b[:n]
	y1 := b[bStep:][:n]
	y2 := b[2*bStep:][:n]
	y3 := b[3*bStep:][:n]
	var s0, s1, s2, s3 float32
	for i, v := range x {
		s0 += float32(v * y0[i])
		s1 += float32(v * y1[i])
		s2 += float32(v * y2[i])
		s3 += float32(v * y3[i])
	}
	dst = dst[:4]
	dst[0], dst[1], dst[2], dst[3] = s0, s1, s2, s3
}

func dot6(dst, x, b []float32, bStep int) {
	n := len(x)
	y0 := b[:n]
	y1 := b[bStep:][:n]
	y2 := b[2*bStep:][:n]
	y3 := b[3*bStep:][:n]
	y4 := b[4*bStep:][:n]
	y5 := b[5*bStep:][:n]
	var s0, s1, s2, s3, s4, s5 float32
	for i, v := range x {
		s0 += float32(v * y0[i])
		s1 += float32(v * y1[i])
		s2 += float32(v * y2[i])
		s3 += float32(v * y3[i])
		s4 += float32(v * y4[i])
		s5 += float32(v * y5[i])
	}
	dst = dst[:6]
	dst[0], dst[1], dst[2], dst[3], dst[4], dst[5] = s0, s1, s2, s3, s4, s5
}
