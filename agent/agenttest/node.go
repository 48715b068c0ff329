package agenttest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// patience is how long a test waits for what must come. Whoever passes never waits for it.
const patience = 20 * time.Second

// silence is the bound of transfers that are to run into it, long that of those that are not.
const (
	silence = 150 * time.Millisecond
	long    = time.Minute
)

// node is an agent with the one reader of its events.
type node struct {
	agent.Agent
	s      *suite
	peers  map[*node]agent.Peer
	read   chan struct{} // closed when the events' channel is
	gate   chan struct{} // closed when the reader may begin
	closed sync.Once

	mu struct {
		sync.Mutex
		events  []agent.Event
		posted  map[agent.TransferID]bool
		changed chan struct{}
	}
}

// add makes an agent whose events are read.
func (s *suite) add() *node { return s.addWith(agent.Limits{}, true) }

// addWith makes an agent; unless reading is set, its events are read only after start.
func (s *suite) addWith(limits agent.Limits, reading bool) *node {
	s.Helper()
	n := &node{
		Agent: s.net.New(s.T, limits), s: s, peers: map[*node]agent.Peer{},
		read: make(chan struct{}), gate: make(chan struct{}),
	}
	n.mu.posted = map[agent.TransferID]bool{}
	n.mu.changed = make(chan struct{})
	s.nodes = append(s.nodes, n)
	go func() {
		defer close(n.read)
		<-n.gate
		for ev := range n.Events() {
			n.mu.Lock()
			n.mu.events = append(n.mu.events, ev)
			close(n.mu.changed)
			n.mu.changed = make(chan struct{})
			n.mu.Unlock()
		}
	}()
	if reading {
		n.start()
	}
	return n
}

// start lets the reader begin.
func (n *node) start() { close(n.gate) }

// close closes the agent and waits until all of its events are read.
func (n *node) close() {
	n.closed.Do(func() {
		done := make(chan error, 1)
		go func() { done <- n.Close() }()
		select {
		case err := <-done:
			if err != nil {
				n.s.Errorf("close %s: %v", n.Name(), err)
			}
		case <-time.After(patience):
			n.s.Errorf("Close of %s does not return", n.Name())
			return
		}
		select {
		case <-n.gate:
		default:
			n.start()
		}
		<-n.read
	})
}

// connect adds b to n.
func (n *node) connect(b *node) agent.Peer {
	n.s.Helper()
	p, err := n.tryConnect(b)
	n.s.must(err)
	n.peers[b] = p
	return p
}

func (n *node) tryConnect(b *node) (agent.Peer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return n.AddPeer(ctx, agent.PeerInfo{Offers: b.Offers()})
}

// wait returns the first event that matches.
func (n *node) wait(what string, match func(agent.Event) bool) agent.Event {
	n.s.Helper()
	timeout := time.After(patience)
	seen := 0
	for {
		n.mu.Lock()
		for ; seen < len(n.mu.events); seen++ {
			if ev := n.mu.events[seen]; match(ev) {
				n.mu.Unlock()
				return ev
			}
		}
		changed := n.mu.changed
		n.mu.Unlock()
		select {
		case <-changed:
		case <-timeout:
			n.s.Fatalf("%s: no %s; events: %v", n.Name(), what, n.all())
		}
	}
}

// all is a copy of the events so far.
func (n *node) all() []agent.Event {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]agent.Event(nil), n.mu.events...)
}

// post posts a transfer that must be accepted.
func (n *node) post(t agent.Transfer) agent.TransferID {
	n.s.Helper()
	id, err := n.Post(t)
	n.s.must(err)
	n.mark(id)
	return id
}

func (n *node) mark(id agent.TransferID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.posted[id] || id == 0 {
		n.s.Errorf("transfer id %d is used twice or zero", id)
	}
	n.mu.posted[id] = true
}

// result waits for the Result of a transfer, ended for its Stopped too.
func (n *node) result(id agent.TransferID) agent.Result {
	n.s.Helper()
	return n.wait(fmt.Sprintf("result of transfer %d", id), func(ev agent.Event) bool {
		r, ok := ev.(agent.Result)
		return ok && r.Transfer == id
	}).(agent.Result)
}

func (n *node) ended(id agent.TransferID) agent.Result {
	n.s.Helper()
	n.wait(fmt.Sprintf("stopped of transfer %d", id), func(ev agent.Event) bool {
		s, ok := ev.(agent.Stopped)
		return ok && s.Transfer == id
	})
	return n.result(id)
}

// expect waits until a transfer has ended and checks how.
func (n *node) expect(id agent.TransferID, want agent.Outcome) agent.Result {
	n.s.Helper()
	r := n.ended(id)
	if r.Outcome != want {
		n.s.Fatalf("transfer %d ended as %v (%v), want %v", id, r.Outcome, r.Err, want)
	}
	if (r.Err == nil) != (want == agent.OutcomeDone) {
		n.s.Fatalf("transfer %d ended as %v with error %v", id, r.Outcome, r.Err)
	}
	return r
}

// notified waits for a notification.
func (n *node) notified(msg string) agent.Notification {
	n.s.Helper()
	return n.wait("notification "+msg, func(ev agent.Event) bool {
		m, ok := ev.(agent.Notification)
		return ok && string(m.Msg) == msg
	}).(agent.Notification)
}

// wasNotified reports whether a notification has come.
func (n *node) wasNotified(msg string) bool {
	for _, ev := range n.all() {
		if m, ok := ev.(agent.Notification); ok && string(m.Msg) == msg {
			return true
		}
	}
	return false
}

// lost waits for the loss of a peer by name.
func (n *node) lost(name agent.Name, inbound bool) agent.PeerLost {
	n.s.Helper()
	return n.wait("loss of "+string(name), func(ev agent.Event) bool {
		l, ok := ev.(agent.PeerLost)
		return ok && l.Peer.Name == name && l.Inbound == inbound
	}).(agent.PeerLost)
}

// alloc gives memory of n.
func (n *node) alloc(size int) agent.Memory {
	n.s.Helper()
	m, err := n.Alloc(size)
	n.s.must(err)
	return m
}

// list prepares a list.
func (n *node) list(owner agent.PeerID, descs ...kv.Descriptor) agent.ListID {
	n.s.Helper()
	id, err := n.Prepare(owner, descs)
	n.s.must(err)
	return id
}

// grant gives a permission.
func (n *node) grant(to *node, access agent.Access, ranges ...kv.Descriptor) agent.GrantID {
	n.s.Helper()
	id, err := n.Grant(agent.GrantSpec{Peer: to.Name(), Access: access, Ranges: ranges})
	n.s.must(err)
	return id
}

// check looks at the whole log.
func (n *node) check(t *testing.T) {
	t.Helper()
	state := map[agent.TransferID]int{}
	lost := map[agent.PeerID]bool{}
	for _, ev := range n.all() {
		switch ev := ev.(type) {
		case agent.Result:
			if state[ev.Transfer]++; state[ev.Transfer] != 1 {
				t.Errorf("%s: second result of transfer %d: %+v", n.Name(), ev.Transfer, ev)
			}
		case agent.Stopped:
			if state[ev.Transfer]++; state[ev.Transfer] != 2 {
				t.Errorf("%s: stopped of transfer %d is event %d of it", n.Name(), ev.Transfer, state[ev.Transfer])
			}
		case agent.Notification:
			if lost[ev.From] {
				t.Errorf("%s: notification %q of a lost peer", n.Name(), ev.Msg)
			}
		case agent.PeerLost:
			if lost[ev.Peer] {
				t.Errorf("%s: %v lost twice", n.Name(), ev.Peer)
			}
			lost[ev.Peer] = true
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for id := range n.mu.posted {
		if state[id] != 2 {
			t.Errorf("%s: transfer %d had %d of its 2 events", n.Name(), id, state[id])
		}
	}
	for id := range state {
		if !n.mu.posted[id] {
			t.Errorf("%s: events of transfer %d, which was never posted", n.Name(), id)
		}
	}
}
