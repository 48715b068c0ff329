package events

import (
	"errors"
	"sync"
	"time"

	"github.com/kvferry/kvferry/agent"
)

// ErrOverflow means that a peer has more unread notifications than its share. The caller ends the
// peer.
var ErrOverflow = errors.New("more notifications than its share are waiting to be read")

// kind of a queued event.
type kind uint8

const (
	owed    kind = iota // Result: its slot was reserved
	last                // Stopped: the second slot of its transfer
	message             // notification
	loss                // PeerLost
)

type item struct {
	ev   agent.Event
	peer *Peer
	size int
	kind kind
}

// Queue is used from any goroutine. Nothing blocks but Close, which waits for its own goroutine and, where there
// is no room for what is owed, a moment for the reader.
type Queue struct {
	out    chan agent.Event
	limits agent.Limits
	stop   chan struct{} // closed by Close
	// patience is how long Close lets a reader make room for one event that is owed.
	patience time.Duration

	mu struct {
		sync.Mutex
		closing bool
		backlog []item        // not yet in out, oldest first
		pump    chan struct{} // closed when the running pump ends; nil when none runs
		held    *item         // what a stopped pump could not hand over

		ring   []item // what was put into out, by position modulo len(ring), without the event
		sent   uint64 // position behind the newest
		read   uint64 // position of the oldest that may be unread
		slots  int    // reserved for Results and Stoppeds not yet in out
		unread int    // Results and Stoppeds in out

		orphans int // unread events of lost peers
	}
}

// New makes a queue. limits has no zero fields.
func New(limits agent.Limits) *Queue {
	room := 2*limits.Transfers + 2 // 2: the pump may hold one that counts as read
	q := &Queue{out: make(chan agent.Event, room), limits: limits, stop: make(chan struct{}), patience: agent.FlushTimeout}
	q.mu.ring = make([]item, room+1)
	return q
}

// Events is the channel.
func (q *Queue) Events() <-chan agent.Event { return q.out }

// Reserve takes the slots of one transfer's Result and Stopped, or reports that none are free.
func (q *Queue) Reserve() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reclaim()
	if q.mu.closing || q.mu.slots+q.mu.unread+2 > 2*q.limits.Transfers {
		return false
	}
	q.mu.slots += 2
	return true
}

// Unreserve gives back what Reserve took, for a transfer that was not started.
func (q *Queue) Unreserve() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.slots -= 2
}

// Result delivers the first of a transfer's two events.
func (q *Queue) Result(r agent.Result) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.push(item{ev: r, kind: owed})
}

// Stopped delivers the second and last of a transfer's two events.
func (q *Queue) Stopped(s agent.Stopped) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.push(item{ev: s, kind: last})
}

// Congested reports that so many events of peers already lost are unread that strangers should
// not be let in: each of them would add to it.
func (q *Queue) Congested() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reclaim()
	return q.mu.orphans > 4*q.limits.PeerNotifications
}

// Peer is one peer's share of the queue.
type Peer struct {
	q       *Queue
	id      agent.PeerID
	inbound bool
	// Guarded by q.mu.
	unread, bytes int
	lost          bool
}

// NewPeer makes a share.
func (q *Queue) NewPeer(id agent.PeerID, inbound bool) *Peer {
	return &Peer{q: q, id: id, inbound: inbound}
}

// Notify delivers a notification of this peer. Its only error is ErrOverflow; a lost peer's are
// dropped.
func (p *Peer) Notify(msg []byte, arrival *agent.Arrival) error {
	q := p.q
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.lost {
		return nil
	}
	q.reclaim()
	if p.unread >= q.limits.PeerNotifications || p.bytes+len(msg) > q.limits.PeerNotificationBytes {
		return ErrOverflow
	}
	p.unread++
	p.bytes += len(msg)
	ev := agent.Notification{From: p.id, Msg: msg, Arrival: arrival}
	q.push(item{ev: ev, peer: p, size: len(msg), kind: message})
	return nil
}

// Lost delivers PeerLost, once, behind all notifications of the peer.
func (p *Peer) Lost(err error) {
	if p.end() {
		p.q.mu.Lock()
		defer p.q.mu.Unlock()
		p.q.mu.orphans++
		p.q.push(item{ev: agent.PeerLost{Peer: p.id, Inbound: p.inbound, Err: err}, kind: loss})
	}
}

// Forget ends the share of a peer that its owner removed: there is no PeerLost.
func (p *Peer) Forget() { p.end() }

func (p *Peer) end() bool {
	p.q.mu.Lock()
	defer p.q.mu.Unlock()
	if p.lost {
		return false
	}
	p.lost = true
	p.q.mu.orphans += p.unread
	return true
}

// push queues an event. The caller holds mu.
func (q *Queue) push(it item) {
	if q.mu.closing {
		return
	}
	if q.mu.pump == nil {
		select {
		case q.out <- it.ev:
			q.account(it)
			return
		default:
		}
		q.mu.pump = make(chan struct{})
		go q.run(q.mu.pump)
	}
	q.mu.backlog = append(q.mu.backlog, it)
}

// run is the pump: it moves the backlog into out as the reader makes room.
func (q *Queue) run(done chan struct{}) {
	defer close(done)
	for {
		q.mu.Lock()
		if len(q.mu.backlog) == 0 || q.mu.closing {
			q.mu.pump = nil
			q.mu.Unlock()
			return
		}
		it := q.mu.backlog[0]
		q.mu.backlog[0] = item{}
		q.mu.backlog = q.mu.backlog[1:]
		q.account(it) // before it is sent: who reads a Stopped may post again at once
		q.mu.Unlock()
		select {
		case q.out <- it.ev:
		case <-q.stop:
			q.mu.Lock()
			q.mu.held = &it
			q.mu.pump = nil
			q.mu.Unlock()
			return
		}
	}
}

// account moves an event's bookkeeping from the backlog to out. The caller holds mu.
func (q *Queue) account(it item) {
	q.reclaim()
	if it.kind <= last {
		q.mu.slots--
		q.mu.unread++
	}
	it.ev = nil
	q.mu.ring[q.mu.sent%uint64(len(q.mu.ring))] = it
	q.mu.sent++
}

// reclaim notes what the reader has taken: all but the newest len(out). The caller holds mu.
func (q *Queue) reclaim() {
	for q.mu.read < q.mu.sent-min(uint64(len(q.out)), q.mu.sent) {
		it := &q.mu.ring[q.mu.read%uint64(len(q.mu.ring))]
		switch it.kind {
		case owed, last:
			q.mu.unread--
		case loss:
			q.mu.orphans--
		case message:
			it.peer.unread--
			it.peer.bytes -= it.size
			if it.peer.lost {
				q.mu.orphans--
			}
		}
		*it = item{}
		q.mu.read++
	}
}

// Close puts what is owed where the reader finds it, and closes the channel. The agent has ended
// all transfers and peers before. Notifications and losses stay too as far as there is room.
//
// A reader that goes on meanwhile makes room for what is owed. One that takes nothing for
// agent.FlushTimeout is waiting for Close itself, or reads no more: then notifications make room.
func (q *Queue) Close() {
	q.mu.Lock()
	if q.mu.closing {
		q.mu.Unlock()
		return
	}
	q.mu.closing = true
	pump := q.mu.pump
	q.mu.Unlock()
	close(q.stop)
	if pump != nil {
		<-pump
	}
	q.finish(q.takeRest())
	close(q.out)
}

// takeRest is what is not yet in out, in order. No pump runs any more.
func (q *Queue) takeRest() []item {
	q.mu.Lock()
	defer q.mu.Unlock()
	rest := q.mu.backlog
	if q.mu.held != nil {
		rest = append([]item{*q.mu.held}, rest...)
	}
	q.mu.backlog, q.mu.held = nil, nil
	return rest
}

// finish puts the rest into out: all that is owed, and of the others those before the first for which there
// is no room, so that no peer's notifications have gaps.
func (q *Queue) finish(rest []item) {
	room, silence := true, time.NewTimer(q.patience)
	defer silence.Stop()
	for _, it := range rest {
		if it.kind > last && !room {
			continue
		}
		select {
		case q.out <- it.ev:
			continue
		default:
		}
		if it.kind > last {
			room = false
			continue
		}
		silence.Reset(q.patience)
		select {
		case q.out <- it.ev:
		case <-silence.C:
			room = false
			q.evict()
			q.out <- it.ev // what is owed fits into out: see Reserve
		}
	}
}

// evict takes everything but what is owed out of out, which nobody reads.
func (q *Queue) evict() {
	for _, ev := range q.drain() {
		switch ev.(type) {
		case agent.Result, agent.Stopped:
			q.out <- ev
		}
	}
}

func (q *Queue) drain() []agent.Event {
	var evs []agent.Event
	for {
		select {
		case ev := <-q.out:
			evs = append(evs, ev)
		default:
			return evs
		}
	}
}
