package fault

import (
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
)

// reorderBound is how long a reordered message waits for another when its rule says nothing.
const reorderBound = 50 * time.Millisecond

// peer is what the wrapper knows of one generation of a peer. Guarded by Agent.mu.
type peer struct {
	a        *Agent
	id       agent.PeerID
	inbound  bool
	share    *events.Peer
	gone     bool      // told as lost or removed: nothing more of it is delivered
	incoming []*holder // notifications held back by Reorder or Delay, oldest first
	outgoing []*holder
}

// holder is a message that is held back.
type holder struct {
	t       *timer
	do      func()
	reorder bool // until the next has passed
}

// peer finds or makes a peer. The caller holds mu.
func (a *Agent) peer(id agent.PeerID, inbound bool) *peer {
	p := a.mu.peers[id]
	if p == nil {
		p = &peer{a: a, id: id, inbound: inbound, share: a.events.NewPeer(id, inbound)}
		a.mu.peers[id] = p
	}
	return p
}

// hold keeps a message back until another has passed, or for d.
func (p *peer) hold(queue *[]*holder, d time.Duration, do func()) {
	if d == 0 {
		d = reorderBound
	}
	p.delay(queue, d, do).reorder = true
}

// delay keeps a message back for d.
func (p *peer) delay(queue *[]*holder, d time.Duration, do func()) *holder {
	h := &holder{do: do}
	h.t = p.a.later(d, func() { p.let(queue, h) })
	*queue = append(*queue, h)
	return h
}

// let passes on a message that was held back.
func (p *peer) let(queue *[]*holder, h *holder) {
	for i, other := range *queue {
		if other == h {
			*queue = append((*queue)[:i:i], (*queue)[i+1:]...)
			p.a.drop(h.t)
			h.do()
			return
		}
	}
}

// passed is called when a message has gone its way: those that waited for it follow.
func (p *peer) passed(queue *[]*holder) {
	for _, h := range append([]*holder(nil), *queue...) {
		if h.reorder {
			p.let(queue, h)
		}
	}
}

// pump reads the inner agent's events until they end.
func (a *Agent) pump() {
	defer close(a.pumped)
	for ev := range a.Agent.Events() {
		a.mu.Lock()
		a.onEvent(ev)
		a.mu.Unlock()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, t := range a.ordered() { // Closed by Close: nothing moves any more
		t.ready = true
		t.release(agent.OutcomeClosed, agent.ErrClosed)
	}
}

func (a *Agent) onEvent(ev agent.Event) {
	switch ev := ev.(type) {
	case agent.Result:
		if t := a.mu.inner[ev.Transfer]; t != nil {
			t.onResult(ev)
		}
	case agent.Stopped:
		if t := a.mu.inner[ev.Transfer]; t != nil {
			t.onStopped(ev)
		}
	case agent.Notification:
		// Peers that connected to us are seen here for the first time.
		a.peer(ev.From, true).onNotification(ev)
	case agent.PeerLost:
		a.onLost(a.peer(ev.Peer, ev.Inbound), ev)
	}
}

func (p *peer) onNotification(n agent.Notification) {
	if p.gone {
		return
	}
	a := p.a
	r := a.decide(Occasion{Point: OnNotification, Peer: p.id.Name, Msg: n.Msg})
	deliver := func() { p.deliver(n) }
	if r == nil {
		deliver()
		p.passed(&p.incoming)
		return
	}
	switch r.Do {
	case Drop:
	case Delay:
		p.delay(&p.incoming, r.Delay, deliver)
	case Duplicate:
		deliver()
		again := n
		again.Msg = append([]byte(nil), n.Msg...)
		p.deliver(again)
	case Reorder:
		p.hold(&p.incoming, r.Delay, deliver)
	case Cut:
		a.cut(p, r.cause())
	}
}

// deliver hands a notification to the user; a peer beyond its share is lost.
func (p *peer) deliver(n agent.Notification) {
	if p.gone {
		return
	}
	if err := p.share.Notify(n.Msg, n.Arrival); err != nil {
		p.a.cut(p, err)
	}
}

// onLost passes on the loss of a peer, behind what is held back of it.
func (a *Agent) onLost(p *peer, ev agent.PeerLost) {
	if p.gone {
		delete(a.mu.peers, p.id)
		return
	}
	tell := func() {
		if !p.gone {
			a.lose(p, ev.Err)
			delete(a.mu.peers, p.id)
		}
	}
	if r := a.decide(Occasion{Point: OnPeerLost, Peer: p.id.Name}); r != nil {
		a.later(r.Delay, tell)
		return
	}
	tell()
}

// cut loses a peer as if its connection had been reset. The caller holds mu.
func (a *Agent) cut(p *peer, err error) {
	if p.gone {
		return
	}
	a.lose(p, &agent.PeerError{Peer: p.id.Name, Phase: "connection", Err: err})
	a.Agent.RemovePeer(p.id)
}

// lose tells the loss of a peer and ends what is held back.
func (a *Agent) lose(p *peer, err error) {
	for len(p.incoming) > 0 {
		p.let(&p.incoming, p.incoming[0])
	}
	if !p.gone {
		p.share.Lost(err)
	}
	a.forget(p, agent.OutcomePeerLost, err)
}

// forget ends what is held back for a peer.
func (a *Agent) forget(p *peer, outcome agent.Outcome, err error) {
	if p.gone {
		return
	}
	p.gone = true
	p.share.Forget() // does nothing if the loss was told
	for _, h := range append(p.incoming, p.outgoing...) {
		a.drop(h.t)
	}
	p.incoming, p.outgoing = nil, nil
	for _, t := range a.ordered() {
		if t.peer == p.id && t.inner == 0 {
			t.release(outcome, t.fault(err))
		}
	}
	for id, owner := range a.mu.lists {
		if owner == p.id {
			delete(a.mu.lists, id)
		}
	}
}
