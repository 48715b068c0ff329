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
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// correspondent is one peer agent with which control messages are exchanged: what was sent and not
// yet acknowledged, and what came. It goes with the agent.
type correspondent struct {
	name    agent.Name
	seq     uint64 // of the last numbered message to it
	letters map[uint64]*letter
	oldest  uint64             // no letter has a smaller number
	seen    recent[wire.Token] // receipts of its Cancels
	via     agent.PeerID       // by which it acknowledged a letter
}

// letter is a Cancel or Failed under way. It is sent again with every heartbeat interval until it is
// acknowledged, a bounded number of times; one that ends a quarantine as long as that lasts.
type letter struct {
	to      *correspondent
	addr    connector.PeerAddr // of its engine
	seq     uint64
	receipt wire.Token // that its acknowledgement brings back
	what    string
	msg     []byte
	tries   int
	receive uint64 // D: in quarantine until the acknowledgement; else 0
	claim   uint64 // P: that keeps a hold until the acknowledgement; else 0
	due     deadline.Item[any]
}

// correspondence is everybody that is written to.
type correspondence struct {
	byName map[agent.Name]*correspondent
	seq    uint64 // the greatest that was given; a correspondent who comes again goes on from it
}

func (c *correspondence) init() { c.byName = make(map[agent.Name]*correspondent) }

// correspondent finds or makes the entry of an agent. There are as many as connected agents; beyond the
// bound one without letters makes room, else one for whose letters no blocks wait. The entry is not kept
// if there is none of these.
func (m *machine) correspondent(name agent.Name) *correspondent {
	c := &m.letters
	if x := c.byName[name]; x != nil {
		return x
	}
	x := &correspondent{name: name, seq: c.seq, oldest: c.seq + 1, letters: make(map[uint64]*letter)}
	if len(c.byName) >= maxSenders && !m.dropCorrespondent() {
		return x
	}
	c.byName[name] = x
	return x
}

func (m *machine) dropCorrespondent() bool {
	var least *correspondent
	for _, x := range m.letters.byName {
		if len(x.letters) == 0 {
			least = x
			break
		}
		if (least == nil || len(x.letters) < len(least.letters)) && !x.lasts() {
			least = x
		}
	}
	if least == nil {
		return false
	}
	m.stats.LettersLost += uint64(len(least.letters))
	for _, l := range least.letters {
		m.dropLetter(l)
	}
	delete(m.letters.byName, least.name)
	return true
}

// lasts tells whether blocks wait for the acknowledgement of one of its letters.
func (x *correspondent) lasts() bool {
	for _, l := range x.letters {
		if l.lasts() {
			return true
		}
	}
	return false
}

// next numbers a message to a correspondent.
func (c *correspondence) next(x *correspondent) uint64 {
	x.seq++
	c.seq = max(c.seq, x.seq)
	return x.seq
}

// us is how peers reach our engine.
func (m *machine) us() wire.Sender {
	return wire.Sender{Engine: m.cfg.Engine, Host: m.cfg.Host, Port: m.cfg.Port, TP: m.cfg.TP}
}

// send writes a letter to a connected peer that understands control messages. The oldest letter
// makes room when the peer acknowledges none. It returns nil for a message that cannot be written, or
// that is sent once because there are too many correspondents.
func (m *machine) send(r *remote, what string, receive uint64, build func(seq uint64, receipt wire.Token) wire.Notification) *letter {
	x := m.correspondent(r.name())
	seq, receipt := m.letters.next(x), m.tokens.next()
	msg, err := wire.AppendControl(nil, build(seq, receipt))
	if err != nil {
		m.emitUnsent(r, what, err)
		return nil
	}
	if m.letters.byName[x.name] != x {
		m.do(notify{r.engine, r.agent.ID, what, msg})
		return nil
	}
	for len(x.letters) > 0 {
		for x.letters[x.oldest] == nil {
			x.oldest++
		}
		oldest := x.letters[x.oldest]
		if len(x.letters) < maxLetters && seq-oldest.seq < replayWindow || oldest.lasts() {
			break
		}
		m.dropLetter(oldest)
	}
	l := &letter{to: x, addr: r.addr, seq: seq, receipt: receipt, what: what, msg: msg, receive: receive}
	l.due.Value = l
	x.letters[seq] = l
	m.sendLetter(l, r)
	return l
}

// lasts tells whether blocks wait for its acknowledgement, so that it is not given up.
func (l *letter) lasts() bool { return l.receive != 0 || l.claim != 0 }

func (m *machine) sendLetter(l *letter, r *remote) {
	l.tries++
	m.timers.Set(&l.due, m.now.Add(m.interval()))
	m.do(notify{r.engine, r.agent.ID, l.what, l.msg})
}

// letterDue sends a letter again, or gives it up.
func (m *machine) letterDue(l *letter) {
	if !l.lasts() && l.tries >= maxLetterTries {
		m.stats.LettersLost++
		m.dropLetter(l)
		return
	}
	if r := m.named[l.to.name]; r != nil {
		m.sendLetter(l, r)
		return
	}
	if !l.lasts() {
		m.dropLetter(l)
		return
	}
	// P's agent may still be able to write: connect again, to have its word that it does not.
	m.timers.Set(&l.due, m.now.Add(m.interval()))
	m.tell(l.addr, l.to.name, func(r *remote) {
		if l.to.letters[l.seq] == l {
			m.sendLetter(l, r)
		}
	})
}

func (m *machine) dropLetter(l *letter) {
	m.timers.Remove(&l.due)
	delete(l.to.letters, l.seq)
}

// forgetCorrespondent drops the letters to an agent that is gone, except those of quarantines that
// last.
func (m *machine) forgetCorrespondent(name agent.Name) {
	x := m.letters.byName[name]
	if x == nil {
		return
	}
	for _, l := range x.letters {
		if !l.lasts() {
			m.dropLetter(l)
		}
	}
	if len(x.letters) == 0 {
		delete(m.letters.byName, name)
	}
}

// onAck ends a letter. An acknowledgement can end a quarantine, so that it counts only with the letter's
// receipt, which nobody but the peer has seen.
func (m *machine) onAck(from agent.PeerID, a *wire.Ack) {
	x := m.letters.byName[from.Name]
	if x == nil || x.letters[a.Seq] == nil {
		return // a second one
	}
	l := x.letters[a.Seq]
	if !same(l.receipt, a.Receipt) {
		m.stats.Forged++
		m.ignore(from.Name, "acknowledgement", fmt.Sprintf("its receipt is not that of our %s %d: somebody else says this agent's name", l.what, a.Seq))
		return
	}
	x.via = from
	m.hear(from)
	m.dropLetter(l)
	if c := m.lender.claims[l.claim]; c != nil && !c.ended {
		m.endClaim(c)
		m.settleLoan(c.hold)
	}
	if r := m.consumer.receives[l.receive]; r != nil && r.quarantined != nil {
		m.endQuarantine(r, "the prefill engine confirmed that it does not write any more")
	}
}

// ack acknowledges a letter of D; its engine is where the letter says.
func (m *machine) ack(from agent.Name, addr connector.PeerAddr, a wire.Ack) {
	m.tell(addr, from, func(r *remote) { m.control(r, "acknowledgement", &a) })
}

// control sends a message that is not repeated.
func (m *machine) control(r *remote, what string, n wire.Notification) {
	msg, err := wire.AppendControl(nil, n)
	if err != nil {
		m.emitUnsent(r, what, err)
		return
	}
	m.do(notify{r.engine, r.agent.ID, what, msg})
}

// addrOfSender is where a D is that has sent a control message.
func addrOfSender(s wire.Sender) connector.PeerAddr {
	return connector.PeerAddr{Engine: s.Engine, Host: s.Host, Port: s.Port, TP: s.TP, PP: 1}
}

// onFailed ends a receive that P will not serve. P is told that we know.
func (m *machine) onFailed(from agent.PeerID, f *wire.Failed) {
	known := m.named[from.Name]
	if known != nil && known.control {
		m.control(known, "acknowledgement", &wire.Ack{Seq: f.Seq, Receipt: f.Receipt})
	}
	r := m.consumer.byWireID[f.ID]
	if r == nil || r.gen != f.Generation || r.remote.name() != from.Name || r.quarantined != nil {
		if r == nil && known != nil && known.control {
			return // it crossed our own word
		}
		m.ignore(from.Name, "failure", fmt.Sprintf("request %s is not received from this agent", f.ID))
		return
	}
	if !same(r.token, f.Token) {
		m.forged(from.Name, "failure", f.ID)
		return
	}
	m.hear(from)
	reason := f.Reason
	if reason == "" {
		reason = "it gave no reason"
	}
	m.endFailed(r, failedPhase(f.Phase), "the prefill engine gave it up: "+reason, false)
}

// failedPhase takes P's word for a phase that we know.
func failedPhase(p string) connector.Phase {
	switch c := connector.Phase(p); c {
	case connector.PhasePrefill, connector.PhaseLease, connector.PhaseRegistration, connector.PhaseHandshake, connector.PhaseLimit, connector.PhaseCancel:
		return c
	}
	return connector.PhaseTransfer
}

// cancelAt tells P that a registration is not wanted any more. In quarantine its acknowledgement is
// waited for.
func (m *machine) cancelAt(r *receive, reason string, quarantine bool) {
	p := m.named[r.remote.name()]
	if p == nil {
		p = r.remote
	}
	serial := uint64(0)
	if quarantine {
		serial = r.serial
	}
	m.send(p, "cancel", serial, func(seq uint64, receipt wire.Token) wire.Notification {
		return &wire.Cancel{Seq: seq, Receipt: receipt, From: m.us(), RegistrationRef: refOf(r.wireID, r.gen, r.token), TransferID: r.reg.TransferID,
			Digest: r.reg.Digest, Reason: wire.BoundReason(reason)}
	})
	m.cancelSent(r.reg.ID, p.engine, reason)
}

func (m *machine) cancelSent(id kv.RequestID, to kv.EngineID, reason string) {
	m.stats.CancelsSent++
	m.emit(event.CancelSent{Request: id, Peer: to, Reason: reason})
}

// withdraw tells P that a request will never be registered.
func (m *machine) withdraw(w connector.Withdrawal) {
	m.tell(w.Peer, "", func(r *remote) {
		m.send(r, "cancel", 0, func(seq uint64, receipt wire.Token) wire.Notification {
			return &wire.Cancel{Seq: seq, Receipt: receipt, From: m.us(), RegistrationRef: wire.RegistrationRef{ID: w.ID}, TransferID: w.TransferID, RemoteID: w.Remote,
				Digest: w.Digest, Reason: wire.BoundReason(w.Reason)}
		})
		m.cancelSent(w.ID, r.engine, w.Reason)
	})
}

// interval is the time between two beats.
func (m *machine) interval() time.Duration { return connector.HeartbeatInterval(m.cfg.Lease) }

// lettersInOrder is the letters to an agent, oldest first.
func (x *correspondent) lettersInOrder() []*letter {
	return slices.SortedFunc(maps.Values(x.letters), func(a, b *letter) int { return cmp.Compare(a.seq, b.seq) })
}
