package shm

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
)

func BenchmarkProbe(b *testing.B) {
	perm := rand.New(rand.NewPCG(1, 1)).Perm(benchBlocks)
	c := newYardstick(b, perm)
	s := newScene(b, newAgent(b, Config{}), newAgent(b, Config{}), perm, agent.Write)
	s.transfer.Notif = []byte("x")
	x, _ := mapOwn(benchBlocks * benchBlock)
	y, _ := mapOwn(benchBlocks * benchBlock)
	for i := range x.Bytes() { x.Bytes()[i] = byte(i); y.Bytes()[i] = 1 }
	var cs, total, arr, gos []float64
	for b.Loop() {
		cs = append(cs, float64(c.round(b))/1e6)
		total = append(total, float64(s.round(b))/1e6)
		n := (<-s.d.Events()).(agent.Notification)
		arr = append(arr, float64(n.Arrival.Took)/1e6)
		t := time.Now()
		for i, k := range perm {
			copy(y.Bytes()[k*benchBlock:][:benchBlock], x.Bytes()[i*benchBlock:])
		}
		gos = append(gos, float64(time.Since(t))/1e6)
	}
	for _, v := range [][]float64{cs, total, arr, gos} { m := median(v); fmt.Printf("min %.2f p25 %.2f med %.2f\n", v[0], v[len(v)/4], m) }
}
