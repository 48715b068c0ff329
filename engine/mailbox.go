package engine

import "sync"

// mailbox hands values from any goroutine to one, in order. Neither side waits for the other: put
// never blocks, and what can be in a mailbox is bounded by what its owner says.
type mailbox[T any] struct {
	wake chan struct{} // holds one element when there may be something to take
	mu   struct {
		sync.Mutex
		items []T
	}
}

func newMailbox[T any]() *mailbox[T] { return &mailbox[T]{wake: make(chan struct{}, 1)} }

func (m *mailbox[T]) put(x T) {
	m.mu.Lock()
	m.mu.items = append(m.mu.items, x)
	m.mu.Unlock()
	notify(m.wake)
}

// take gives all that was put and not yet taken.
func (m *mailbox[T]) take() []T {
	m.mu.Lock()
	defer m.mu.Unlock()
	items := m.mu.items
	m.mu.items = nil
	return items
}

// notify wakes who waits for wake, which has room for one.
func notify(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
