package shm

import (
	"sync"
	"testing"
)

// steps is a job of some steps, each a quantum.
type steps struct {
	name string
	n    int
	log  *[]string
}

func (s *steps) wide() bool { return false }

func (s *steps) step(*[]span) (int, verdict) {
	*s.log = append(*s.log, s.name)
	if s.n--; s.n == 0 {
		return quantumBytes, over
	}
	return quantumBytes, more
}

// A connection with a long queue lets another one have its turn after one quantum.
func TestConnectionsTakeTurns(t *testing.T) {
	w := &workers{max: 0} // none starts by itself
	var log []string
	var long, short lane
	for range 3 {
		w.submit(&long, &steps{name: "long", n: 3, log: &log})
	}
	w.submit(&short, &steps{name: "short", n: 2, log: &log})
	w.mu.running = 1
	w.run()
	want := []string{"long", "short", "long", "short", "long", "long", "long", "long", "long", "long", "long"}
	if len(log) != len(want) {
		t.Fatalf("%d steps: %v", len(log), log)
	}
	for i := range want {
		if log[i] != want[i] {
			t.Fatalf("turns were %v", log)
		}
	}
	if w.mu.running != 0 || long.queued || short.queued {
		t.Error("something is left")
	}
}

// shared is a wide job of slices that several workers take.
type shared struct {
	share share
	left  int
	mu    struct {
		sync.Mutex
		copied, ended int
	}
}

func (s *shared) wide() bool { return true }

func (s *shared) step(*[]span) (int, verdict) {
	n, ok := s.share.claim(func() (int, bool) { s.left--; return quantumBytes / 3, s.left == 0 })
	if !ok {
		return 0, busy
	}
	s.mu.Lock()
	s.mu.copied++
	s.mu.Unlock()
	if last, _ := s.share.landed(nil); !last {
		return n, s.share.verdict()
	}
	s.mu.Lock()
	s.mu.ended++
	s.mu.Unlock()
	return n, over
}

// Whoever joins in, each slice is copied once and each job ends once, in order, and no worker
// stays.
func TestWorkersShareAJob(t *testing.T) {
	for range 50 {
		w := &workers{max: 4}
		lanes := make([]lane, 3)
		var jobs []*shared
		for i := range 30 {
			j := &shared{left: 1 + i*3}
			jobs = append(jobs, j)
			w.submit(&lanes[i%len(lanes)], j)
		}
		w.wait()
		for i, j := range jobs {
			if j.mu.copied != 1+i*3 || j.mu.ended != 1 {
				t.Fatalf("job %d: %d slices copied, ended %d times", i, j.mu.copied, j.mu.ended)
			}
		}
	}
}
