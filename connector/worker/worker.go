package worker

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
)

// Worker is WorkerHalf of one rank. Its methods may be called from any goroutine; only Close blocks.
type Worker struct {
	cfg     Config
	outputs chan connector.WorkerOutput
	wake    chan struct{} // one token: mail is there
	said    chan struct{} // the writer has said its last words to peers
	done    chan struct{} // the writer has ended

	mail struct {
		sync.Mutex
		inputs  []input
		waiting int // entries in the StepMetas among them
		closed  bool
	}
	seen struct {
		sync.Mutex
		stats Stats
	}
	steps atomic.Uint64 // of the engine
	asked atomic.Int64  // when the side channel was last asked, nanoseconds since began
	began time.Time
}

// New starts the writer of a rank.
func New(cfg Config) (*Worker, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	local, err := cfg.Agent.Prepare(agent.Local, cfg.Layout.Rows())
	if err != nil {
		return nil, fmt.Errorf("worker: the rank's memory cannot be prepared for transfers: %w", err)
	}
	w := &Worker{
		cfg:     cfg,
		outputs: make(chan connector.WorkerOutput),
		wake:    make(chan struct{}, 1),
		said:    make(chan struct{}),
		done:    make(chan struct{}),
		began:   time.Now(),
	}
	x := &writer{
		w:       w,
		cfg:     cfg,
		machine: newMachine(cfg),
		local:   local,
		lists:   make(map[agent.PeerID]agent.ListID),
		told:    make(map[kv.RequestID]struct{}),
		out:     connector.WorkerOutput{Rank: cfg.Rank},
	}
	x.machine.tokens.secret = drawSecret()
	has := cfg.Agent.Capabilities()
	x.machine.irrevocable, x.machine.tellsArrivals = !has.Revocable, has.TellsArrivals
	go x.run()
	return w, nil
}

// Submit hands over what the ledger wants done. It never waits for the writer: entries queue in
// order. What needs an answer is bounded by the ledger, which keeps a request until it has one. What
// needs none (Queued, Processing, Dropped, Withdrawn) is left out while more than maxInbox entries wait; the D
// engines that would have been told then wait for their own watchdogs. After Close it does nothing.
func (w *Worker) Submit(meta connector.StepMeta) {
	w.mail.Lock()
	if w.mail.closed {
		w.mail.Unlock()
		return
	}
	if w.mail.waiting >= maxInbox {
		w.mail.inputs = append(w.mail.inputs, leftOut{})
		meta.Queued, meta.Processing, meta.Dropped, meta.Withdrawn = nil, nil, nil, nil
	}
	w.mail.waiting += len(meta.Registrations) + len(meta.Reads) + len(meta.Queued) + len(meta.Processing) + len(meta.Finished) + len(meta.Released) + len(meta.Dropped) +
		len(meta.Cancels) + len(meta.Withdrawn) + 1
	w.mail.inputs = append(w.mail.inputs, stepMeta{meta})
	w.mail.Unlock()
	w.ring()
}

// Stepped says that the engine's loop has come round: a step has ended, or the loop is awake with none under
// way. D's that wait for a prefill are told the count with their beats, so that they can tell a slow engine from
// one that hangs while its worker answers. An engine that never calls it is not judged by it. It wakes nobody.
func (w *Worker) Stepped() { w.steps.Add(1) }

// Asked says that somebody has asked our engine's side channel just now. Until a prefill engine has said its
// first word it may be one that shakes hands with us, and has the time for its next question. It wakes nobody.
func (w *Worker) Asked() { w.asked.Store(int64(time.Since(w.began)) + 1) }

// Outputs delivers what the ledger must know. Reports that are not read at once are merged into one
// output, so that a slow reader costs the writer nothing. The channel is closed after Close, when
// every report has been read or nobody reads any more.
func (w *Worker) Outputs() <-chan connector.WorkerOutput { return w.outputs }

// Stats returns a copy of the counters, as they were when the writer last did something.
func (w *Worker) Stats() Stats {
	w.seen.Lock()
	defer w.seen.Unlock()
	return w.seen.stats
}

// Close revokes every grant, ends what waits, closes the agent and the peer table, and returns when
// no goroutine of the worker is left. Reports of what was ended can be read from Outputs until then
// and are dropped after. It may be called again.
func (w *Worker) Close() error {
	w.mail.Lock()
	first := !w.mail.closed
	w.mail.closed = true
	if first {
		w.mail.inputs = append(w.mail.inputs, shutdown{})
	}
	w.mail.Unlock()
	w.ring()
	select {
	case <-w.said: // peers are told what ends, before the agent that tells them does
	case <-w.done:
	}
	err := w.cfg.Agent.Close() // before the table, which removes peers and with them what waits for them
	w.cfg.Peers.Close()
	<-w.done
	return err
}

// post puts an input into the mailbox from another goroutine.
func (w *Worker) post(in input) {
	w.mail.Lock()
	w.mail.inputs = append(w.mail.inputs, in)
	w.mail.Unlock()
	w.ring()
}

func (w *Worker) ring() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// collect empties the mailbox.
func (w *Worker) collect() []input {
	w.mail.Lock()
	defer w.mail.Unlock()
	in := w.mail.inputs
	w.mail.inputs, w.mail.waiting = nil, 0
	return in
}

// writer is the one goroutine of a worker. It alone reads the agent's events, sends notifications,
// gives and ends grants, and posts transfers.
type writer struct {
	w       *Worker
	cfg     Config
	machine *machine
	local   agent.ListID
	lists   map[agent.PeerID]agent.ListID // of peers' memory, prepared at the first WRITE
	out     connector.WorkerOutput        // not yet read
	told    map[kv.RequestID]struct{}     // out.Progress
	answers []input                       // of actions of the step under way
	wakeups uint64
	said    bool // w.said is closed
}

// run turns events into inputs until the agent has closed its channel. With nothing waiting it has
// no timer and sleeps.
func (x *writer) run() {
	defer close(x.w.done)
	defer close(x.w.outputs)
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	var armed time.Time
	for {
		if at, ok := x.machine.Deadline(); !ok {
			timer.Stop()
			armed = time.Time{}
		} else if !at.Equal(armed) {
			timer.Reset(time.Until(at))
			armed = at
		}
		var outputs chan connector.WorkerOutput
		if len(x.out.Sent)+len(x.out.Recv)+len(x.out.Progress) > 0 {
			outputs = x.w.outputs
		}
		select {
		case <-x.w.wake:
			for _, in := range x.w.collect() {
				x.step(in)
			}
		case e, ok := <-x.cfg.Agent.Events():
			if !ok {
				x.finish()
				return
			}
			// What the ledger said first is heard first: a peer may ask for what our answer named.
			for _, in := range x.w.collect() {
				x.step(in)
			}
			x.step(fromAgent(e))
		case <-timer.C:
			armed = time.Time{}
			x.step(tick{})
		case outputs <- x.out:
			x.out = connector.WorkerOutput{Rank: x.cfg.Rank}
			clear(x.told)
		}
		x.wakeups++
		x.publish()
	}
}

// finish ends what is left when the agent is gone, which is nothing after an orderly Close. A
// reader that waits gets the last reports.
func (x *writer) finish() {
	for _, in := range x.w.collect() {
		x.step(in)
	}
	x.step(shutdown{})
	if len(x.out.Sent)+len(x.out.Recv) > 0 {
		select {
		case x.w.outputs <- x.out:
		default:
		}
	}
}

func fromAgent(e agent.Event) input {
	switch e := e.(type) {
	case agent.Result:
		return transferResult{e}
	case agent.Stopped:
		return transferStopped{e}
	case agent.Notification:
		return notification{e}
	case agent.PeerLost:
		return peerLost{e}
	}
	panic(fmt.Sprintf("worker: an agent event of unknown type %T", e))
}

// step feeds the machine and carries out its actions. What an action answers is fed before anything
// that happens outside.
func (x *writer) step(in input) {
	now := time.Now()
	x.machine.outside.steps = x.w.steps.Load()
	if at := x.w.asked.Load(); at != 0 {
		x.machine.outside.asked = x.w.began.Add(time.Duration(at))
	}
	x.answers = append(x.answers[:0], in)
	for i := 0; i < len(x.answers); i++ {
		for _, a := range x.machine.Step(now, x.answers[i]) {
			x.do(a)
		}
	}
	clear(x.answers)
	if _, last := in.(shutdown); last && !x.said {
		x.said = true
		close(x.w.said)
	}
}

// publish lets others see the counters.
func (x *writer) publish() {
	stats := x.machine.snapshot()
	stats.Wakeups = x.wakeups
	x.w.seen.Lock()
	x.w.seen.stats = stats
	x.w.seen.Unlock()
}

func (x *writer) answer(in input) { x.answers = append(x.answers, in) }

func (x *writer) do(a action) {
	ag, peers := x.cfg.Agent, x.cfg.Peers
	switch a := a.(type) {
	case connect:
		x.connect(a)
	case pin:
		peers.Pin(a.remote.engine, a.remote.gen)
	case unpin:
		peers.Unpin(a.remote.engine, a.remote.gen)
	case grant:
		id, err := ag.Grant(agent.GrantSpec{Peer: a.peer, Access: agent.AccessWrite, Ranges: a.ranges})
		x.answer(granted{a.receive, id, err})
	case revoke:
		ag.Revoke(a.grant)
	case register:
		if err := ag.Notify(a.peer, a.msg); err != nil {
			x.answer(registrationFailed{a.receive, err})
		}
	case notify:
		if err := ag.Notify(a.peer, a.msg); err != nil {
			x.cfg.Events.Emit(event.NotificationFailed{Peer: a.engine, What: a.what, Err: err})
		}
	case post:
		id, err := x.transfer(agent.Write, a.remote, a.plan, a.grant, a.notif)
		x.answer(posted{a.push, id, err})
	case lend:
		x.lend(a)
	case read:
		x.read(a)
	case cancel:
		ag.Cancel(a.transfer)
	case forget:
		if list, ok := x.lists[a.peer]; ok {
			ag.Release(list)
			delete(x.lists, a.peer)
		}
	case lost:
		peers.Lost(a.peer, a.err)
	case reportSent:
		x.out.Sent = append(x.out.Sent, a.SentReport)
	case reportReceived:
		x.out.Recv = append(x.out.Recv, a.ReceiveReport)
	case reportProgress:
		if _, twice := x.told[a.id]; !twice {
			x.told[a.id] = struct{}{}
			x.out.Progress = append(x.out.Progress, a.id)
		}
	case emit:
		x.cfg.Events.Emit(a.Event)
	}
}

// connect asks the peer table; a handshake that must run answers through the mailbox.
func (x *writer) connect(a connect) {
	w := x.w
	c := x.cfg.Peers.Ensure(peer.Target{
		Engine: a.addr.Engine, Host: a.addr.Host, Port: a.addr.Port, TP: a.addr.TP, PP: a.addr.PP, Ranks: a.ranks, By: a.by,
	}, func(c *peer.Connected, err error) {
		if err != nil {
			w.post(connectFailed{a.addr, err})
			return
		}
		w.post(connected{a.addr, c})
	})
	if c != nil {
		x.answer(connected{a.addr, c})
	}
}

// transfer posts a WRITE or READ. The peer's list is prepared with its first one, so that a peer that is
// only told where to write, or what to read, costs no descriptors.
func (x *writer) transfer(op agent.Op, to *remote, plan geometry.Plan, grant agent.GrantID, notif []byte) (agent.TransferID, error) {
	id := to.agent.ID
	list, ok := x.lists[id]
	if !ok {
		var err error
		if list, err = x.cfg.Agent.Prepare(id, to.layout.Rows()); err != nil {
			return 0, err
		}
		x.lists[id] = list
	}
	return x.cfg.Agent.Post(agent.Transfer{
		Op:        op,
		Local:     x.local,
		LocalIdx:  plan.Local,
		Remote:    list,
		RemoteIdx: plan.Remote,
		Grant:     grant,
		Notif:     notif,
		Silence:   x.cfg.TransferSilence,
	})
}

// Rank is which rank this worker serves.
func (w *Worker) Rank() kv.Rank { return w.cfg.Rank }
