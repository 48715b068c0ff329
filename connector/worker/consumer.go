package worker

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// receive is one request of D whose KV is to come. It ends exactly once, by endReceive.
type receive struct {
	serial uint64
	reg    connector.Registration

	remote *remote       // from the handshake on
	grant  agent.GrantID // zero before it was given
	gen    kv.Generation // of the registration, given when it is sent
	token  wire.Token    // of the same: what P says of it brings this along
	wireID kv.RequestID  // by which P names it
	sentAt time.Time

	senders map[agent.Name]bool // whose completion was counted
	bytes   int64               // that arrived with them, as far as the agent can tell
	told    bool                // every completion told its bytes
	took    time.Duration

	silence deadline.Item[any]

	// What P that understands control messages says of it.
	tries       int       // registrations sent
	triedAt     time.Time // the last of them
	acked       bool      // P has it
	ackedAt     uint64    // the last number sent to P before we knew
	state       wire.RequestState
	steps       uint64    // of P's engine, when it last said that it queues or computes
	unmatchedAt time.Time // since when P has no prefill for it
	sentAtSeq   uint64    // the last number sent to P before it said that all is written
	progressed  time.Time // when the ledger was last told

	reported    bool             // an event has said why it fails
	quarantined *connector.Error // not nil: it has ended with this, but P may still write
}

// consumer is D's part of a machine.
type consumer struct {
	receives map[uint64]*receive
	byID     map[kv.RequestID]*receive // the ledger's id
	byWireID map[kv.RequestID]*receive
	gen      kv.Generation // of the last registration sent
	pulses   map[agent.Name]*pulse

	quarantined, quarantinedBlocks int
}

func (c *consumer) init() {
	c.receives = make(map[uint64]*receive)
	c.byID = make(map[kv.RequestID]*receive)
	c.byWireID = make(map[kv.RequestID]*receive)
	c.pulses = make(map[agent.Name]*pulse)
}

// inOrder is the receives, oldest first.
func (c *consumer) inOrder() []*receive {
	return slices.SortedFunc(maps.Values(c.receives), func(a, b *receive) int { return cmp.Compare(a.serial, b.serial) })
}

// wireID is the id under which P gets a registration. A completion comes back with nothing but this
// id, so it must not be one of an earlier request. With the engine's random suffix it never is; an
// id without one gets the registration's generation in that place, where every pairing rule of
// stock and kvferry looks past it (nixl-connector.md, section 7.4).
func wireID(id kv.RequestID, gen kv.Generation) kv.RequestID {
	if string(id.Base()) != string(id) {
		return id
	}
	return kv.RequestID(fmt.Sprintf("%s-%08x", id, uint32(gen)))
}

// startReceive begins with the handshake; heartbeats have usually made it already.
func (m *machine) startReceive(now time.Time, reg connector.Registration) {
	if m.consumer.byID[reg.ID] != nil {
		m.ignore("", "registration of our ledger", fmt.Sprintf("request %s is being received already", reg.ID))
		return
	}
	r := &receive{serial: m.nextSerial(), reg: reg, sentAt: now, told: true}
	r.silence.Value = r
	m.consumer.receives[r.serial] = r
	m.consumer.byID[reg.ID] = r
	switch {
	case len(m.consumer.receives) > maxReceives:
		m.failReceive(r, connector.PhaseLimit, fmt.Sprintf("this rank receives %d requests already", maxReceives))
		return
	case m.quarantineFull():
		m.failReceive(r, connector.PhaseLimit, fmt.Sprintf(
			"%d blocks wait for the word of prefill engines that they are not written any more; no more than %d are risked",
			m.consumer.quarantinedBlocks, m.cfg.QuarantineBlocks))
		return
	}
	m.beatFor(r)
	m.timers.Set(&r.silence, now.Add(m.timeout()+backstop))
	m.need(reg.Peer, waiter{receive: r.serial})
}

// receiveConnected asks for the grant: exactly the registered blocks, for P's agent alone.
func (m *machine) receiveConnected(serial uint64, p *remote) {
	r := m.consumer.receives[serial]
	if r == nil {
		return
	}
	if p.err != nil {
		m.failReceive(r, connector.PhaseHandshake, p.err.Error())
		return
	}
	if len(r.reg.Blocks) != 1 {
		m.failReceive(r, connector.PhaseRegistration, fmt.Sprintf("blocks of %d KV-cache groups; one is supported", len(r.reg.Blocks)))
		return
	}
	ranges, err := m.cfg.Layout.Ranges(r.reg.Blocks[0], geometry.Decode)
	if err != nil {
		m.failReceive(r, connector.PhaseRegistration, err.Error())
		return
	}
	r.remote = p
	m.do(pin{p})
	m.do(grant{r.serial, p.name(), ranges})
}

func (m *machine) receiveUnconnected(serial uint64, err error) {
	if r := m.consumer.receives[serial]; r != nil {
		r.reported = true // by the handshake
		m.failReceive(r, connector.PhaseHandshake, err.Error())
	}
}

// onGranted sends the registration.
func (m *machine) onGranted(now time.Time, in granted) {
	r := m.consumer.receives[in.receive]
	if r == nil {
		if in.err == nil {
			m.do(revoke{in.grant})
		}
		return
	}
	if in.err != nil {
		m.failReceive(r, connector.PhaseRegistration, in.err.Error())
		return
	}
	m.consumer.gen++
	r.grant, r.gen, r.sentAt = in.grant, m.consumer.gen, now
	r.wireID, r.token = wireID(r.reg.ID, r.gen), m.tokens.next()
	msg, err := wire.AppendPushReg(nil, m.pushReg(r, in.grant))
	if err != nil {
		m.failReceive(r, connector.PhaseRegistration, err.Error())
		return
	}
	m.consumer.byWireID[r.wireID] = r
	blocks := r.reg.Blocks.Len()
	m.emit(event.GrantIssued{Request: r.reg.ID, Peer: r.remote.engine, Blocks: blocks})
	r.tries, r.triedAt = 1, now
	m.listen(r)
	m.do(register{r.serial, r.remote.agent.ID, msg})
	m.emit(event.RegistrationSent{Request: r.reg.ID, Peer: r.remote.engine, Blocks: blocks})
	m.stats.RegistrationsSent++
}

func (m *machine) onRegistrationFailed(in registrationFailed) {
	r := m.consumer.receives[in.receive]
	if r == nil || r.quarantined != nil {
		return
	}
	m.stats.NotificationsFailed++
	m.emit(event.NotificationFailed{Peer: r.remote.engine, What: "registration", Err: in.err})
	r.reported = true
	if r.tries == 1 { // P has never heard of it
		m.endFailed(r, connector.PhaseRegistration, in.err.Error(), true)
		return
	}
	m.failReceive(r, connector.PhaseRegistration, in.err.Error())
}

// registerAgain repeats a registration that P has not acknowledged. P takes its generation once. Before P's first
// word it may be shaking hands with us, and only its silence counts.
func (m *machine) registerAgain(r *receive, p *remote) {
	if x := m.consumer.pulses[p.name()]; x != nil && !x.spoke {
		r.tries = min(r.tries, maxRegistrationTries-2)
	}
	if r.tries >= maxRegistrationTries {
		m.failReceive(r, connector.PhaseRegistration, fmt.Sprintf(
			"engine %q answers, but has not acknowledged it after %d tries", r.reg.Peer.Engine, r.tries))
		return
	}
	msg, err := wire.AppendPushReg(nil, m.pushReg(r, r.grant))
	if err != nil {
		return // it could be written before
	}
	r.tries++
	r.triedAt = m.now
	m.do(register{r.serial, p.agent.ID, msg})
	m.stats.RegistrationsRepeated++
}

// onCompletion counts a completion: once per P rank, only of ranks that may write, until as many
// have come as P has ranks for us (nixl-connector.md, section 5.2).
//
// Where the agent tells arrivals, a completion that came with no WRITE is ignored, if bytes were asked
// for: only a WRITE proves that its sender has our permission, and anybody may say P's name. To fail
// the receive would let anybody end it. P's own completion always comes with its WRITE.
func (m *machine) onCompletion(now time.Time, sender agent.PeerID, c wire.Completion, a *agent.Arrival) {
	r, from := m.consumer.byWireID[c.ID], sender.Name
	switch {
	case r == nil:
		m.ignore(from, "completion", fmt.Sprintf("request %s is not being received", c.ID))
		return
	case from != r.remote.name():
		m.ignore(from, "completion", fmt.Sprintf("request %s is not received from this agent", c.ID))
		return
	case r.senders[from]:
		m.ignore(from, "completion", fmt.Sprintf("request %s has this agent's completion already", c.ID))
		return
	case a == nil && m.tellsArrivals && m.wantedBytes(r) > 0:
		m.ignore(from, "completion", fmt.Sprintf("of request %s nothing was written with it", c.ID))
		return
	case c.N != r.reg.Peer.TP && r.quarantined == nil:
		m.failReceive(r, connector.PhaseTransfer, fmt.Sprintf(
			"its completion is of tensor-parallel size %d, the request said %d", c.N, r.reg.Peer.TP))
		return
	}
	m.hear(sender)
	if r.senders == nil {
		r.senders = make(map[agent.Name]bool, 1)
	}
	r.senders[from] = true
	if a == nil {
		r.told = false
	} else {
		r.bytes += a.Bytes
		r.took = max(r.took, a.Took)
	}
	if expected := r.reg.Peer.PP * max(1, c.N/m.cfg.TP); len(r.senders) < expected {
		return
	}
	if r.quarantined != nil {
		m.endQuarantine(r, "the prefill engine has written it after all")
		return
	}
	m.completeReceive(now, r)
}

// completeReceive ends a receive well, unless the agent saw that less arrived than was asked for.
func (m *machine) completeReceive(now time.Time, r *receive) {
	if want := m.wantedBytes(r); r.told && r.bytes < want {
		m.endFailed(r, connector.PhaseTransfer, fmt.Sprintf("its completion came after %d of %d bytes", r.bytes, want), true)
		return
	}
	facts := connector.TransferFacts{
		Blocks:    r.reg.Blocks.Len(),
		Bytes:     r.bytes,
		Took:      r.took,
		Waited:    now.Sub(r.sentAt),
		Transport: r.remote.agent.Transport,
		Why:       r.remote.agent.Why,
	}
	m.revokeGrant(r, "received")
	m.forgetReceive(r)
	m.emit(event.ReceiveFinished{Request: r.reg.ID, Peer: r.reg.Peer.Engine, Blocks: facts.Blocks, Bytes: facts.Bytes,
		Took: facts.Took, Waited: facts.Waited, Transport: facts.Transport, Why: facts.Why})
	m.do(reportReceived{connector.ReceiveReport{ID: r.reg.ID, Transfer: facts}})
	m.stats.Received++
}

// wantedBytes is the KV of the tokens that were asked for, in whole kernel blocks.
func (m *machine) wantedBytes(r *receive) int64 {
	tokens := r.reg.NumTokens - r.reg.StartToken
	size := m.cfg.Layout.BlockSize
	return int64((tokens+size-1)/size) * m.cfg.Layout.Bytes()
}

// onPushFail ends a receive that P gave up.
func (m *machine) onPushFail(from agent.PeerID, f wire.PushFail) {
	r := m.consumer.byWireID[f.ID]
	if r == nil || from.Name != r.remote.name() {
		m.ignore(from.Name, "PUSH_FAIL", fmt.Sprintf("request %s is not received from this agent", f.ID))
		return
	}
	if r.remote.control { // it says so with a failure, which strangers cannot forge
		m.ignore(from.Name, "PUSH_FAIL", fmt.Sprintf("of request %s this agent would send a failure", f.ID))
		return
	}
	if r.quarantined != nil {
		m.endQuarantine(r, "the prefill engine will not write it")
		return
	}
	m.endFailed(r, connector.PhaseTransfer,
		"the prefill engine gave it up: its prefill failed or was aborted, its lease ended, or the write failed", true)
}

// cancelReceive ends a receive that D does not want any more. One that has ended was reported.
func (m *machine) cancelReceive(id kv.RequestID) {
	r := m.consumer.byID[id]
	if r == nil || r.quarantined != nil {
		return
	}
	if r.gen == 0 {
		m.withdraw(connector.Withdrawal{ID: r.reg.ID, TransferID: r.reg.TransferID, Digest: r.reg.Digest, Peer: r.reg.Peer,
			Reason: "its decode request was cancelled before it was registered"})
	}
	m.failReceive(r, connector.PhaseCancel, "it was cancelled while it waited for KV")
}

// receivesLost ends every receive from an agent that is gone.
func (m *machine) receivesLost(name agent.Name, err error) {
	for _, r := range m.consumer.inOrder() {
		if r.remote != nil && r.remote.name() == name && r.quarantined == nil {
			m.endFailed(r, connector.PhaseTransfer, fmt.Sprintf("the prefill engine's agent is gone: %v", err), false)
		}
	}
}

func (m *machine) receiveSilent(r *receive) {
	m.failReceive(r, connector.PhaseWait, fmt.Sprintf("its prefill engine showed no progress for %v", m.timeout()+backstop))
}

// failReceive ends a receive that this side gives up: P is told, if it may know of it.
func (m *machine) failReceive(r *receive, phase connector.Phase, reason string) {
	m.revokeGrant(r, string(phase))
	if r.gen != 0 && r.remote.control && !m.irrevocable && !m.closing {
		m.cancelAt(r, reason, false)
	}
	m.endFailed(r, phase, reason, false)
}

// endFailed ends a receive. The grant is revoked first, so that whoever is told may use the blocks at
// once; where that does not keep P from writing and it is not known to have stopped, the blocks go
// into quarantine.
func (m *machine) endFailed(r *receive, phase connector.Phase, reason string, stopped bool) {
	err := &connector.Error{Request: r.reg.ID, Peer: r.reg.Peer.Engine, Phase: phase, Reason: reason}
	m.revokeGrant(r, string(phase))
	if m.irrevocable && r.gen != 0 && !stopped && !m.closing {
		m.quarantine(r, err)
		m.timers.Remove(&r.silence)
		m.unlisten(r, false)
		m.beats.drop(m, r)
		if r.remote.control {
			m.cancelAt(r, reason, true)
		}
		return
	}
	m.forgetReceive(r)
	m.reportFailed(r, err)
}

func (m *machine) reportFailed(r *receive, err *connector.Error) {
	m.emit(event.ReceiveFailed{Request: r.reg.ID, Peer: r.reg.Peer.Engine, Phase: string(err.Phase), Told: r.reported, Err: err})
	m.do(reportReceived{connector.ReceiveReport{ID: r.reg.ID, Err: err}})
	m.stats.ReceivesFailed++
}

func (m *machine) revokeGrant(r *receive, reason string) {
	if r.grant != (agent.GrantID{}) {
		m.do(revoke{r.grant})
		m.emit(event.GrantRevoked{Request: r.reg.ID, Reason: reason})
		r.grant = agent.GrantID{}
	}
}

// forgetReceive drops a receive whose grant is revoked.
func (m *machine) forgetReceive(r *receive) {
	if r.remote != nil {
		m.do(unpin{r.remote})
	}
	m.timers.Remove(&r.silence)
	m.unlisten(r, true)
	m.beats.drop(m, r)
	delete(m.consumer.receives, r.serial)
	delete(m.consumer.byID, r.reg.ID)
	if m.consumer.byWireID[r.wireID] == r {
		delete(m.consumer.byWireID, r.wireID)
	}
}

// shutdownConsumer ends every receive, and every quarantine: the agent closes, and with it all
// connections.
func (m *machine) shutdownConsumer() {
	for _, r := range m.consumer.inOrder() {
		if r.quarantined != nil {
			m.endQuarantine(r, "this engine is shutting down")
			continue
		}
		m.endFailed(r, connector.PhaseCancel, "this engine is shutting down", true)
	}
}
