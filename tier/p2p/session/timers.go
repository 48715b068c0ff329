package session

import (
	"container/heap"
	"time"
)

// timer calls fire once, at its time, unless stopped.
type timer struct {
	at   time.Time
	seq  uint64
	fire func()
	pos  int // in the heap; -1 when it is over
}

// timers is a heap of pending timers; those of one moment fire in the order they were made.
type timers []*timer

func (h timers) Len() int { return len(h) }

func (h timers) Less(i, j int) bool {
	if c := h[i].at.Compare(h[j].at); c != 0 {
		return c < 0
	}
	return h[i].seq < h[j].seq
}

func (h timers) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i, j
}

func (h *timers) Push(x any) {
	t := x.(*timer)
	t.pos = len(*h)
	*h = append(*h, t)
}

func (h *timers) Pop() any {
	old := *h
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	t.pos = -1
	return t
}

// after makes a timer.
func (h *Hub) after(d time.Duration, fire func()) *timer {
	h.lastTimer++
	t := &timer{at: h.now.Add(d), seq: h.lastTimer, fire: fire}
	heap.Push(&h.timers, t)
	return t
}

// stop ends a timer; nil and ended ones are fine.
func (h *Hub) stop(t *timer) {
	if t != nil && t.pos >= 0 {
		heap.Remove(&h.timers, t.pos)
	}
}

func (h *Hub) runTimers() {
	for len(h.timers) > 0 && !h.timers[0].at.After(h.now) {
		heap.Pop(&h.timers).(*timer).fire()
	}
}
