package worker

import (
	"slices"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
)

// notice is what a peer agent is to be told once its engine is connected.
type notice struct {
	to   agent.Name // nobody else is told; "" is whoever serves the engine
	addr connector.PeerAddr
	free bool          // not counted
	tell func(*remote) // nil: evicted
}

// notices is what waits for a handshake. Names and addresses are what peers say, so that each agent has
// a share of its own, and the greatest share makes room when there are too many. What our own ledger
// wants told is counted apart.
type notices struct {
	of    map[agent.Name][]*notice
	total int // without those of our ledger
}

func (n *notices) init() { n.of = make(map[agent.Name][]*notice) }

// room makes room for one more of an agent, and tells whether there is any. evict drops a notice.
func (n *notices) room(to agent.Name, share int, evict func(*notice)) bool {
	have := len(n.of[to])
	if to == "" {
		return have < maxNotices
	}
	if have >= share {
		return false
	}
	if n.total < maxNotices {
		return true
	}
	most := to
	for name, x := range n.of {
		if name != "" && (len(x) > len(n.of[most]) || len(x) == len(n.of[most]) && name > most) {
			most = name
		}
	}
	if len(n.of[most]) <= have+1 {
		return false
	}
	evict(n.of[most][len(n.of[most])-1])
	return true
}

func (n *notices) add(x *notice) {
	n.of[x.to] = append(n.of[x.to], x)
	if x.to != "" {
		n.total++
	}
}

// remove forgets a notice that was told, or cannot be.
func (n *notices) remove(x *notice) {
	i := slices.Index(n.of[x.to], x)
	if i < 0 {
		return
	}
	if n.of[x.to] = slices.Delete(n.of[x.to], i, i+1); len(n.of[x.to]) == 0 {
		delete(n.of, x.to)
	}
	if x.to != "" {
		n.total--
	}
}

// count is how many wait.
func (n *notices) count() int { return n.total + len(n.of[""]) }

// tell calls f when the engine at addr is connected and the agent is its, if it understands control
// messages. Too many that wait for a handshake are not told: what they ask for they ask again, and
// half of each share is for failures.
func (m *machine) tell(addr connector.PeerAddr, to agent.Name, f func(*remote)) {
	m.announce(addr, to, maxNoticesPerAgent/2, func(r *remote) {
		if r.control {
			f(r)
		}
	})
}

// whenConnected calls f when the engine at addr is connected and the agent is its.
func (m *machine) whenConnected(addr connector.PeerAddr, to agent.Name, f func(*remote)) {
	m.announce(addr, to, maxNoticesPerAgent, f)
}

// announce asks for the engine also when it is connected, which counts as use of the connection and is
// answered at once. Such a notice has no need of room, so that an agent that is connected is told
// whatever strangers do.
func (m *machine) announce(addr connector.PeerAddr, to agent.Name, share int, f func(*remote)) {
	if m.closing {
		return
	}
	free := false
	if r := m.named[to]; r != nil && r.engine == addr.Engine {
		addr = r.addr // one spelling of one place
		_, flying := m.flights[addr]
		free = !flying
	}
	x := &notice{to: to, addr: addr, free: free, tell: f}
	if !free {
		if !m.notices.room(to, share, m.evictNotice) {
			return
		}
		m.notices.add(x)
	}
	m.need(addr, waiter{notice: x})
}

// evictNotice drops a notice. Its connect goes on in the peer table, which bounds what it does for each
// agent; nobody waits for it here.
func (m *machine) evictNotice(x *notice) {
	m.notices.remove(x)
	x.tell = nil // its connect may just be answered
	if f := m.flights[x.addr]; f != nil {
		if f.waiters = slices.DeleteFunc(f.waiters, func(w waiter) bool { return w.notice == x }); len(f.waiters) == 0 {
			delete(m.flights, x.addr)
		}
	}
}

func (m *machine) noticeConnected(x *notice, r *remote) {
	m.noticeGone(x)
	if x.tell != nil && r.agent.ID.Gen != 0 && (x.to == "" || x.to == r.name()) && !m.closing {
		x.tell(r)
	}
}

func (m *machine) noticeGone(x *notice) {
	if !x.free {
		m.notices.remove(x)
	}
}
