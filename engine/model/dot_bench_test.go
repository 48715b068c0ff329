package model

import "testing"

func BenchmarkMulT(b *testing.B) {
	const rows, outs, k = 256, 320, 128
	x, y, d := make([]float32, rows*k), make([]float32, outs*k), make([]float32, rows*outs)
	for i := range x {
		x[i] = float32(i%7) - 3
	}
	for i := range y {
		y[i] = float32(i%11) - 5
	}
	for b.Loop() {
		mulT(d, outs, x, k, rows, y, k, outs, k)
	}
	b.ReportMetric(float64(rows*outs*k)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GMAC/s")
}

func BenchmarkMulTOneRow(b *testing.B) {
	const outs, k = 320, 128
	x, y, d := make([]float32, k), make([]float32, outs*k), make([]float32, outs)
	for b.Loop() {
		mulT(d, outs, x, k, 1, y, k, outs, k)
	}
	b.ReportMetric(float64(outs*k)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GMAC/s")
}
