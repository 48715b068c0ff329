package proxy

import "testing"

// TestGate: who is inside when it shuts is waited for, the last one of them too, and nobody comes in any more.
func TestGate(t *testing.T) {
	var g gate
	for range 3 {
		if !g.enter() {
			t.Fatal("an open gate lets nobody in")
		}
	}
	g.leave()
	empty := g.shut()
	isEmpty := func() bool {
		select {
		case <-empty:
			return true
		default:
			return false
		}
	}
	for left := 2; left > 0; left-- {
		if isEmpty() || g.enter() {
			t.Fatalf("with %d inside: empty %v, or it lets somebody in", left, isEmpty())
		}
		g.leave()
	}
	if !isEmpty() || g.shut() != empty || g.enter() {
		t.Error("nobody is inside, and it does not say so, or lets somebody in")
	}
	var unused gate
	<-unused.shut()
}
