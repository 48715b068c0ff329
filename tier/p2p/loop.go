package p2p

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/wire"
)

// newLoop prepares the list of our own slots.
func newLoop(t *Tier) (*loop, error) {
	hub, err := session.New(t.cfg.session())
	if err != nil {
		return nil, err
	}
	descs := make([]kv.Descriptor, t.cfg.Blocks)
	for i := range descs {
		descs[i] = block(t.cfg.Base, t.cfg.BlockLen, i)
	}
	local, err := t.cfg.Agent.Prepare(agent.Local, descs)
	if err != nil {
		return nil, fmt.Errorf("p2p tier: our own memory: %w", err)
	}
	l := &loop{
		t: t, hub: hub, local: local, done: make(chan struct{}), conns: map[kv.Generation]*conn{},
		grants: map[core.JobID]agent.GrantID{}, posted: map[uint64]agent.TransferID{}, numbers: map[agent.TransferID]uint64{},
	}
	l.peers = newAdmissions(l)
	return l, nil
}

func block(base uint64, length, i int) kv.Descriptor {
	return kv.Descriptor{Addr: base + uint64(i)*uint64(length), Length: uint64(length)}
}

// run is the loop's goroutine. It sleeps until something happens or is due.
func (l *loop) run() {
	defer l.t.running.Done()
	defer close(l.done)
	defer func() { l.last = l.hub.Stats() }()
	defer l.hangAll()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var late <-chan time.Time
	closing, events := l.t.closing, l.t.cfg.Agent.Events()
	for {
		var due <-chan time.Time
		timer.Stop()
		if at, ok := l.hub.Deadline(); ok {
			timer.Reset(time.Until(at))
			due = timer.C
		}
		var more <-chan struct{}
		if l.turns.any() { // a portion follows in any case; a message of a peer, and whatever else there is, comes before
			more = always
			select {
			case m := <-l.t.messages:
				l.step(m)
			default:
			}
		}
		select {
		case <-more:
		case <-l.t.wake:
			in, heard := l.t.take()
			l.woken = l.woken || heard
			for _, ev := range in {
				l.step(ev)
			}
			l.wake()
		case m := <-l.t.messages:
			l.step(m)
		case ev, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			l.agentEvent(ev)
		case reply := <-l.t.asked:
			reply <- l.hub.Stats()
		case <-due:
			l.step(session.Tick{})
		case <-closing:
			closing = nil
			l.waiting = nil
			l.step(session.Shutdown{})
			late = time.After(closeTime)
		case <-late:
			l.left = len(l.posted)
			return
		}
		if closing == nil && len(l.posted) == 0 {
			return
		}
		l.serve()
	}
}

func (t *Tier) take() (in []session.Event, heard bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	in, heard = t.mu.inbox, t.mu.heard
	t.mu.inbox, t.mu.heard = nil, false
	return in, heard
}

// step tells the hub, and carries out what follows, and what follows from that.
func (l *loop) step(ev session.Event) {
	l.next = append(l.next, ev)
	for len(l.next) > 0 {
		ev := l.next[0]
		l.next = l.next[1:]
		if a, ok := ev.(session.Admitted); ok {
			l.peers.returned(a)
		}
		actions := l.hub.Step(time.Now(), ev)
		l.answer(actions)
		for _, a := range actions {
			l.act(a)
		}
	}
	l.next = nil
	if !l.hub.Watching() {
		l.watch(false)
	}
	l.wake()
}

// wake tells the engine that lookups may answer otherwise, if so.
func (l *loop) wake() {
	if l.woken {
		l.woken = false
		l.t.host.Wake()
	}
}

// answer gives the verdicts of one message to the engine's side together, so that a fetch in the midst of them
// does not leave out what is there as well.
func (l *loop) answer(actions []session.Action) {
	var all []session.Answer
	for _, a := range actions {
		if a, ok := a.(session.Answer); ok {
			all = append(all, a)
		}
	}
	if len(all) > 0 {
		l.t.answer(all)
		l.woken = true
	}
}

// watch lets the Manager's changes through, or not. The first that comes through switches it off.
func (l *loop) watch(on bool) {
	l.t.mu.Lock()
	l.t.mu.watching = on
	l.t.mu.Unlock()
}

func (l *loop) act(a session.Action) {
	t, ag := l.t, l.t.cfg.Agent
	switch a := a.(type) {
	case session.Dial:
		l.conns[a.Gen] = t.dial(a.Peer, a.Gen)
	case session.Send:
		l.send(a)
	case session.Hang:
		if c := l.conns[a.Gen]; c != nil {
			delete(l.conns, a.Gen)
			c.hang()
		}
	case session.Probe:
		if c := l.conns[a.Gen]; c != nil {
			c.ping()
		}
	case session.DropLink:
		t.dropLink(a)
	case session.Admit:
		l.peers.begin(a)
	case session.Dismiss:
		l.peers.dismiss(a)
	case session.Grant:
		l.grant(a)
	case session.Revoke:
		if id, ok := l.grants[a.Job]; ok {
			delete(l.grants, a.Job)
			ag.Revoke(id)
		}
	case session.Post:
		l.post(a)
	case session.Cancel:
		l.cancel(a.Transfer)
	case session.Answer: // see answer
	case session.Fail:
		t.fail(a.Req)
		l.woken = true
	case session.LoadEnded:
		if a.OK {
			t.check(a)
		} else {
			t.host.LoadEnded(a.Job, nil, a.Stopped)
		}
	case session.LoadStopped:
		t.host.LoadStopped(a.Job)
	case session.StoreEnded:
		t.host.StoreEnded(a.Job, a.OK)
	case session.Serve:
		l.turns.add(a)
	case session.Forgo:
		l.turns.drop(a)
	case session.Unpin:
		t.host.Unpin(a.Pins)
	case session.StoreUp:
		t.setStore(a.Up)
		if a.Up { // what was computed meanwhile, or before this process knew it
			l.next = append(l.next, session.Offer{Keys: t.host.Recent(offeredAgain)})
		}
	case session.Offered:
		t.cfg.Offers.Offered(Peer{a.Peer, a.Gen}, a.Keys)
	case session.OffersEnded:
		t.cfg.Offers.Ended(Peer{a.Peer, a.Gen})
	case session.Report:
		t.cfg.Events.Emit(a.Event)
	case session.Note:
		if t.cfg.OnNote != nil {
			t.cfg.OnNote(a)
		}
	}
}

// serve answers a portion of a peer's lookup from the Manager's book. Changes are let through before that, so that
// none is missed between the answer and the wait for a change.
func (l *loop) serve() {
	a, ok := l.turns.next()
	if !ok {
		return
	}
	l.watch(true)
	l.step(session.Served{Lookup: a.Lookup, Answers: l.t.host.Serve(a.Keys, a.Most)})
}

// always is ready.
var always = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (l *loop) send(a session.Send) {
	c := l.conns[a.Gen]
	if c == nil {
		return // it has ended, or was never dialled
	}
	if !c.send(wire.AppendP2P(nil, a.Msg)) {
		l.next = append(l.next, session.Down{Peer: a.Peer, Gen: a.Gen, Err: errNotReading})
	}
}

func (l *loop) grant(a session.Grant) {
	ranges := make([]kv.Descriptor, len(a.Slots))
	for i, s := range a.Slots {
		ranges[i] = block(l.t.cfg.Base, l.t.cfg.BlockLen, int(s))
	}
	id, err := l.t.cfg.Agent.Grant(agent.GrantSpec{Peer: a.Agent, Access: agent.AccessWrite, Ranges: ranges})
	if err == nil {
		l.grants[a.Job] = id
	}
	l.next = append(l.next, session.Granted{Job: a.Job, ID: id, Err: err})
}

// post begins a transfer. Its remote list has just the blocks that it writes.
func (l *loop) post(a session.Post) {
	err := l.tryPost(a)
	if errors.Is(err, agent.ErrBusy) && len(l.waiting) < waitingPosts {
		l.waiting = append(l.waiting, a)
		return
	}
	if err != nil {
		l.next = append(l.next, session.PostFailed{Transfer: a.Transfer, Err: err})
	}
}

func (l *loop) tryPost(a session.Post) error {
	ag, length := l.t.cfg.Agent, l.t.cfg.BlockLen
	descs := make([]kv.Descriptor, len(a.Remote))
	order := make([]uint32, len(a.Remote))
	local := make([]uint32, len(a.Local))
	for i := range descs {
		descs[i] = block(a.Base, length, int(a.Remote[i]))
		order[i], local[i] = uint32(i), uint32(a.Local[i])
	}
	remote, err := ag.Prepare(a.Agent, descs)
	if err != nil {
		return err
	}
	defer ag.Release(remote)
	id, err := ag.Post(agent.Transfer{
		Op: agent.Write, Local: l.local, LocalIdx: local, Remote: remote, RemoteIdx: order,
		Grant: a.Grant, Silence: l.t.cfg.Silence,
	})
	if err == nil {
		l.posted[a.Transfer], l.numbers[id] = id, a.Transfer
	}
	return err
}

// cancel ends a transfer early, also one that waits for a place.
func (l *loop) cancel(no uint64) {
	if id, ok := l.posted[no]; ok {
		l.t.cfg.Agent.Cancel(id)
		return
	}
	before := len(l.waiting)
	l.waiting = slices.DeleteFunc(l.waiting, func(p session.Post) bool { return p.Transfer == no })
	if len(l.waiting) < before {
		l.next = append(l.next, session.PostFailed{Transfer: no, Err: errors.New("cancelled while it waited")})
	}
}

func (l *loop) agentEvent(ev agent.Event) {
	switch ev := ev.(type) {
	case agent.Result:
		l.step(session.TransferEnded{Transfer: l.numbers[ev.Transfer], OK: ev.Outcome == agent.OutcomeDone, Err: ev.Err})
	case agent.Stopped:
		no := l.numbers[ev.Transfer]
		delete(l.numbers, ev.Transfer)
		delete(l.posted, no)
		l.step(session.TransferStopped{Transfer: no})
		if waiting := l.waiting; len(waiting) > 0 {
			l.waiting = waiting[1:]
			l.post(waiting[0])
			l.step(session.Tick{})
		}
	case agent.PeerLost:
		if ev.Inbound {
			l.step(session.TornDown{Agent: ev.Peer.Name})
		} else {
			l.step(session.AgentLost{Agent: ev.Peer})
		}
	}
}

// hangAll ends what is left of the connections and admissions.
func (l *loop) hangAll() {
	for _, c := range l.conns {
		c.hang()
	}
	l.peers.cancelAll()
	for _, id := range l.grants {
		l.t.cfg.Agent.Revoke(id)
	}
	l.t.cfg.Agent.Release(l.local)
}
