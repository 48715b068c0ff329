package worker

import (
	"cmp"
	"container/list"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// producer is P's part of a machine: the two matching tables and what grows out of them.
//
//	blocks (by identity) ──┐             ┌── waiting (by identity)
//	  hold ────────────────┴── push ─────┴──────── registration
//	   │ leases (by name in heartbeats)              │ senders, order (bounds)
type producer struct {
	holds  map[kv.RequestID]*hold
	blocks index[matchKey, hold] // holds without a registration
	leases index[leaseKey, hold]
	walk   uint64 // mark of the last heartbeat

	registrations map[regKey]*registration
	waiting       index[matchKey, registration]
	order         list.List // of *registration, oldest first
	ids           int       // blocks in waiting registrations
	senders       map[agent.Name]*sender

	pushes    map[uint64]*push
	transfers map[agent.TransferID]*push // posted, not stopped
	busy      line                       // pushes that the agent had no room for

	notes     index[matchKey, note]
	noteOrder list.List // of *note, oldest first

	prefills map[kv.RequestID]*prefill // that have not ended
	expected index[matchKey, prefill]  // the same

	withdrawn      map[matchKey]*withdrawal
	withdrawnOrder list.List     // of *withdrawal, oldest first
	newestLease    kv.Generation // that was taken
}

func (p *producer) init() {
	p.holds = make(map[kv.RequestID]*hold)
	p.blocks = newIndex[matchKey, hold]()
	p.leases = newIndex[leaseKey, hold]()
	p.registrations = make(map[regKey]*registration)
	p.waiting = newIndex[matchKey, registration]()
	p.senders = make(map[agent.Name]*sender)
	p.pushes = make(map[uint64]*push)
	p.transfers = make(map[agent.TransferID]*push)
	p.busy.init(&busyTimer{})
	p.notes = newIndex[matchKey, note]()
	p.prefills = make(map[kv.RequestID]*prefill)
	p.expected = newIndex[matchKey, prefill]()
	p.withdrawn = make(map[matchKey]*withdrawal)
}

// note remembers a request that ended without KV for anybody, for the registration that comes too
// late. One registration takes it; so does a new request of the same base id.
type note struct {
	phase  connector.Phase
	reason string
	nodes  []*node[matchKey, note]
	elem   *list.Element
	expiry deadline.Item[any]
}

// remember keeps a note of an ended request.
func (m *machine) remember(now time.Time, i identity, phase connector.Phase, reason string) {
	p := &m.producer
	if p.noteOrder.Len() >= maxNotes {
		oldest := p.noteOrder.Front().Value.(*note)
		m.timers.Remove(&oldest.expiry)
		p.forgetNote(oldest)
	}
	i.hasDigest = false // a dropped request has no prompt to compare
	n := &note{phase: phase, reason: reason}
	n.expiry.Value = n
	for _, key := range i.endedKeys() {
		n.nodes = append(n.nodes, p.notes.add(key, n))
	}
	n.elem = p.noteOrder.PushBack(n)
	m.timers.Set(&n.expiry, now.Add(m.timeout()))
}

// recall finds the note of a request that a registration names.
func (p *producer) recall(i identity) *note {
	i.hasDigest = false
	for _, key := range i.ended() {
		if n := p.notes.find(key); n != nil {
			return n
		}
	}
	return nil
}

func (p *producer) forgetNote(n *note) {
	p.notes.remove(n.nodes)
	n.nodes = nil
	p.noteOrder.Remove(n.elem)
}

// startPrefill learns that a request is there: notes of an earlier one of the same base
// id, which only a retry without transfer id can have, would be wrong from now on.
func (m *machine) startPrefill(id kv.RequestID) {
	key := matchKey{kind: byBase, bare: true, id: string(id.Base())}
	for n := m.producer.notes.find(key); n != nil; n = m.producer.notes.find(key) {
		m.timers.Remove(&n.expiry)
		m.producer.forgetNote(n)
	}
}

// dropRequest tells whoever waits for a request that it will not come, or remembers it for who
// registers later.
func (m *machine) dropRequest(now time.Time, d connector.DroppedRequest) {
	m.producer.endPrefill(d.ID)
	i := identity{transfer: d.TransferID, id: d.ID}
	for _, key := range i.ended() {
		if r := m.producer.waiting.find(key); r != nil {
			m.removeRegistration(r)
			m.dropRegistration(r, "its request has ended: "+d.Reason)
			m.sendFailure(r, connector.PhasePrefill, d.Reason)
			return
		}
	}
	m.remember(now, i, connector.PhasePrefill, d.Reason)
}

// sendFailure tells D that its registration will not be served, if D announces that it understands.
// Whether it does is in its metadata, so that D must be connected; a stock registration is not
// worth a handshake.
func (m *machine) sendFailure(r *registration, phase connector.Phase, reason string) {
	if r.reg.Extension == nil || r.sender.gone || r.gone {
		return
	}
	m.whenConnected(decodeAddr(r.reg), r.sender.name, func(p *remote) {
		switch {
		case p.control:
			m.send(p, "failure", 0, func(seq uint64, receipt wire.Token) wire.Notification {
				return &wire.Failed{Seq: seq, Receipt: receipt, RegistrationRef: r.ref(), Phase: string(phase), Reason: wire.BoundReason(reason)}
			})
		case p.pushFail:
			msg, err := wire.AppendPushFail(nil, wire.PushFail{ID: r.key.id, TP: m.cfg.TP})
			if err != nil {
				return
			}
			m.do(notify{p.engine, p.agent.ID, "PUSH_FAIL", msg})
		default:
			return
		}
		m.stats.FailuresSent++
	})
}

// shutdownProducer drops what waits, gives back blocks that nothing reads, and cancels transfers.
func (m *machine) shutdownProducer() {
	p := &m.producer
	for p.order.Len() > 0 {
		r := p.order.Front().Value.(*registration)
		m.removeRegistration(r)
		m.dropRegistration(r, "this engine is shutting down")
	}
	for p.noteOrder.Len() > 0 {
		n := p.noteOrder.Front().Value.(*note)
		m.timers.Remove(&n.expiry)
		p.forgetNote(n)
	}
	p.forgetPrefills()
	for p.withdrawnOrder.Len() > 0 {
		m.forgetWithdrawn(p.withdrawnOrder.Front().Value.(*withdrawal))
	}
	m.timers.Remove(&p.busy.timer)
	p.busy.clear()
	holds := slices.SortedFunc(maps.Values(p.holds), func(a, b *hold) int { return cmp.Compare(a.id, b.id) })
	for _, h := range holds {
		u := h.push
		if u != nil && (u.state == writing || u.state == posting) {
			if u.state == writing {
				m.do(cancel{u.transfer})
			}
			continue
		}
		m.endHold(h, connector.PhaseCancel, "this engine is shutting down", "cancelled")
		if u != nil {
			m.endPush(u)
		}
	}
}
