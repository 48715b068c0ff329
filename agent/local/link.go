package local

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
)

// link is one added peer: what `from` posts and says to `to`. Guarded by the fabric's mu.
type link struct {
	from, to *Agent
	out, in  agent.PeerID // what from calls to, and what to calls from
	outShare *events.Peer // from's queue: for PeerLost
	inShare  *events.Peer // to's queue

	up       bool      // from still has it
	accepted bool      // to still has it
	busy     time.Time // when the bytes already under way have passed

	messages     [][]byte // under way, oldest first
	messageBytes int
	transfers    map[*transfer]struct{}
}

// later runs fn when d has passed, the two can reach each other, and the link still stands.
func (l *link) later(d time.Duration, fn func()) {
	f := l.from.fabric
	f.cfg.After(d, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.reach(l.from.name, l.to.name, func() {
			if l.up && l.accepted {
				fn()
			}
		})
	})
}

// notify sends a message. One timer per message takes the oldest, so that order needs none of the
// timers.
func (l *link) notify(msg []byte) error {
	limits := l.from.front.Limits
	if len(l.messages) >= limits.PeerNotifications || l.messageBytes+len(msg) > limits.PeerNotificationBytes {
		err := fmt.Errorf("%d notifications of %d bytes cannot be delivered", len(l.messages), l.messageBytes)
		l.lose(err)
		l.from.fabric.reach(l.from.name, l.to.name, func() { l.refused(ErrReset) })
		return err
	}
	l.messages = append(l.messages, msg)
	l.messageBytes += len(msg)
	l.later(l.from.fabric.cfg.Latency, func() {
		msg := l.messages[0]
		l.messages = l.messages[1:]
		l.messageBytes -= len(msg)
		l.deliver(msg, nil)
	})
	return nil
}

// deliver hands a notification to the receiver, and reports whether the link still stands.
func (l *link) deliver(msg []byte, arrival *agent.Arrival) bool {
	if err := l.inShare.Notify(msg, arrival); err != nil {
		l.refused(err)
		l.lose(fmt.Errorf("%w: %w", ErrReset, err))
		return false
	}
	return true
}

// lose ends from's side: its transfers end as peer lost, its lists are released, and it is told.
func (l *link) lose(err error) {
	if l.drop(agent.OutcomePeerLost, err) {
		l.outShare.Lost(&agent.PeerError{Peer: l.to.name, Phase: "connection", Err: err})
	}
}

// drop ends from's side without telling.
func (l *link) drop(outcome agent.Outcome, err error) bool {
	if !l.up {
		return false
	}
	l.up = false
	if l.from.peers[l.to.name] == l {
		delete(l.from.peers, l.to.name)
	}
	l.messages = nil
	for _, t := range l.ordered() {
		t.finish(outcome, &agent.PeerError{Peer: l.to.name, Phase: "transfer", Err: err})
	}
	l.from.front.Lists.RemoveOwner(l.out)
	return true
}

// ordered is the transfers as they were posted, so that a simulation repeats itself.
func (l *link) ordered() []*transfer {
	ts := make([]*transfer, 0, len(l.transfers))
	for t := range l.transfers {
		ts = append(ts, t)
	}
	slices.SortFunc(ts, func(a, b *transfer) int { return cmp.Compare(a.id, b.id) })
	return ts
}

// refused ends to's side and tells it.
func (l *link) refused(err error) {
	if l.accepted {
		l.accepted = false
		delete(l.to.inbound, l.in)
		l.inShare.Lost(&agent.PeerError{Peer: l.from.name, Phase: "connection", Err: err})
	}
}
