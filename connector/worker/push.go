package worker

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/wire"
)

// pushState is where a pair of blocks and registration stands.
type pushState uint8

const (
	connecting pushState = iota // the handshake with D runs
	queued                      // the agent had no room
	posting                     // handed to the agent, not yet answered
	writing                     // bytes may move until Stopped
)

// push is one WRITE: finished blocks paired with a registration.
type push struct {
	serial   uint64
	hold     *hold
	reg      *registration
	state    pushState
	remote   *remote // from the handshake on
	plan     geometry.Plan
	transfer agent.TransferID
	result   *agent.Result

	unwanted string             // why it is to end before it is done; "" if it is not
	byD      bool               // D has said so itself, and need not be told
	acks     []wire.Ack         // of cancels, to send once it has stopped
	ackAddr  connector.PeerAddr // where to
}

// busyTimer is the one item for transfers that the agent had no room for.
type busyTimer struct{}

// pair joins blocks and registration and asks for D's engine.
func (m *machine) pair(h *hold, r *registration, by matchKind) {
	u := &push{serial: m.nextSerial(), hold: h, reg: r}
	h.push, r.push = u, u
	m.producer.pushes[u.serial] = u
	m.emit(event.RegistrationMatched{Request: h.id, Remote: r.key.id, Peer: r.key.engine, By: by.String()})
	m.stats.Matched++
	m.need(decodeAddr(r.reg), waiter{push: u.serial})
}

func decodeAddr(p *wire.PushReg) connector.PeerAddr {
	return connector.PeerAddr{Engine: p.DecodeEngineID, Host: p.DecodeHost, Port: p.DecodePort, TP: p.DecodeTPSize, PP: 1}
}

// pushConnected plans the WRITE and hands it to the agent. A registration that does not fit is
// refused; its blocks wait for another one.
func (m *machine) pushConnected(now time.Time, serial uint64, p *remote) {
	u := m.producer.pushes[serial]
	if u == nil {
		return
	}
	err := p.err
	if err == nil && p.name() != u.reg.sender.name {
		err = fmt.Errorf("engine %q at its address is served by another agent than the one that registered; it may have restarted", p.engine)
	}
	if err == nil {
		u.plan, err = geometry.PlanWrite(m.cfg.Layout, p.layout, u.hold.have, wanted(u.reg.reg))
	}
	if err != nil {
		h, r := u.hold, u.reg
		m.endPush(u)
		m.refuse(r, err.Error())
		m.offer(now, h)
		return
	}
	u.remote = p
	m.do(pin{p})
	if u.plan.Blocks == 0 {
		m.completeEmpty(u)
		return
	}
	m.startPost(u)
}

// wanted is what a registration asks for.
func wanted(p *wire.PushReg) geometry.Want {
	var w geometry.Want
	if len(p.LocalBlockIDs) > 0 {
		w.Blocks = p.LocalBlockIDs[0]
	}
	if x := p.Extension; x != nil {
		w.Positioned, w.StartToken, w.NumTokens = true, x.StartToken, x.NumTokens
	}
	return w
}

// completion is the notification that D counts.
func (m *machine) completion(u *push) []byte {
	msg, err := wire.AppendCompletion(nil, wire.Completion{ID: u.reg.key.id, N: m.cfg.TP})
	if err != nil {
		panic("worker: a registration that was parsed has an id that cannot be sent: " + err.Error())
	}
	return msg
}

// completeEmpty answers a D that lacks no block.
func (m *machine) completeEmpty(u *push) {
	h := u.hold
	m.do(notify{u.remote.engine, u.remote.agent.ID, "completion", m.completion(u)})
	u.reg.sender.wrote(u.reg)
	m.endPush(u)
	m.endHold(h, "", "", "sent")
}

// startPost hands a WRITE to the agent, behind those to the same peer that wait for room.
func (m *machine) startPost(u *push) {
	if l := &m.producer.busy; l.waits(u.remote.name()) {
		u.state = queued
		l.enter(u.remote.name(), u.serial)
		return
	}
	m.post(u)
}

func (m *machine) post(u *push) {
	u.state = posting
	g := agent.GrantID{}
	if x := u.reg.reg.Extension; x != nil {
		g = x.Grant
	}
	m.do(post{u.serial, u.remote, u.plan, g, m.completion(u)})
}

// pushUnconnected ends a push whose D cannot be reached. There is no second try (push-mode.md), and
// nobody to tell.
func (m *machine) pushUnconnected(serial uint64, err error) {
	u := m.producer.pushes[serial]
	if u == nil {
		return
	}
	h := u.hold
	m.stats.TransfersFailed++
	m.emit(event.TransferFailed{Request: h.id, Op: event.Write, Peer: u.reg.key.engine, Rank: m.cfg.Rank, Phase: "handshake", Err: err})
	m.dropRegistration(u.reg, "its decode engine cannot be reached")
	m.endHold(h, connector.PhaseHandshake, err.Error(), "failed")
	m.endPush(u)
}

// onPosted learns whether the agent took a WRITE. Whatever becomes of it, the next in line has its turn.
func (m *machine) onPosted(in posted) {
	l := &m.producer.busy
	u := m.producer.pushes[in.push]
	if u == nil || u.state != posting {
		l.answered(in.push, "", true)
		m.nextBusy()
		return
	}
	name, busy := u.remote.name(), errors.Is(in.err, agent.ErrBusy)
	tried := l.answered(in.push, name, busy)
	switch {
	case busy:
		m.queue(u, tried)
	case in.err != nil:
		m.emit(event.TransferFailed{Request: u.hold.id, Op: event.Write, Peer: u.remote.engine, Rank: m.cfg.Rank, Phase: "post", Err: in.err})
		m.failPush(u, connector.PhaseTransfer, in.err)
	default:
		u.state, u.transfer = writing, in.transfer
		m.producer.transfers[in.transfer] = u
		l.posted(name)
		m.emit(event.TransferPosted{Request: u.hold.id, Op: event.Write, Peer: u.remote.engine, Rank: m.cfg.Rank, Descs: len(u.plan.Local), Bytes: u.plan.Bytes})
		m.stats.TransfersPosted++
		if m.closing || u.unwanted != "" {
			m.do(cancel{in.transfer})
		}
	}
	m.nextBusy()
}

// queue keeps a WRITE that the agent had no room for, if it may still be written.
func (m *machine) queue(u *push, tried bool) {
	switch {
	case u.unwanted != "":
		m.failPush(u, connector.PhaseCancel, errors.New(u.unwanted))
	case u.hold.over != (ending{}) || m.closing:
		m.failPush(u, connector.PhaseLease, errors.New("the lease ended while the agent was busy"))
	default:
		u.state = queued
		m.producer.busy.keep(u.remote.name(), u.serial, tried)
	}
}

// retryBusy lets every peer's queue have a turn: there may be room.
func (m *machine) retryBusy() {
	m.producer.busy.round()
	m.nextBusy()
}

// nextBusy hands the WRITE whose turn it is to the agent; its answer goes on.
func (m *machine) nextBusy() {
	l := &m.producer.busy
	if serial, ok := l.next(); ok && !m.closing {
		m.post(m.producer.pushes[serial])
		return
	}
	m.watchLine(l)
}

// onResult keeps how the transfer ended. A D that will not get its completion is told now; the
// blocks wait for Stopped.
func (m *machine) onResult(res agent.Result) {
	u := m.producer.transfers[res.Transfer]
	if u == nil || u.result != nil {
		return
	}
	u.result = &res
	if res.Outcome == agent.OutcomeDone {
		m.emit(event.TransferDone{Request: u.hold.id, Op: event.Write, Peer: u.remote.engine, Rank: m.cfg.Rank, Descs: res.Descs,
			Bytes: res.Bytes, Post: res.Post, Took: res.Took})
		m.stats.TransfersDone++
		m.stats.BytesSent += uint64(res.Bytes)
		return
	}
	m.stats.TransfersFailed++
	m.emit(event.TransferFailed{Request: u.hold.id, Op: event.Write, Peer: u.remote.engine, Rank: m.cfg.Rank, Phase: "transfer", GivenUp: u.unwanted != "" || m.closing, Err: resultError(res)})
	if u.remote.control {
		m.tellFailed(u)
	}
}

// tellFailed tells D of a WRITE that did not end well, if it does not know. A D that cannot be told
// to wait for the end (PUSH_FAIL) is told at Stopped.
func (m *machine) tellFailed(u *push) {
	res := u.result
	if u.unwanted != "" {
		if !u.byD {
			m.sendFailure(u.reg, connector.PhaseCancel, u.unwanted)
		}
		return
	}
	if res != nil && res.Outcome != agent.OutcomePeerLost && res.Outcome != agent.OutcomeClosed {
		m.sendFailure(u.reg, connector.PhaseTransfer, "the write failed: "+resultError(*res).Error())
	}
}

// onStopped gives the blocks back: nothing reads them any more.
func (m *machine) onStopped(s agent.Stopped) {
	u := m.producer.transfers[s.Transfer]
	if u == nil {
		return
	}
	delete(m.producer.transfers, s.Transfer)
	m.producer.busy.stopped(u.remote.name())
	h := u.hold
	m.emit(event.TransferStopped{Request: h.id, Op: event.Write, Peer: u.remote.engine, Rank: m.cfg.Rank})
	switch {
	case u.result == nil:
		m.endHold(h, connector.PhaseTransfer, "the agent gave no result", "failed")
	case u.result.Outcome == agent.OutcomeDone:
		u.reg.sender.wrote(u.reg)
		m.endHold(h, "", "", "sent")
	case u.unwanted != "":
		if !u.remote.control {
			m.tellFailed(u)
		}
		how := "cancelled"
		if !u.byD {
			how = givenUp.how
		}
		m.endHold(h, connector.PhaseCancel, u.unwanted, how)
	default:
		if !u.remote.control {
			m.tellFailed(u)
		}
		m.endHold(h, connector.PhaseTransfer, resultError(*u.result).Error(), "failed")
	}
	m.endPush(u)
	m.retryBusy()
}

func resultError(r agent.Result) error {
	if r.Err != nil {
		return r.Err
	}
	return errors.New("the transfer ended as " + r.Outcome.String())
}

// failPush ends a push of which nothing was started: the blocks are given back and D is told.
func (m *machine) failPush(u *push, phase connector.Phase, err error) {
	h, r := u.hold, u.reg
	m.stats.TransfersFailed++
	m.endHold(h, phase, err.Error(), "failed")
	m.endPush(u)
	if !u.byD {
		m.sendFailure(r, phase, err.Error())
	}
}

// endPush parts blocks and registration. Whoever has the blocks decides what becomes of them.
func (m *machine) endPush(u *push) {
	delete(m.producer.pushes, u.serial)
	m.leaveLine(&m.producer.busy, u.serial)
	if u.remote != nil {
		m.do(unpin{u.remote})
	}
	u.hold.push, u.reg.push = nil, nil
	u.reg.sender.forget(u.reg)
	for _, a := range u.acks {
		m.ack(u.reg.sender.name, u.ackAddr, a)
	}
	u.acks = nil
}

// pushesInOrder is the pairs, oldest first.
func (p *producer) pushesInOrder() []*push {
	return slices.SortedFunc(maps.Values(p.pushes), func(a, b *push) int { return cmp.Compare(a.serial, b.serial) })
}
