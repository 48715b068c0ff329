package gate

import (
	"sync"
	"sync/atomic"
	"testing"
)

// After Shut has returned, nobody is inside and nobody enters: workers hammer a gate, and a
// counter that they only touch inside must stand still from then on.
func TestNothingMovesAfterShut(t *testing.T) {
	for range 20 {
		var g Gate
		var inside, moved atomic.Int64
		var wg sync.WaitGroup
		started := make(chan struct{}, 4)
		for range 4 {
			wg.Go(func() {
				started <- struct{}{}
				for g.Enter() {
					inside.Add(1)
					moved.Add(1)
					inside.Add(-1)
					g.Leave()
				}
			})
		}
		<-started
		if !g.Shut() {
			t.Fatal("the first Shut says that the gate was shut")
		}
		n := moved.Load()
		if inside.Load() != 0 {
			t.Fatal("Shut returned with somebody inside")
		}
		if g.Enter() {
			t.Fatal("entered a shut gate")
		}
		wg.Wait()
		if moved.Load() != n {
			t.Fatal("work went on after Shut")
		}
		if g.Shut() {
			t.Fatal("the second Shut says that it was the first")
		}
	}
}
