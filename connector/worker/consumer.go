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
	wireID kv.RequestID  // by which P names it
	sentAt time.Time

	senders map[agent.Name]bool // whose completion was counted
	bytes   int64               // that arrived with them, as far as the agent can tell
	told    bool                // every completion told its bytes
	took    time.Duration

	silence deadline.Item[any]
}

// consumer is D's part of a machine.
type consumer struct {
	receives map[uint64]*receive
	byID     map[kv.RequestID]*receive // the ledger's id
	byWireID map[kv.RequestID]*receive
	gen      kv.Generation // of the last registration sent
}

func (c *consumer) init() {
	c.receives = make(map[uint64]*receive)
	c.byID = make(map[kv.RequestID]*receive)
	c.byWireID = make(map[kv.RequestID]*receive)
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
	if len(m.consumer.receives) > maxReceives {
		m.failReceive(r, connector.PhaseLimit, fmt.Sprintf("this rank receives %d requests already", maxReceives))
		return
	}
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
	r.wireID = wireID(r.reg.ID, r.gen)
	msg, err := wire.AppendPushReg(nil, m.pushReg(r, in.grant))
	if err != nil {
		m.failReceive(r, connector.PhaseRegistration, err.Error())
		return
	}
	m.consumer.byWireID[r.wireID] = r
	blocks := r.reg.Blocks.Len()
	m.emit(event.GrantIssued{Request: r.reg.ID, Peer: r.remote.engine, Blocks: blocks})
	m.do(register{r.serial, r.remote.agent.ID, msg})
	m.emit(event.RegistrationSent{Request: r.reg.ID, Peer: r.remote.engine, Blocks: blocks})
	m.stats.RegistrationsSent++
}

func (m *machine) onRegistrationFailed(in registrationFailed) {
	if r := m.consumer.receives[in.receive]; r != nil {
		m.stats.NotificationsFailed++
		m.failReceive(r, connector.PhaseRegistration, in.err.Error())
	}
}

// onCompletion counts a completion: once per P rank, only of ranks that may write, until as many
// have come as P has ranks for us (nixl-connector.md, section 5.2).
func (m *machine) onCompletion(now time.Time, from agent.Name, c wire.Completion, a *agent.Arrival) {
	r := m.consumer.byWireID[c.ID]
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
	case c.N != r.reg.Peer.TP:
		m.failReceive(r, connector.PhaseTransfer, fmt.Sprintf(
			"its completion is of tensor-parallel size %d, the request said %d", c.N, r.reg.Peer.TP))
		return
	}
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
	m.completeReceive(now, r)
}

// completeReceive ends a receive well, unless the agent saw that less arrived than was asked for.
func (m *machine) completeReceive(now time.Time, r *receive) {
	if want := m.wantedBytes(r); r.told && r.bytes < want {
		m.failReceive(r, connector.PhaseTransfer, fmt.Sprintf("its completion came after %d of %d bytes", r.bytes, want))
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
	m.endReceive(r, "received")
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
func (m *machine) onPushFail(from agent.Name, f wire.PushFail) {
	r := m.consumer.byWireID[f.ID]
	if r == nil || from != r.remote.name() {
		m.ignore(from, "PUSH_FAIL", fmt.Sprintf("request %s is not received from this agent", f.ID))
		return
	}
	m.failReceive(r, connector.PhaseTransfer,
		"the prefill engine gave it up: its prefill failed or was aborted, its lease ended, or the write failed")
}

// cancelReceive ends a receive that D does not want any more. One that has ended was reported.
func (m *machine) cancelReceive(id kv.RequestID) {
	if r := m.consumer.byID[id]; r != nil {
		m.failReceive(r, connector.PhaseCancel, "it was cancelled while it waited for KV")
	}
}

// receivesLost ends every receive from an agent that is gone, whichever side had connected.
func (m *machine) receivesLost(name agent.Name, err error) {
	for _, r := range m.consumer.inOrder() {
		if r.remote != nil && r.remote.name() == name {
			m.failReceive(r, connector.PhaseTransfer, fmt.Sprintf("the prefill engine's agent is gone: %v", err))
		}
	}
}

func (m *machine) receiveSilent(r *receive) {
	m.failReceive(r, connector.PhaseWait, fmt.Sprintf("nothing was heard of it for %v", m.timeout()+backstop))
}

// failReceive ends a receive: the grant is revoked first, so that whoever is told may use the
// blocks at once.
func (m *machine) failReceive(r *receive, phase connector.Phase, reason string) {
	err := &connector.Error{Request: r.reg.ID, Peer: r.reg.Peer.Engine, Phase: phase, Reason: reason}
	m.endReceive(r, string(phase))
	m.emit(event.ReceiveFailed{Request: r.reg.ID, Peer: r.reg.Peer.Engine, Phase: string(phase), Err: err})
	m.do(reportReceived{connector.ReceiveReport{ID: r.reg.ID, Err: err}})
	m.stats.ReceivesFailed++
}

// endReceive revokes the grant and forgets the receive.
func (m *machine) endReceive(r *receive, reason string) {
	if r.grant != (agent.GrantID{}) {
		m.do(revoke{r.grant})
		m.emit(event.GrantRevoked{Request: r.reg.ID, Reason: reason})
	}
	if r.remote != nil {
		m.do(unpin{r.remote})
	}
	m.timers.Remove(&r.silence)
	delete(m.consumer.receives, r.serial)
	delete(m.consumer.byID, r.reg.ID)
	if m.consumer.byWireID[r.wireID] == r {
		delete(m.consumer.byWireID, r.wireID)
	}
}

// shutdownConsumer ends every receive.
func (m *machine) shutdownConsumer() {
	for _, r := range m.consumer.inOrder() {
		m.failReceive(r, connector.PhaseCancel, "this engine is shutting down")
	}
}
