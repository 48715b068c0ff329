package worker

import (
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// machine is everything that one rank decides. It has no agent, socket, clock, timer or goroutine:
// Step takes what happened and returns what is to be done. Its owner is the writer.
type machine struct {
	cfg Config // the facts; Agent and Peers are not used

	flights map[connector.PeerAddr]*flight // connects that were asked for and not answered
	remotes map[kv.EngineID]*remote
	serial  uint64                 // of receives and pushes
	named   map[agent.Name]*remote // the same remotes
	letters correspondence
	tokens  tokens
	notices notices

	// irrevocable: the agent cannot revoke grants.
	irrevocable bool
	// tellsArrivals: of every WRITE the agent tells the bytes that came.
	tellsArrivals bool
	now           time.Time // of the Step under way
	outside       outside   // at the Step under way

	consumer consumer
	producer producer
	fetcher  fetcher
	lender   lender
	beats    beats

	timers  deadline.Queue[any] // *receive, *hold, *registration, *note, *beat, *busyTimer, *pulse, *letter, *withdrawal, *fetch, *readBusyTimer
	stats   Stats
	closing bool

	acts []action // of the Step under way
}

// outside is what goes on around a machine and is no input, since it wakes nobody. The driver brings it up to
// date before a Step.
type outside struct {
	steps uint64    // of the engine
	asked time.Time // when somebody last asked our side channel, as a peer does that shakes hands with us
}

// waiter is who waits for a connect.
type waiter struct {
	receive uint64  // or
	push    uint64  // or
	fetch   uint64  // or
	notice  *notice // or
	beat    *beat
}

func newMachine(cfg Config) *machine {
	m := &machine{
		cfg:     cfg,
		flights: make(map[connector.PeerAddr]*flight),
		remotes: make(map[kv.EngineID]*remote),
		named:   make(map[agent.Name]*remote),
	}
	m.letters.init()
	m.notices.init()
	m.consumer.init()
	m.producer.init()
	m.fetcher.init()
	m.lender.init()
	m.beats.init()
	return m
}

// Step takes one input and returns what is to be done, in order. The slice is valid until the next
// Step.
func (m *machine) Step(now time.Time, in input) []action {
	clear(m.acts)
	m.acts = m.acts[:0]
	m.now = now
	switch in := in.(type) {
	case stepMeta:
		m.onMeta(now, in.StepMeta)
	case leftOut:
		m.producer.forgetPrefills()
	case connected:
		m.onConnected(now, in)
	case connectFailed:
		m.onConnectFailed(now, in)
	case granted:
		m.onGranted(now, in)
	case registrationFailed:
		m.onRegistrationFailed(in)
	case posted:
		m.onPosted(in)
	case lent:
		m.onLent(in)
	case readPosted:
		m.onReadPosted(in)
	case transferResult:
		if !m.readResult(in.Result) {
			m.onResult(in.Result)
		}
	case transferStopped:
		if !m.readStopped(in.Stopped) {
			m.onStopped(in.Stopped)
		}
	case notification:
		m.onNotification(now, in.Notification)
	case peerLost:
		m.onPeerLost(now, in.PeerLost)
	case tick:
	case shutdown:
		m.onShutdown()
	}
	m.onTick(now)
	return m.acts
}

// Deadline is the next moment at which a tick has something to do; false when nothing waits.
func (m *machine) Deadline() (time.Time, bool) { return m.timers.Next() }

func (m *machine) do(a action)            { m.acts = append(m.acts, a) }
func (m *machine) emit(e event.Event)     { m.do(emit{e}) }
func (m *machine) nextSerial() uint64     { m.serial++; return m.serial }
func (m *machine) ourRanks() []kv.Rank    { return []kv.Rank{m.cfg.Rank} }
func (m *machine) timeout() time.Duration { return m.cfg.RegistrationTimeout }

// onMeta takes the ledger's wishes in the order of the fields.
func (m *machine) onMeta(now time.Time, s connector.StepMeta) {
	if m.closing {
		m.refuseMeta(s)
		return
	}
	for _, r := range s.Registrations {
		m.startReceive(now, r)
	}
	for _, r := range s.Reads {
		m.startFetch(now, r)
	}
	for _, d := range s.Dropped {
		m.dropRequest(now, d)
	}
	for _, q := range s.Queued {
		m.queuePrefill(q)
	}
	for _, id := range s.Processing {
		m.runPrefill(id)
	}
	for _, f := range s.Finished {
		m.startHold(now, f)
	}
	for _, r := range s.Released {
		m.releaseHold(now, r)
	}
	for _, id := range s.Cancels {
		m.cancelReceive(id)
		m.cancelFetch(id)
	}
	for _, w := range s.Withdrawn {
		if m.cfg.Mode == kv.Pull {
			m.releaseAt(w.Peer, w.Remote, w.Readers)
			continue
		}
		m.withdraw(w)
	}
	if s.HasHeartbeats {
		m.setHeartbeats(now, s.Heartbeats)
	}
}

// refuseMeta ends what comes in after a shutdown, so that the ledger is not left waiting.
func (m *machine) refuseMeta(s connector.StepMeta) {
	for _, r := range s.Registrations {
		m.do(reportReceived{connector.ReceiveReport{ID: r.ID, Err: &connector.Error{
			Request: r.ID, Peer: r.Peer.Engine, Phase: connector.PhaseCancel, Reason: "this engine is shutting down"}}})
	}
	for _, r := range s.Reads {
		m.do(reportReceived{connector.ReceiveReport{ID: r.ID, Err: &connector.Error{
			Request: r.ID, Peer: r.Peer.Engine, Phase: connector.PhaseCancel, Reason: "this engine is shutting down"}}})
	}
	for _, f := range s.Finished {
		m.do(reportSent{connector.SentReport{ID: f.ID, Err: &connector.Error{
			Request: f.ID, Phase: connector.PhaseCancel, Reason: "this engine is shutting down"}}})
	}
}

// flight is a connect under way.
type flight struct {
	waiters []waiter
	by      agent.Name // that it is for; "" for our own work
}

// by is the agent that wants to be told something; "" for our own work.
func (w waiter) by() agent.Name {
	if w.notice != nil {
		return w.notice.to
	}
	return ""
}

// need asks for an engine on behalf of a waiter. One connect per address is under way; whoever
// needs the same joins it. What began for a peer that wants to be told something, and is needed by our own
// work now, is asked for once more, so that the peer table knows: the second answer finds nobody waiting.
func (m *machine) need(addr connector.PeerAddr, w waiter) {
	f := m.flights[addr]
	if f != nil {
		f.waiters = append(f.waiters, w)
		if f.by == "" || w.by() != "" {
			return
		}
		f.by = ""
	} else {
		m.flights[addr] = &flight{[]waiter{w}, w.by()}
	}
	m.do(connect{addr, m.ourRanks(), w.by()})
}

// landed ends a connect and tells who waited for it.
func (m *machine) landed(addr connector.PeerAddr) []waiter {
	f := m.flights[addr]
	if f == nil {
		return nil
	}
	delete(m.flights, addr)
	return f.waiters
}

func (m *machine) onConnected(now time.Time, in connected) {
	waiting := m.landed(in.addr)
	before := m.remotes[in.conn.Engine]
	r := m.remoteOf(in.addr, in.conn)
	if before != nil && r.agent.ID.Gen != 0 && before.name() != r.name() {
		m.restarted(before)
	}
	for _, w := range waiting {
		switch {
		case w.receive != 0:
			m.receiveConnected(w.receive, r)
		case w.push != 0:
			m.pushConnected(now, w.push, r)
		case w.fetch != 0:
			m.fetchConnected(w.fetch, r)
		case w.notice != nil:
			m.noticeConnected(w.notice, r)
		case w.beat != nil:
			m.beatConnected(w.beat, r)
		}
	}
}

func (m *machine) onConnectFailed(now time.Time, in connectFailed) {
	waiting := m.landed(in.addr)
	for _, w := range waiting {
		switch {
		case w.receive != 0:
			m.receiveUnconnected(w.receive, in.err)
		case w.push != 0:
			m.pushUnconnected(w.push, in.err)
		case w.fetch != 0:
			m.fetchUnconnected(w.fetch, in.err)
		case w.notice != nil:
			m.noticeGone(w.notice)
		case w.beat != nil:
			w.beat.asked = false
		}
	}
}

// onNotification tells the kinds of notifications apart. What cannot be read costs its sender
// nothing more than a counter, and nobody else anything.
func (m *machine) onNotification(now time.Time, n agent.Notification) {
	if m.closing {
		return
	}
	m.reached(n.From)
	parsed, err := wire.ParseNotification(n.Msg)
	if err != nil {
		m.ignore(n.From.Name, "notification", err.Error())
		return
	}
	switch msg := parsed.(type) {
	case *wire.PushReg:
		if m.cfg.Mode == kv.Pull {
			m.ignore(n.From.Name, "registration", "this engine has the mode pull, the decode engine push: start both with the same --mode")
			return
		}
		m.onRegistration(now, n.From, msg)
	case wire.Heartbeat:
		m.extend(msg.IDs)
	case wire.Completion:
		if m.cfg.Mode == kv.Pull {
			m.onStockReadDone(n.From.Name, msg)
			return
		}
		m.onCompletion(now, n.From, msg, n.Arrival)
	case wire.PushFail:
		m.onPushFail(n.From, msg)
	case *wire.Beat:
		m.onBeat(n.From, msg)
	case *wire.States:
		m.onStates(n.From, msg)
	case *wire.Cancel:
		if m.cfg.Mode == kv.Pull {
			m.onClaimCancelled(n.From.Name, msg)
			return
		}
		m.onCancel(n.From.Name, msg)
	case *wire.Claim:
		m.onClaim(n.From, msg)
	case *wire.ReadDone:
		m.onClaimRead(n.From.Name, msg)
	case *wire.Claimed:
		m.onClaimed(n.From.Name, msg)
	case *wire.Failed:
		if m.cfg.Mode == kv.Pull {
			m.onClaimFailed(n.From.Name, msg)
			return
		}
		m.onFailed(n.From, msg)
	case *wire.Ack:
		m.onAck(n.From, msg)
	}
}

// ignore counts a notification that nobody waits for or that cannot be read.
func (m *machine) ignore(from agent.Name, what, reason string) {
	m.stats.Ignored++
	m.emit(event.NotificationDropped{From: string(from), What: what, Reason: reason})
}

// onPeerLost ends what an agent has under way. A connection that we made is to the agent itself. One by
// which we were reached is somebody's who says the agent's name: it counts for what was said by it and
// for no more than that.
func (m *machine) onPeerLost(now time.Time, l agent.PeerLost) {
	if l.Inbound {
		m.inboundLost(now, l)
		return
	}
	m.do(lost{l.Peer, l.Err})
	m.forgetAgent(l.Peer)
	m.receivesLost(l.Peer.Name, l.Err)
	m.fetchesLost(l.Peer.Name, l.Err)
	m.claimsLost(l.Peer.Name, anyConnection)
	m.quarantinesLost(l)
	m.senderLost(now, l.Peer.Name, "its decode engine is gone")
	m.forgetCorrespondent(l.Peer.Name)
}

// anyConnection stands for all of an agent's.
const anyConnection kv.Generation = 0

func (m *machine) inboundLost(now time.Time, l agent.PeerLost) {
	x := m.letters.byName[l.Peer.Name]
	own := x != nil && x.via == l.Peer
	if p := m.consumer.pulses[l.Peer.Name]; p != nil && p.via[l.Peer] {
		own = true
		m.receivesLost(l.Peer.Name, l.Err)
	}
	m.quarantinesLost(l)
	own = m.claimsLost(l.Peer.Name, l.Peer.Gen) || own
	own = m.registrationsLost(now, l.Peer, "its decode engine is gone") || own
	if own {
		m.forgetCorrespondent(l.Peer.Name)
	}
}

func (m *machine) emitUnsent(r *remote, what string, err error) {
	m.stats.NotificationsFailed++
	m.emit(event.NotificationFailed{Peer: r.engine, What: what, Err: err})
}

func (m *machine) onTick(now time.Time) {
	for {
		due, ok := m.timers.PopDue(now)
		if !ok {
			return
		}
		switch t := due.(type) {
		case *receive:
			m.receiveSilent(t)
		case *hold:
			m.leaseExpired(now, t)
		case *registration:
			m.registrationExpired(t)
		case *note:
			m.producer.forgetNote(t)
		case *beat:
			m.sendHeartbeat(now, t)
		case *busyTimer:
			m.retryBusy()
		case *pulse:
			m.pulseSilent(t)
		case *letter:
			m.letterDue(t)
		case *withdrawal:
			m.forgetWithdrawn(t)
		case *fetch:
			m.fetchDue(t)
		case *readBusyTimer:
			m.retryReads()
		}
	}
}

// onShutdown revokes every permission, reports every wait as ended and cancels transfers; those
// end by their Result and Stopped.
func (m *machine) onShutdown() {
	if m.closing {
		return
	}
	m.closing = true
	m.beats.stop(m)
	m.shutdownConsumer()
	m.shutdownFetcher()
	m.shutdownProducer()
	for _, x := range m.letters.byName {
		for _, l := range x.letters {
			m.dropLetter(l)
		}
	}
}
