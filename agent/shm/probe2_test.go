package shm

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func BenchmarkProbe2(b *testing.B) {
	perm := rand.New(rand.NewPCG(1, 1)).Perm(benchBlocks)
	x, _ := mapOwn(benchBlocks * benchBlock)
	y, _ := mapOwn(benchBlocks * benchBlock)
	for i := range x.Bytes() { x.Bytes()[i] = byte(i); y.Bytes()[i] = 1 }
	fd, _ := unix.Dup(x.FD())
	m, err := mapSealed(fd, x.Addr(), benchBlocks*benchBlock)
	must(b, err)
	w, _ := unix.Mmap(x.FD(), 0, benchBlocks*benchBlock, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
	var v [5][]float64
	sp := make([]span, 0, 8)
	waddr := uint64(uintptr(unsafe.Pointer(&w[0])))
	for b.Loop() {
		t := time.Now()
		for i, k := range perm {
			copy(y.Bytes()[k*benchBlock:][:benchBlock], x.Bytes()[i*benchBlock:])
		}
		v[0] = append(v[0], float64(time.Since(t))/1e6)
		t = time.Now()
		for i, k := range perm {
			copy(y.Bytes()[k*benchBlock:][:benchBlock], m.data[i*benchBlock:])
		}
		v[1] = append(v[1], float64(time.Since(t))/1e6)
		for q, base := range []uint64{x.Addr(), m.at(m.addr), waddr} {
		t = time.Now()
		for i := 0; i < len(perm); i += 4 {
			sp = sp[:0]
			for j := range 4 {
				sp = append(sp, span{dst: y.Addr() + uint64(perm[i+j]*benchBlock), src: base + uint64((i+j)*benchBlock), n: benchBlock})
			}
			copySpans(sp)
		}
		v[2+q] = append(v[2+q], float64(time.Since(t))/1e6)
		}
	}
	for _, v := range v { m := median(v); fmt.Printf("min %.2f p25 %.2f med %.2f\n", v[0], v[len(v)/4], m) }
}
