package worker

import (
	"container/list"
	"slices"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// prefill is a request of P that has not ended yet. It is known so that D can be told the truth
// about its registration.
type prefill struct {
	id        kv.RequestID
	identity  identity
	running   bool
	cancelled string // why D does not want it any more; "" while it does
	match     []*node[matchKey, prefill]
}

// queuePrefill learns of a request. Notes of an earlier one of the same base id, which only a retry
// without transfer id can have, would be wrong from now on.
func (m *machine) queuePrefill(q connector.QueuedRequest) {
	m.startPrefill(q.ID)
	p := &m.producer
	if p.prefills[q.ID] != nil || len(p.prefills) >= maxPrefills {
		return // its state stays "unmatched"
	}
	f := &prefill{id: q.ID, identity: identity{transfer: q.TransferID, id: q.ID, digest: q.Digest, hasDigest: true}}
	p.prefills[q.ID] = f
	for _, key := range f.identity.keys() {
		f.match = append(f.match, p.expected.add(key, f))
	}
	if f.identity.transfer != "" {
		if w := p.withdrawn[withdrawnKey(f.identity)]; w != nil {
			f.cancelled = w.reason
			m.forgetWithdrawn(w)
		}
	}
}

// runPrefill learns that it is being computed.
func (m *machine) runPrefill(id kv.RequestID) {
	m.startPrefill(id)
	if f := m.producer.prefills[id]; f != nil {
		f.running = true
	}
}

// endPrefill forgets a request that finished or was dropped. It answers why D does not want it.
func (p *producer) endPrefill(id kv.RequestID) (cancelled string) {
	f := p.prefills[id]
	if f == nil {
		return ""
	}
	p.expected.remove(f.match)
	delete(p.prefills, id)
	return f.cancelled
}

// forgetPrefills is for when ends of requests were left out: better no answer than a wrong one.
func (p *producer) forgetPrefills() {
	for _, f := range p.prefills {
		p.expected.remove(f.match)
	}
	clear(p.prefills)
}

// expect finds the request that a registration is for.
func (p *producer) expect(i identity) *prefill {
	for _, key := range i.lookups(inBlocks) {
		if f := p.expected.find(key); f != nil {
			return f
		}
	}
	return nil
}

// onBeat renews the leases of what a D waits for and answers where its registrations stand.
func (m *machine) onBeat(from agent.PeerID, b *wire.Beat) {
	m.extend(b.Names)
	s := m.producer.senders[from.Name]
	answers := make([]wire.StateAnswer, 0, len(b.Registrations))
	for _, ref := range b.Registrations {
		answers = append(answers, wire.StateAnswer{RegistrationRef: ref, State: m.stateOf(s, ref)})
		if r := s.registration(ref); r != nil {
			r.via, r.gone = from, false
			m.renew(r)
		}
	}
	m.tell(addrOfSender(b.From), from.Name, func(r *remote) {
		m.control(r, "state", &wire.States{Seq: b.Seq, Steps: m.outside.steps, Answers: answers})
		m.stats.StatesSent++
	})
}

// renew keeps a registration, or the blocks it is paired with, as long as its D shows that it lives.
func (m *machine) renew(r *registration) {
	if r.waiting {
		m.timers.Set(&r.expiry, m.now.Add(m.timeout()))
	}
	if r.push != nil {
		m.extendLease(r.push.hold)
	}
}

// acknowledge tells D at once that its registration is here.
func (m *machine) acknowledge(r *registration) {
	if r.generation() == 0 {
		return
	}
	s, ref := r.sender, r.ref()
	m.tell(decodeAddr(r.reg), s.name, func(p *remote) {
		state := m.stateOf(s, ref)
		if state == wire.StateUnknown {
			return // it has ended, which is told in another way
		}
		m.control(p, "state", &wire.States{Steps: m.outside.steps, Answers: []wire.StateAnswer{{RegistrationRef: ref, State: state}}})
		m.stats.StatesSent++
	})
}

// registration finds a registration that has not ended. The sender may be nil.
func (s *sender) registration(ref wire.RegistrationRef) *registration {
	if s == nil {
		return nil
	}
	return s.active[ref]
}

func (m *machine) stateOf(s *sender, ref wire.RegistrationRef) wire.RequestState {
	r := s.registration(ref)
	switch {
	case r == nil && s != nil && s.sent.has(ref.Token):
		return wire.StateSent
	case r == nil:
		return wire.StateUnknown
	case r.push != nil && r.push.state == writing:
		return wire.StateWriting
	case r.push != nil:
		return wire.StateFinished
	}
	switch f := m.producer.expect(r.identity); {
	case f == nil:
		return wire.StateUnmatched
	case f.running:
		return wire.StateRunning
	}
	return wire.StateQueued
}

// onCancel gives back what a D does not want any more, and acknowledges it once nothing of it is
// written.
func (m *machine) onCancel(from agent.Name, c *wire.Cancel) {
	addr, ref := addrOfSender(c.From), c.RegistrationRef
	s := m.producer.senders[from]
	if c.Generation != 0 && s == nil {
		s = m.producer.senderOf(from)
	}
	r := s.registration(ref)
	if r == nil && c.Generation != 0 {
		r = m.producer.orphan(regKey{from, c.From.Engine, c.ID}, ref)
	}
	if r != nil && r.push != nil && (r.push.state == writing || r.push.state == posting) {
		m.cancelPush(r.push, addr, c)
		return
	}
	m.ack(from, addr, wire.Ack{Seq: c.Seq, Receipt: c.Receipt})
	if !m.correspondent(from).seen.fresh(c.Receipt, maxLetters) {
		return
	}
	m.cancelReceived(c)
	reason := "the decode engine gave it up: " + c.Reason
	i := identity{transfer: c.TransferID, id: c.ID, digest: connector.Digest(c.Digest), hasDigest: c.Digest != [32]byte{}}
	if c.Generation != 0 {
		if s != nil {
			s.void.fresh(c.Token, replayWindow)
		}
		switch {
		case r == nil && s != nil && s.sent.has(c.Token):
			return // it has what it asked for
		case r == nil:
		case r.push != nil:
			h := r.push.hold
			m.dropRegistration(r, reason)
			m.endPush(r.push)
			m.endHold(h, connector.PhaseCancel, reason, "cancelled")
			return
		default:
			i = r.identity
			m.removeRegistration(r)
			m.dropRegistration(r, reason)
		}
	}
	m.unwanted(i, c.RemoteID, reason)
}

func (m *machine) cancelReceived(c *wire.Cancel) {
	m.stats.CancelsReceived++
	m.emit(event.CancelReceived{Request: c.ID, Peer: c.From.Engine, Reason: c.Reason})
}

// orphan finds a registration that is still being written although its sender's connection was lost
// since. There are as many at most as transfers in flight.
func (p *producer) orphan(key regKey, ref wire.RegistrationRef) *registration {
	for _, u := range p.pushes {
		if u.reg.sender.gone && u.reg.key == key && u.reg.generation() == ref.Generation && same(u.reg.token(), ref.Token) {
			return u.reg
		}
	}
	return nil
}

// cancelPush stops a WRITE under way. Every copy of the cancel is acknowledged when it has.
func (m *machine) cancelPush(u *push, addr connector.PeerAddr, c *wire.Cancel) {
	if !u.byD {
		u.byD = true
		m.cancelReceived(c)
		m.correspondent(u.reg.sender.name).seen.fresh(c.Receipt, maxLetters)
		m.stopPush(u, "the decode engine gave it up: "+c.Reason)
	}
	u.ackAddr = addr
	a := wire.Ack{Seq: c.Seq, Receipt: c.Receipt}
	if !slices.Contains(u.acks, a) && len(u.acks) < maxLetterTries {
		u.acks = append(u.acks, a)
	}
}

// stopPush ends a WRITE that is with the agent, if nobody has yet: its blocks come back when it has
// stopped. One that is being posted is cancelled when the agent has answered.
func (m *machine) stopPush(u *push, reason string) {
	if u.unwanted != "" {
		return
	}
	u.unwanted = reason
	if u.state == writing {
		m.do(cancel{u.transfer})
	}
}

// unwanted finds what a cancel is about: blocks that wait for a registration, or a prefill that has
// not ended. Only names that leave no doubt count, since a sibling (n > 1, several prompts) may
// share the others.
func (m *machine) unwanted(i identity, remote kv.RequestID, reason string) {
	p := &m.producer
	keys := i.sure()
	for _, key := range keys {
		if h := p.blocks.find(key); h != nil {
			m.endHold(h, connector.PhaseCancel, reason, "cancelled")
			return
		}
	}
	if h := p.holds[remote]; h != nil && h.push == nil && i.hasDigest && h.identity.digest == i.digest && !child(i.id) {
		m.endHold(h, connector.PhaseCancel, reason, "cancelled")
		return
	}
	for _, key := range keys {
		if f := p.expected.find(key); f != nil {
			f.cancelled = reason
			return
		}
	}
	if i.transfer != "" { // no other dispatch has it
		m.rememberWithdrawn(withdrawnKey(i), reason)
	}
}

// withdrawal is a cancel that came before the request that it is about.
type withdrawal struct {
	key    matchKey
	reason string
	elem   *list.Element
	expiry deadline.Item[any]
}

func withdrawnKey(i identity) matchKey {
	return matchKey{kind: byTransferBase, transfer: i.transfer, id: string(i.id.Base())}
}

func (m *machine) rememberWithdrawn(key matchKey, reason string) {
	p := &m.producer
	if p.withdrawn[key] != nil {
		return
	}
	if p.withdrawnOrder.Len() >= maxNotes {
		m.forgetWithdrawn(p.withdrawnOrder.Front().Value.(*withdrawal))
	}
	w := &withdrawal{key: key, reason: reason}
	w.expiry.Value = w
	w.elem = p.withdrawnOrder.PushBack(w)
	p.withdrawn[key] = w
	m.timers.Set(&w.expiry, m.now.Add(m.timeout()))
}

func (m *machine) forgetWithdrawn(w *withdrawal) {
	m.timers.Remove(&w.expiry)
	m.producer.withdrawnOrder.Remove(w.elem)
	delete(m.producer.withdrawn, w.key)
}

// sure are the lookups that no sibling of the same dispatch answers.
func (i identity) sure() []matchKey {
	var out []matchKey
	for _, key := range i.lookups(inBlocks) {
		if key.kind != byTransfer && key.kind != byTransferDigest {
			out = append(out, key)
		}
	}
	return out
}

// child tells whether an id is of one of several answers to one prompt (`<n>_<id>`).
func child(id kv.RequestID) bool {
	for i := range len(id) {
		if id[i] == '_' {
			return i > 0
		}
		if id[i] < '0' || id[i] > '9' {
			return false
		}
	}
	return false
}

// extend renews the leases of all that goes by these names. A name of several requests extends all of
// them; unknown names mean nothing.
func (m *machine) extend(names []kv.RequestID) {
	m.producer.walk++
	for _, id := range names {
		for _, key := range []leaseKey{
			{leaseID, string(id)}, {leaseTransfer, string(id)}, {leaseBase, string(id.Base())}, {leaseClient, string(id)},
		} {
			m.producer.leases.visit(key, m.producer.walk, m.extendLease)
		}
	}
}

// extendLease guarantees a hold two thirds of a lease from now on. What is kept for a next turn is not
// kept longer: nobody waits for it.
func (m *machine) extendLease(h *hold) {
	if h.earlier {
		return
	}
	until := m.now.Add(connector.LeaseExtension(m.cfg.Lease))
	at, running := h.lease.At()
	if !running || !at.Before(until) {
		return
	}
	m.timers.Set(&h.lease, until)
	m.emit(event.LeaseExtended{Request: h.id, Until: until.Sub(m.now)})
}
