package shm

import (
	"runtime"
	"slices"
	"sync"
)

// verdict is what a worker learns from a step.
type verdict uint8

const (
	more verdict = iota // there may be more to copy
	busy                // all that is left is being copied by others, who will say over
	over                // the job has ended, said once
)

// job is copying that one connection has to do. Several workers may call step at once if it is
// wide; after it is over, a late call gets busy.
type job interface {
	// step copies one slice, with spans to work in, and gives its cost. It never waits for a peer.
	step(spans *[]span) (cost int, v verdict)
	// wide reports whether the job is worth several workers.
	wide() bool
}

// workers copy. Connections take turns, so that none waits for the whole of another's work.
//
//	lane ── job, job ──┐
//	lane ── job ───────┼─> turns ─> worker: one quantum of the first lane's first job, then
//	lane ── job, job ──┘            the lane goes to the end
//
// A lane whose job is wide goes to the end at once, so that a worker that has nothing better to do
// joins in.
type workers struct {
	max int
	mu  struct {
		sync.Mutex
		turns   []*lane // in order
		running int
		idle    chan struct{} // made by wait, closed when the last worker ends
	}
}

func newWorkers() *workers { return &workers{max: min(maxWorkers, runtime.GOMAXPROCS(0))} }

// lane is one connection's jobs, in order; only the first is worked on. Guarded by workers.mu.
type lane struct {
	jobs   []job
	queued bool // in turns
}

// submit appends a job to a lane.
func (w *workers) submit(l *lane, j job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l.jobs = append(l.jobs, j)
	if len(l.jobs) == 1 {
		w.queue(l)
	}
}

// queue puts a lane at the end, and sees to it that somebody comes. The caller holds mu.
func (w *workers) queue(l *lane) {
	if l.queued {
		return
	}
	l.queued = true
	w.mu.turns = append(w.mu.turns, l)
	if w.mu.running < w.max {
		w.mu.running++
		go w.run()
	}
}

// unqueue takes a lane out of turns. The caller holds mu.
func (w *workers) unqueue(l *lane) {
	if l.queued {
		l.queued = false
		i := slices.Index(w.mu.turns, l)
		w.mu.turns = slices.Delete(w.mu.turns, i, i+1)
	}
}

// run is a worker: it ends when there is nothing to do.
func (w *workers) run() {
	spans := make([]span, 0, slicePieces)
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.mu.turns) > 0 {
		l := w.mu.turns[0]
		w.mu.turns[0] = nil
		w.mu.turns = w.mu.turns[1:]
		l.queued = false
		if len(l.jobs) == 0 {
			continue // it ended while a second turn of it waited
		}
		j := l.jobs[0]
		if j.wide() {
			w.queue(l)
		}
		w.mu.Unlock()
		v := more
		for used := 0; v == more && used < quantumBytes; {
			var n int
			n, v = j.step(&spans)
			used += n
		}
		w.mu.Lock()
		switch {
		case v == busy && len(l.jobs) > 0 && l.jobs[0] == j:
			w.unqueue(l) // whoever ends the job queues it again
			continue
		case v == over:
			l.jobs[0] = nil
			l.jobs = l.jobs[1:]
		}
		if len(l.jobs) > 0 {
			w.queue(l)
		}
	}
	w.mu.running--
	if w.mu.running == 0 && w.mu.idle != nil {
		close(w.mu.idle)
		w.mu.idle = nil
	}
}

// wait returns when no worker runs. The caller has ended all connections, whose jobs then end at
// their next step.
func (w *workers) wait() {
	w.mu.Lock()
	if w.mu.running == 0 {
		w.mu.Unlock()
		return
	}
	if w.mu.idle == nil {
		w.mu.idle = make(chan struct{})
	}
	idle := w.mu.idle
	w.mu.Unlock()
	<-idle
}

// share is how several workers share the slices of one job: each claims one, and whoever is the last
// to be in flight ends the job.
type share struct {
	mu struct {
		sync.Mutex
		flying int   // slices being copied
		all    bool  // nothing is left to claim
		err    error // nothing more is to be copied
		ended  bool
	}
}

// claim takes the next slice by next, which fills what the caller copies, and reports its cost and
// whether it was the last. It reports false if there is nothing to claim.
func (s *share) claim(next func() (cost int, last bool)) (cost int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.all || s.mu.err != nil {
		return 0, false
	}
	s.mu.flying++
	cost, s.mu.all = next()
	return cost, true
}

// landed ends a claim. It reports whether the caller is the last, who ends the job, and with what.
func (s *share) landed(err error) (last bool, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.flying--
	if s.mu.err == nil {
		s.mu.err = err
	}
	if s.mu.flying > 0 || s.mu.ended || s.mu.err == nil && !s.mu.all {
		return false, nil
	}
	s.mu.ended = true
	return true, s.mu.err
}

// verdict is what a worker that is not the last says.
func (s *share) verdict() verdict {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.all || s.mu.err != nil {
		return busy
	}
	return more
}
