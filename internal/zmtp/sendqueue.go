package zmtp

import "sync"

// sendQueue holds what waits to be written to one peer. Anyone pushes; the link's writer goroutine pops.
// A PONG or PING goes ahead of messages, never into one, and at most one of each waits: a peer that sends
// PINGs without reading costs 16 bytes.
type sendQueue struct {
	lim   *Limits
	wake  chan struct{} // cap 1: something to write
	space chan struct{} // cap 1: room for a message
	mu    struct {
		sync.Mutex
		items   []outItem
		bytes   int
		pong    []byte // a whole frame, or nil
		ping    []byte
		busy    bool // the writer holds something not yet given to the connection
		sealed  bool // no more messages are taken
		flushed []chan struct{}
	}
}

// outItem is either raw bytes or a message.
type outItem struct {
	raw    []byte
	frames [][]byte
	cost   int
}

func newSendQueue(lim *Limits) *sendQueue {
	return &sendQueue{lim: lim, wake: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

// pushRaw queues bytes of the handshake, which are few and bounded by the caller.
func (q *sendQueue) pushRaw(raw []byte) {
	q.mu.Lock()
	q.mu.items = append(q.mu.items, outItem{raw: raw})
	q.mu.Unlock()
	notify(q.wake)
}

// push queues a message or says why not: ErrQueueFull or ErrClosed. It never blocks.
func (q *sendQueue) push(frames [][]byte) error {
	item := outItem{frames: frames, cost: messageCost(frames)}
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.mu.sealed:
		return ErrClosed
	case len(q.mu.items) >= q.lim.SendMessages,
		len(q.mu.items) > 0 && q.mu.bytes+item.cost > q.lim.SendBytes:
		return ErrQueueFull
	}
	q.mu.items = append(q.mu.items, item)
	q.mu.bytes += item.cost
	notify(q.wake)
	return nil
}

// setPong replaces the PONG that waits.
func (q *sendQueue) setPong(frame []byte) {
	q.mu.Lock()
	q.mu.pong = frame
	q.mu.Unlock()
	notify(q.wake)
}

// setPing replaces the PING that waits.
func (q *sendQueue) setPing(frame []byte) {
	q.mu.Lock()
	q.mu.ping = frame
	q.mu.Unlock()
	notify(q.wake)
}

// pop takes the next thing to write.
func (q *sendQueue) pop() (outItem, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.busy = true
	greeted := len(q.mu.items) == 0 || q.mu.items[0].raw == nil // nothing goes ahead of the handshake
	if raw := q.mu.pong; raw != nil && greeted {
		q.mu.pong = nil
		return outItem{raw: raw}, true
	}
	if raw := q.mu.ping; raw != nil && greeted {
		q.mu.ping = nil
		return outItem{raw: raw}, true
	}
	if len(q.mu.items) == 0 {
		return outItem{}, false
	}
	item := q.mu.items[0]
	q.mu.items[0] = outItem{}
	if q.mu.items = q.mu.items[1:]; len(q.mu.items) == 0 {
		q.mu.items = nil
	}
	q.mu.bytes -= item.cost
	notify(q.space)
	return item, true
}

// rest is called by the writer when all it popped is written. It is false if there is more by now.
func (q *sendQueue) rest() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.mu.items) > 0 || q.mu.pong != nil || q.mu.ping != nil {
		return false
	}
	q.mu.busy = false
	for _, c := range q.mu.flushed {
		close(c)
	}
	q.mu.flushed = nil
	return true
}

// seal refuses further messages.
func (q *sendQueue) seal() {
	q.mu.Lock()
	q.mu.sealed = true
	q.mu.Unlock()
	notify(q.space)
}

// whenFlushed returns a channel that is closed once everything queued was given to the connection.
func (q *sendQueue) whenFlushed() <-chan struct{} {
	c := make(chan struct{})
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.mu.busy && len(q.mu.items) == 0 && q.mu.pong == nil && q.mu.ping == nil {
		close(c)
	} else {
		q.mu.flushed = append(q.mu.flushed, c)
	}
	return c
}

// notify sets a one-place signal.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
