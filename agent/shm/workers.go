package shm

import (
	"runtime"
	"sync"
)

// job is copying that one connection has to do. One worker at a time calls step.
type job interface {
	// step copies one slice, and reports its bytes and whether the job is over. It never waits for
	// a peer.
	step() (n int, over bool)
}

// workers copy. Connections take turns, so that none waits for the whole of another's work.
//
//	lane ── job, job ──┐
//	lane ── job ───────┼─> turns ─> worker: one quantum of the first lane's first job, then
//	lane ── job, job ──┘            the lane goes to the end
type workers struct {
	max int
	mu  struct {
		sync.Mutex
		turns   []*lane // lanes with work that no worker holds
		running int
		idle    chan struct{} // made by wait, closed when the last worker ends
	}
}

func newWorkers() *workers { return &workers{max: min(maxWorkers, runtime.GOMAXPROCS(0))} }

// lane is one connection's jobs, in order. Guarded by workers.mu.
type lane struct {
	jobs   []job
	active bool // in turns, or held by a worker
}

// submit appends a job to a lane.
func (w *workers) submit(l *lane, j job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l.jobs = append(l.jobs, j)
	if l.active {
		return
	}
	l.active = true
	w.mu.turns = append(w.mu.turns, l)
	if w.mu.running < w.max {
		w.mu.running++
		go w.run()
	}
}

// run is a worker: it ends when there is nothing to do.
func (w *workers) run() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.mu.turns) > 0 {
		l := w.mu.turns[0]
		w.mu.turns[0] = nil
		w.mu.turns = w.mu.turns[1:]
		j := l.jobs[0]
		w.mu.Unlock()
		over := false
		for used := 0; !over && used < quantumBytes; {
			var n int
			n, over = j.step()
			used += n
		}
		w.mu.Lock()
		if over {
			l.jobs[0] = nil
			l.jobs = l.jobs[1:]
		}
		if l.active = len(l.jobs) > 0; l.active {
			w.mu.turns = append(w.mu.turns, l)
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
