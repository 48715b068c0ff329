package model

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Dedicate gives the Runner threads of its own until release: the calling goroutine's, to which it
// becomes bound, and helpers that live as long. lower is called once on each of them, to lower its
// priority; nil: nothing. Results are the same with and without. Both calls are for the goroutine that
// the Runner belongs to, which must not go on to do anything else on its thread: that one's priority
// stays.
//
// Computing threads of their own leave the others to the rest of the program. Go polls the network, when
// every P computes, only about every 10 ms; so a program that also answers peers should have more Ps
// than the Runner has threads.
func (r *Runner) Dedicate(lower func()) (release func()) {
	if lower == nil {
		lower = func() {}
	}
	bind := func() {
		runtime.LockOSThread()
		lower()
	}
	bind()
	var ended sync.WaitGroup
	for t := 1; t < r.threads; t++ {
		h := make(chan *share, 1)
		r.helpers = append(r.helpers, h)
		ended.Go(func() {
			bind() // never unbound: the thread, with its priority, ends with the goroutine
			for s := range h {
				s.work(t)
				s.done.Done()
			}
		})
	}
	return func() {
		for _, h := range r.helpers {
			close(h)
		}
		r.helpers = nil
		ended.Wait()
	}
}

// share is one call of each that several threads do together.
type share struct {
	next atomic.Int64
	n    int
	do   func(thread, i int)
	done sync.WaitGroup
}

func (s *share) work(thread int) {
	for i := int(s.next.Add(1) - 1); i < s.n; i = int(s.next.Add(1) - 1) {
		s.do(thread, i)
	}
}
