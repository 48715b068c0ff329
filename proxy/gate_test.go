package proxy

import (
	"testing"
	"testing/synctest"
)

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

// TestErrands: the end waits for what has begun, and nothing begins behind it.
func TestErrands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var e errands
		hold, ended := make(chan struct{}), make(chan struct{})
		if !e.start(func() { <-hold }) {
			t.Fatal("nothing begins")
		}
		go func() {
			e.end()
			close(ended)
		}()
		synctest.Wait()
		if e.start(func() { t.Error("it runs") }) {
			t.Error("an errand begins behind the end")
		}
		select {
		case <-ended:
			t.Fatal("the end does not wait")
		default:
		}
		close(hold)
		<-ended
		e.end()
	})
}
