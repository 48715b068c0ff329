package worker

import (
	"container/list"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// regKey names a registration: D's id is unique in D. The agent that sent it is part of the name,
// so that nobody can touch another's registration by naming its engine.
type regKey struct {
	from   agent.Name
	engine kv.EngineID
	id     kv.RequestID
}

// registration is one wish of a D, waiting for P's blocks or paired with them.
type registration struct {
	key      regKey
	identity identity
	reg      *wire.PushReg
	sender   *sender
	via      agent.PeerID // the connection by which it was last named
	gone     bool         // that is lost

	expiry  deadline.Item[any]
	match   []*node[matchKey, registration] // filed for finished blocks
	inAll   *list.Element                   // of producer.waiting
	inOwn   *list.Element                   // of sender.waiting
	waiting bool
	push    *push // paired
}

// generation is 0 for a stock D, which has none.
func (r *registration) generation() kv.Generation {
	if r.reg.Extension == nil {
		return 0
	}
	return r.reg.Extension.Generation
}

// token is D's; zero of a stock D.
func (r *registration) token() wire.Token {
	if r.reg.Extension == nil {
		return wire.Token{}
	}
	return r.reg.Extension.Token
}

// ref is how D and we name it.
func (r *registration) ref() wire.RegistrationRef {
	return refOf(r.key.id, r.generation(), r.token())
}

// lease is the generation that the hand-off parameters told D; 0 if they did not.
func (r *registration) lease() kv.Generation {
	if r.reg.Extension == nil {
		return 0
	}
	return r.reg.Extension.Lease
}

func (r *registration) blocks() int { return r.reg.LocalBlockIDs.Len() }

// onRegistration files a registration and looks for its blocks. A second copy, or one that comes
// again after it was served, has no effect.
func (m *machine) onRegistration(now time.Time, from agent.PeerID, p *wire.PushReg) {
	r := &registration{key: regKey{from.Name, p.DecodeEngineID, p.RequestID}, reg: p, via: from}
	r.expiry.Value = r
	r.identity = identity{transfer: p.TransferID, id: p.RequestID}
	if p.Extension != nil {
		r.identity.digest, r.identity.hasDigest = connector.Digest(p.Extension.PromptDigest), true
	}
	s := m.producer.senderOf(from.Name)
	if s == nil {
		m.dropRegistration(r, "too many decode engines")
		return
	}
	r.sender, s.via = s, from
	if !s.fresh(r) {
		if first := s.registration(r.ref()); first != nil {
			first.via, first.gone = from, false
		}
		m.dropRegistration(r, "duplicate")
		m.acknowledge(r)
		return
	}
	if g := r.generation(); g != 0 {
		s.active[r.ref()] = r
	}
	if f := m.producer.expect(r.identity); f != nil {
		f.cancelled = "" // D wants it again
	}
	if old := m.producer.registrations[r.key]; old != nil {
		m.removeRegistration(old)
		m.dropRegistration(old, "replaced by a later one of the same id")
	}
	m.emit(event.RegistrationReceived{Request: p.RequestID, Peer: p.DecodeEngineID, Blocks: r.blocks()})
	m.stats.RegistrationsReceived++
	for _, key := range r.identity.lookups(inBlocks) {
		h := m.producer.blocks.find(key)
		if h == nil {
			continue
		}
		if reason := m.unfit(h, r); reason != "" {
			m.refuse(r, reason)
			return
		}
		m.unfile(h)
		m.pair(h, r, key.kind)
		m.acknowledge(r)
		return
	}
	if lease := r.lease(); lease != 0 && lease <= m.producer.newestLease {
		m.refuse(r, fmt.Sprintf("lease %d of its hand-off parameters has ended or was used", lease))
		return
	}
	if n := m.producer.recall(r.identity); n != nil {
		m.timers.Remove(&n.expiry)
		m.producer.forgetNote(n)
		m.dropRegistration(r, "its request has ended: "+n.reason)
		m.sendFailure(r, n.phase, n.reason)
		return
	}
	m.wait(now, r)
	m.acknowledge(r)
}

// offer looks for a registration of a hold without one, else files it. Registrations that can never
// fit are refused on the way.
func (m *machine) offer(now time.Time, h *hold) {
	for _, key := range h.identity.lookups(inRegistrations) {
		for r := m.producer.waiting.find(key); r != nil; r = m.producer.waiting.find(key) {
			m.removeRegistration(r)
			if reason := m.unfit(h, r); reason != "" {
				m.refuse(r, reason)
				continue
			}
			m.pair(h, r, key.kind)
			return
		}
	}
	for _, key := range h.identity.keys() {
		h.match = append(h.match, m.producer.blocks.add(key, h))
	}
}

// unfit says why a registration must never get these blocks; "" if it may.
func (m *machine) unfit(h *hold, r *registration) string {
	x := r.reg.Extension
	switch {
	case x != nil && x.Lease != 0 && x.Lease != h.gen:
		return fmt.Sprintf("lease %d of its hand-off parameters has ended; the request's lease is %d", x.Lease, h.gen)
	case r.identity.hasDigest && r.identity.digest != h.identity.digest:
		return promptsDiffer
	case x != nil && x.StartToken+x.NumTokens != h.have.NumTokens:
		return fmt.Sprintf("the decode engine's prompt has %d tokens, ours %d", x.StartToken+x.NumTokens, h.have.NumTokens)
	case len(r.reg.LocalBlockIDs) > 1:
		return fmt.Sprintf("blocks of %d KV-cache groups; one is supported", len(r.reg.LocalBlockIDs))
	case r.reg.DecodeTPSize != m.cfg.TP:
		return (&geometry.MismatchError{What: "tensor-parallel size", Local: fmt.Sprint(m.cfg.TP), Remote: fmt.Sprint(r.reg.DecodeTPSize)}).Error()
	}
	return ""
}

// refuse drops a registration that must not be served and tells its D.
func (m *machine) refuse(r *registration, reason string) {
	m.stats.RegistrationsRefused++
	m.dropRegistration(r, reason)
	m.sendFailure(r, connector.PhaseRegistration, reason)
}

// wait files a registration, within the bounds of its sender and of all senders.
func (m *machine) wait(now time.Time, r *registration) {
	p, s := &m.producer, r.sender
	for s.waiting.Len() > 0 && (s.waiting.Len() >= maxPerSender || s.blocks+r.blocks() > maxSenderBlocks) {
		m.overflow(s.waiting.Front().Value.(*registration))
	}
	for p.order.Len() > 0 && (p.order.Len() >= maxRegistrations || p.ids+r.blocks() > maxRegistrationBlocks) {
		m.overflow(p.order.Front().Value.(*registration))
	}
	r.waiting = true
	r.inAll, r.inOwn = p.order.PushBack(r), s.waiting.PushBack(r)
	s.blocks += r.blocks()
	p.ids += r.blocks()
	p.registrations[r.key] = r
	for _, key := range r.identity.keys() {
		r.match = append(r.match, p.waiting.add(key, r))
	}
	m.timers.Set(&r.expiry, now.Add(m.timeout()))
}

func (m *machine) overflow(r *registration) {
	m.removeRegistration(r)
	const reason = "overflow: too many registrations wait"
	m.dropRegistration(r, reason)
	m.sendFailure(r, connector.PhaseLimit, reason)
}

func (m *machine) registrationExpired(r *registration) {
	m.removeRegistration(r)
	reason := fmt.Sprintf("expired: no prefill of it within %v", m.timeout())
	m.dropRegistration(r, reason)
	m.sendFailure(r, connector.PhasePrefill, reason)
}

// removeRegistration takes a waiting registration out of all tables.
func (m *machine) removeRegistration(r *registration) {
	p := &m.producer
	if !r.waiting {
		return
	}
	r.waiting = false
	m.timers.Remove(&r.expiry)
	p.order.Remove(r.inAll)
	r.sender.waiting.Remove(r.inOwn)
	r.sender.blocks -= r.blocks()
	p.ids -= r.blocks()
	p.waiting.remove(r.match)
	r.match = nil
	if p.registrations[r.key] == r {
		delete(p.registrations, r.key)
	}
}

func (m *machine) dropRegistration(r *registration, reason string) {
	m.stats.RegistrationsDropped++
	if r.sender != nil {
		r.sender.forget(r)
	}
	m.emit(event.RegistrationDropped{Request: r.key.id, Peer: r.key.engine, Reason: reason})
}
