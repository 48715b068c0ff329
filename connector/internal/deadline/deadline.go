package deadline

import (
	"container/heap"
	"time"
)

// Item is one deadline, embedded by value in what it belongs to. The zero Item is not queued.
type Item[T any] struct {
	Value T // what PopDue returns; set it before the first Set

	at    time.Time
	order uint64
	pos   int // index in the heap plus one; 0 = not queued
}

// At is the queued moment; false when the item is not queued.
func (i *Item[T]) At() (time.Time, bool) { return i.at, i.pos != 0 }

// Queue orders items by time, equal times by the order in which they were first set. The zero
// Queue is ready to use.
type Queue[T any] struct {
	h     items[T]
	order uint64
}

// Len is the number of queued items.
func (q *Queue[T]) Len() int { return len(q.h) }

// Set queues the item for t, or moves it there.
func (q *Queue[T]) Set(i *Item[T], t time.Time) {
	i.at = t
	if i.pos != 0 {
		heap.Fix(&q.h, i.pos-1)
		return
	}
	q.order++
	i.order = q.order
	heap.Push(&q.h, i)
}

// Remove takes the item out; one that is not queued is ignored.
func (q *Queue[T]) Remove(i *Item[T]) {
	if i.pos != 0 {
		heap.Remove(&q.h, i.pos-1)
	}
}

// Next is the earliest deadline; false when nothing is queued.
func (q *Queue[T]) Next() (time.Time, bool) {
	if len(q.h) == 0 {
		return time.Time{}, false
	}
	return q.h[0].at, true
}

// PopDue removes and returns the earliest value whose time is not after now; false when there is
// none.
func (q *Queue[T]) PopDue(now time.Time) (v T, ok bool) {
	if len(q.h) == 0 || q.h[0].at.After(now) {
		return v, false
	}
	return heap.Pop(&q.h).(*Item[T]).Value, true
}

// items is the heap behind a Queue.
type items[T any] []*Item[T]

func (h items[T]) Len() int { return len(h) }

func (h items[T]) Less(a, b int) bool {
	if h[a].at.Equal(h[b].at) {
		return h[a].order < h[b].order
	}
	return h[a].at.Before(h[b].at)
}

func (h items[T]) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].pos, h[b].pos = a+1, b+1
}

func (h *items[T]) Push(x any) {
	i := x.(*Item[T])
	*h = append(*h, i)
	i.pos = len(*h)
}

func (h *items[T]) Pop() any {
	old := *h
	i := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	i.pos = 0
	return i
}
