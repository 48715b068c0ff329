package zmtp

import (
	"context"
	"sync"
)

// Peer names one connection of a Router.
type Peer struct {
	Identity   string // raw bytes as the peer announced them, or 5 invented ones that begin with 0
	Generation uint64 // from 1, never used twice by one Router; 0 in Send means "whichever lives"
}

// Message is what a Router received. Frames (at least one, some perhaps empty) belong to the receiver.
type Message struct {
	Peer
	Host   string // where the connection comes from: an address without its port
	Frames [][]byte
}

// fairQueue holds received messages, a bounded share for each connection. Receivers take one message per
// connection in turn, so a connection that floods waits in its own share and nobody else does.
type fairQueue struct {
	ready chan struct{} // cap 1: some share has a message
	mu    struct {
		sync.Mutex
		head, tail *share // shares with messages, in order of their turn
	}
}

// share is one connection's part of a fairQueue, guarded by the queue's mu.
type share struct {
	lim   *Limits
	space chan struct{} // cap 1: there is room again
	next  *share
	inRow bool // linked between head and tail
	msgs  []Message
	bytes int
	ended bool // nothing more will be pushed

	// popped is told, outside the lock, of each message taken and whether it was the last one ever.
	// ended shares without messages are reported with cost 0.
	popped func(cost int, last bool)
}

func newFairQueue() *fairQueue {
	return &fairQueue{ready: make(chan struct{}, 1)}
}

func newShare(lim *Limits, popped func(cost int, last bool)) *share {
	return &share{lim: lim, space: make(chan struct{}, 1), popped: popped}
}

// push adds a message to a share, which may become overfull by this one. The share's reader then calls room.
func (q *fairQueue) push(s *share, m Message) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.ended {
		return
	}
	s.msgs = append(s.msgs, m)
	s.bytes += messageCost(m.Frames)
	if !s.inRow {
		q.append(s)
	}
	notify(q.ready)
}

// room waits until the share has room, or done is closed. No deadline: Recv or the link's end ends it.
func (q *fairQueue) room(s *share, done <-chan struct{}) {
	for {
		q.mu.Lock()
		full := len(s.msgs) >= s.lim.InboxMessages || s.bytes >= s.lim.InboxBytes
		q.mu.Unlock()
		if !full {
			return
		}
		select {
		case <-s.space:
		case <-done:
			return
		}
	}
}

// end says that nothing more comes; what waits stays. Calling it again is harmless.
func (q *fairQueue) end(s *share) {
	q.mu.Lock()
	last := !s.ended && len(s.msgs) == 0
	s.ended = true
	q.mu.Unlock()
	if last {
		s.popped(0, true)
	}
}

// discard ends the share and throws away what waits.
func (q *fairQueue) discard(s *share) {
	q.mu.Lock()
	cost, last := s.bytes, !s.ended || len(s.msgs) > 0
	s.msgs, s.bytes, s.ended = nil, 0, true
	q.mu.Unlock()
	if last {
		s.popped(cost, true)
	}
}

// pop takes the message whose turn it is.
func (q *fairQueue) pop() (Message, bool) {
	q.mu.Lock()
	s := q.take()
	if s == nil {
		q.mu.Unlock()
		return Message{}, false
	}
	m := s.msgs[0]
	s.msgs[0] = Message{}
	if s.msgs = s.msgs[1:]; len(s.msgs) == 0 {
		s.msgs = nil
	} else {
		q.append(s)
	}
	cost := messageCost(m.Frames)
	s.bytes -= cost
	last := s.ended && len(s.msgs) == 0
	if q.mu.head != nil {
		notify(q.ready)
	}
	q.mu.Unlock()
	notify(s.space)
	s.popped(cost, last)
	return m, true
}

// recv waits for a message, the context's end, or over (after which no message is added).
// ok is false without a message; err is then the context's, or nil after over.
func (q *fairQueue) recv(ctx context.Context, over <-chan struct{}) (m Message, ok bool, err error) {
	for {
		if m, ok = q.pop(); ok {
			return m, true, nil
		}
		select {
		case <-q.ready:
		case <-ctx.Done():
			return Message{}, false, context.Cause(ctx)
		case <-over:
			m, ok = q.pop()
			return m, ok, nil
		}
	}
}

// append puts a share at the end of the row. Call with mu held.
func (q *fairQueue) append(s *share) {
	s.inRow, s.next = true, nil
	if q.mu.tail == nil {
		q.mu.head = s
	} else {
		q.mu.tail.next = s
	}
	q.mu.tail = s
}

// take removes the first share that has a message (a discarded one has none). Call with mu held.
func (q *fairQueue) take() *share {
	for s := q.mu.head; s != nil; s = q.mu.head {
		if q.mu.head = s.next; q.mu.head == nil {
			q.mu.tail = nil
		}
		s.inRow, s.next = false, nil
		if len(s.msgs) > 0 {
			return s
		}
	}
	return nil
}
