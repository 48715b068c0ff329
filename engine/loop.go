package engine

import (
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/kv"
)

// message is what other goroutines tell the loop.
type message interface{ message() }

type (
	// submit: a new request; the reply has room for one answer.
	submit struct {
		live  *live
		reply chan<- *RequestError
	}
	// abort: nobody wants the rest of the answer, or what an ended one holds for a peer.
	abort struct{ live *live }
	// release: nobody will ask for the blocks that are held under a lease; the reply has room for one.
	release struct {
		id    kv.RequestID
		lease kv.Generation
		reply chan<- bool
	}
	// ask: for a snapshot; the reply has room for one.
	ask struct{ reply chan<- Stats }
	// reset: empty the prefix cache; the reply has room for one answer. One reset is asked for
	// with a ticket, and given up with the same.
	reset struct {
		ticket uint64
		wait   bool
		reply  chan<- core.CacheReset
	}
	giveUpReset struct{ ticket uint64 }
	// drain: end when nothing is left.
	drain struct{}
	// giveUp: end what lives, and do not wait for peers.
	giveUp struct{}
)

func (submit) message()  {}
func (abort) message()   {}
func (ask) message()     {}
func (release) message() {}
func (reset) message()   {}
func (drain) message()   {}
func (giveUp) message()  {}

func (giveUpReset) message() {}

// loop is the engine's scheduler goroutine. It owns the machine, the SchedulerHalf inside it and all
// live requests, and never blocks.
type loop struct {
	e       *Engine
	machine *core.Machine
	live    map[kv.RequestID]*live
	flight  []*live // the requests of the step in flight, in the order of its batch
	faults  *faults // nil: none are injected
	timer   *time.Timer
	armed   time.Time // when timer fires; zero if never
	refused map[ErrorKind]uint64
	tiered  map[uint64]*live                  // those that the CPU tier knows, by core.TierBegin's Seq
	resets  map[uint64]chan<- core.CacheReset // by ticket, until answered
	wakeups uint64

	draining, gaveUp bool
}

func newLoop(e *Engine, m *core.Machine) *loop {
	l := &loop{e: e, machine: m, live: map[kv.RequestID]*live{}, refused: map[ErrorKind]uint64{}, resets: map[uint64]chan<- core.CacheReset{},
		tiered: map[uint64]*live{}}
	if len(e.cfg.InjectKVFault) > 0 {
		l.faults = &faults{turn: e.cfg.InjectKVFault, model: e.cfg.Model.Config(), cache: e.parts.cache}
	}
	l.timer = time.NewTimer(time.Hour)
	l.timer.Stop()
	return l
}

func (l *loop) run() {
	outputs := l.e.parts.worker.Outputs()
	for !l.over() {
		l.arm()
		select {
		case m := <-l.e.inbox:
			l.handle(m)
		case r := <-l.e.results:
			l.e.parts.worker.Stepped()
			l.stepDone(r)
		case o, ok := <-outputs:
			if !ok {
				outputs = nil // the worker has ended: nothing comes any more
				continue
			}
			l.output(o)
		case <-l.e.parts.tier.news():
			l.tierNews()
		case <-l.timer.C:
			l.armed = time.Time{}
			l.step(core.Tick{})
		}
		if !l.machine.Busy() {
			l.e.parts.worker.Stepped() // nothing hangs
		}
		l.wakeups++
	}
	l.timer.Stop()
	l.e.final = l.stats()
	close(l.e.ended)
}

// over tells whether the loop has nothing left to do.
func (l *loop) over() bool {
	if l.gaveUp {
		return l.machine.Live() == 0 && !l.machine.Busy()
	}
	return l.draining && l.machine.Quiet()
}

// arm lets the timer run only while the machine has a deadline.
func (l *loop) arm() {
	at, ok := l.machine.Deadline()
	switch {
	case !ok && !l.armed.IsZero():
		l.timer.Stop()
		l.armed = time.Time{}
	case ok && !at.Equal(l.armed):
		l.timer.Reset(time.Until(at))
		l.armed = at
	}
}

func (l *loop) handle(m message) {
	switch m := m.(type) {
	case submit:
		m.reply <- l.submit(m.live)
	case abort:
		switch {
		case !m.live.ended:
			l.abort(m.live, KindAborted, "client", errClientGone)
		case m.live.lease != 0:
			l.release(m.live.ID, m.live.lease)
		}
	case release:
		m.reply <- l.release(m.id, m.lease)
	case ask:
		m.reply <- l.stats()
	case reset:
		l.resets[m.ticket] = m.reply
		l.step(core.ResetCache{Ticket: m.ticket, Wait: m.wait})
	case giveUpReset:
		l.step(core.GiveUpReset{Ticket: m.ticket})
	case drain:
		l.draining = true
		l.step(core.Drain{})
	case giveUp:
		l.draining, l.gaveUp = true, true
		for _, id := range l.machine.IDs() {
			l.abort(l.live[id], KindUnavailable, "close", errClosed)
		}
	}
}

func (l *loop) submit(r *live) *RequestError {
	if l.draining {
		return l.refuse(&RequestError{Request: r.ID, Kind: KindUnavailable, Phase: "submit", Err: errClosing})
	}
	actions := l.machine.Step(time.Now(), core.Add{Request: r.coreRequest()})
	i := slices.IndexFunc(actions, func(a core.Action) bool { _, ok := a.(core.Refused); return ok })
	if i < 0 {
		l.live[r.ID] = r
	}
	l.carryOut(actions)
	if i < 0 {
		return nil
	}
	return l.refuse(refusal(r.ID, actions[i].(core.Refused).Err))
}

func (l *loop) refuse(err *RequestError) *RequestError {
	l.refused[err.Kind]++
	return err
}

func (l *loop) abort(r *live, kind ErrorKind, phase string, err error) {
	l.step(core.Abort{ID: r.ID, Err: &RequestError{Request: r.ID, Kind: kind, Phase: phase, Err: err}})
}

// release tells whether there was such a hold.
func (l *loop) release(id kv.RequestID, lease kv.Generation) (released bool) {
	actions := l.machine.Step(time.Now(), core.ReleaseHold{ID: id, Lease: lease})
	for _, a := range actions {
		if a, ok := a.(core.HoldReleased); ok {
			released = a.Released
		}
	}
	l.carryOut(actions)
	return released
}

func (l *loop) step(e core.Event) { l.carryOut(l.machine.Step(time.Now(), e)) }

func (l *loop) carryOut(actions []core.Action) {
	for _, a := range actions {
		switch a := a.(type) {
		case core.SendMeta:
			l.e.parts.worker.Submit(a.Meta)
		case core.RunStep:
			l.start(a.Batch)
		case core.Emit:
			l.emit(a.Output)
		case core.CacheReset:
			l.resets[a.Ticket] <- a
			delete(l.resets, a.Ticket)
		default:
			l.tellTier(a)
		}
	}
}

// start hands a step to the model goroutine, which is idle: at most one step is in flight.
func (l *loop) start(batch []core.Sequence) {
	s := step{batch: batch}
	l.flight = l.flight[:0]
	for _, q := range batch {
		r := l.live[q.ID]
		l.flight = append(l.flight, r)
		s.sampling = append(s.sampling, r.Sampling)
		s.adapters = append(s.adapters, l.e.adapters[r.Adapter])
	}
	l.e.steps <- s
}

// stepDone makes text of what the model has chosen, because text decides about stop strings, and
// tells the machine.
func (l *loop) stepDone(s stepResult) {
	done := core.StepDone{Results: s.results, Err: s.err}
	for i, r := range l.flight {
		if r.ended || s.err != nil || !s.sampled[i] || s.results[i].Err != nil {
			continue
		}
		r.piece, r.logProb = "", s.logProbs[i]
		if x := s.results[i].Token; !slices.Contains(r.ends, x) {
			r.piece, done.Results[i].Stop = r.text.push(x)
		}
	}
	l.step(done)
}

// output takes a worker's report; received blocks are damaged first if that was asked for.
func (l *loop) output(o connector.WorkerOutput) {
	if l.faults != nil {
		for _, r := range o.Recv {
			if r.Err == nil {
				l.damage(r.ID)
			}
		}
	}
	l.step(core.ConnectorOutput{WorkerOutput: o})
}

func (l *loop) damage(id kv.RequestID) {
	blocks, prefix, ok := l.machine.Receiving(id)
	if !ok {
		return
	}
	l.e.cfg.Log.Warn("KV fault injected", slog.String(LogID, string(id)), slog.String("fault", string(l.faults.damage(blocks[prefix:]))))
}

// emit passes news on to the request's reader.
func (l *loop) emit(o core.Output) {
	r := l.live[o.ID]
	out := Output{Tokens: o.Tokens}
	if len(o.Tokens) > 0 {
		out.Text, out.LogProbs = r.piece, []float64{r.logProb}
	}
	if o.Finish == "" {
		r.stream.put(out)
		return
	}
	out.Text += r.text.end()
	out.Finish, out.StopString, out.Usage, out.Params, out.Transfer = o.Finish, r.text.stop, Usage(o.Usage), o.Params, o.Transfer
	out.TierTokens = r.tierTokens
	out.Err = failure(o.ID, o.Err)
	errors.As(o.LoadErr, &out.LoadErr)
	r.ended = true
	if o.Params != nil {
		r.lease = o.Params.Lease
	}
	delete(l.live, o.ID)
	logFinished(l.e.cfg.Log, r, &out)
	r.stream.put(out)
	if stop := r.unfollow.Load(); stop != nil {
		(*stop)()
	}
}

func (l *loop) stats() Stats {
	m := l.machine.Stats()
	s := Stats{
		BlocksFree: m.BlocksFree, BlocksTotal: m.BlocksTotal, BlocksCached: m.BlocksCached,
		Running: m.Running, Waiting: m.Waiting, WaitingRemote: m.WaitingRemote, Held: m.Held,
		PrefixQueries: m.PrefixQueries, PrefixHits: m.PrefixHits, Preemptions: m.Preemptions,
		Steps: m.Steps, PromptTokens: m.PromptTokens, ComputedPrompt: m.ComputedPrompt,
		ExternalTokens: m.ExternalTokens, CompletionTokens: m.CompletionTokens,
		Finished: m.Finished, Refused: map[ErrorKind]uint64{},
		Wakeups:  l.wakeups,
		Received: m.Received, ReceiveFailed: m.ReceiveFailed, Recomputed: m.Recomputed, Unparked: m.Unparked,
		CacheResets: m.CacheResets, TurnsKept: m.TurnsKept, TurnsReclaimed: m.TurnsReclaimed,
		Peers:       l.e.parts.peers(),
		TierLooking: m.Looking, TierLoading: m.Loading, TierCopies: m.Copies, TierQueries: m.TierQueries, TierTokens: m.TierTokens,
		TierShort: m.TierShort, TierStored: m.TierStored, TierTimeouts: m.TierTimeouts,
	}
	for k, n := range l.refused {
		s.Refused[k] = n
	}
	return s
}
