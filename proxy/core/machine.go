package core

import "time"

// Config is the bounds of a request.
type Config struct {
	// FirstByte is how long a leg may be silent before its answer begins. For D it starts anew when
	// P is done: until then it is P that works. It bounds the whole of an answer that is not
	// streamed.
	FirstByte time.Duration
	// Idle is how long a stream that has begun may be silent.
	Idle time.Duration
	// Attempts is how often the pair of legs is sent in all, at least 1.
	Attempts int
	// Recompute: when the KV cannot be had, because P failed or its KV did not reach D, D is asked
	// once more, for all of it. Without it the client gets the failure.
	Recompute bool
}

// Order is how the legs of an attempt follow each other.
type Order uint8

const (
	// Together: D's leg is sent at once; P writes into D's blocks (push).
	Together Order = iota
	// InOrder: D's leg is sent when P has answered, with P's own parameters; D reads P's blocks (pull).
	InOrder
)

// Source is where D's leg gets the KV from.
type Source uint8

const (
	// NoKV: D computes the prompt itself.
	NoKV Source = iota
	// FromCoordinates: from a P that is named by its coordinates.
	FromCoordinates
	// FromHandoff: by the parameters of P's answer, as they are.
	FromHandoff
)

// Event is what a driver tells a Machine.
type Event interface{ event() }

type (
	// Begin starts the request. It is the first event and comes once.
	Begin struct{}
	// Chunk: D has sent a piece of a stream.
	Chunk struct{ Attempt int }
	// Located: the engines of an attempt are known, and so is the order of its legs; or they are no
	// pair, and Failure says why. It answers Locate, once, unless the attempt has ended before.
	Located struct {
		Attempt int
		Order   Order
		Failure *Failure
	}
	// Ended: a leg is over and nothing of it is left. Failure is nil when its answer is complete:
	// D's stream is whole, or its answer is at hand. Each leg that was started ends once.
	Ended struct {
		Leg     Leg
		Attempt int
		Failure *Failure
		// Handoff: P keeps the KV and has said where; if there is a Failure, the hand-off cannot be used.
		// Releasable: P has said how it is told to let go. Both are always false for D.
		Handoff, Releasable bool
		// Unread: P was sent its leg, and nobody knows what it has answered, if anything: it may keep the KV. It
		// can be told to let that go by the leg's key. Only with a Failure, and false for D.
		Unread bool
	}
	// ClientGone: nobody reads the answer any more.
	ClientGone struct{}
	// Tick: a deadline may have passed.
	Tick struct{}
)

func (Begin) event()      {}
func (Located) event()    {}
func (Chunk) event()      {}
func (Ended) event()      {}
func (ClientGone) event() {}
func (Tick) event()       {}

// Action is what a driver must do, in order.
type Action interface{ action() }

type (
	// Locate finds out how the engines of an attempt work together; Located follows. Attempts count
	// from 1; each has engines and ids of its own.
	Locate struct{ Attempt int }
	// StartLeg sends a leg. Source is for D's.
	StartLeg struct {
		Leg     Leg
		Attempt int
		Source  Source
	}
	// CancelLeg ends a leg; Ended follows. A leg with a hand-off ends only when D has had the time to
	// take it, so that D can tell P to let go.
	CancelLeg struct {
		Leg     Leg
		Attempt int
		Cause   string
	}
	// Release tells the P of an attempt to let go what it keeps, or may keep: no D has taken it, and no leg of
	// the attempt is left. Nothing waits for it.
	Release struct{ Attempt int }
	// Commit sends the status and headers of D's stream.
	Commit struct{}
	// Forward gives the client the piece that the event brought.
	Forward struct{}
	// Complete ends the answer well: the rest of the stream is through, or D's whole answer is to be
	// sent now.
	Complete struct{ Streamed bool }
	// Reject answers with an error; nothing was sent before.
	Reject struct{ Failure *Failure }
	// Break ends a stream with an error event, unless the client was told, and without [DONE].
	Break struct{ Failure *Failure }
	// End: every leg is over and the client has its answer. It is the last action and comes once.
	End struct{ Outcome Outcome }
)

func (Locate) action()    {}
func (StartLeg) action()  {}
func (CancelLeg) action() {}
func (Release) action()   {}
func (Commit) action()    {}
func (Forward) action()   {}
func (Complete) action()  {}
func (Reject) action()    {}
func (Break) action()     {}
func (End) action()       {}

// Outcome is what became of a request.
type Outcome struct {
	Attempts   int
	Failure    *Failure // what the client was told; nil if all is well or the client left
	ClientGone bool
	// Of the last attempt: when its legs were started, P had answered, D sent its first piece. Zero
	// for what did not happen.
	PrefillStart, PrefillDone, DecodeStart, FirstChunk time.Time
}

type phase uint8

const (
	idle     phase = iota
	running        // the legs of an attempt run
	retrying       // an attempt failed; the next begins when its legs are over
	answered       // the client has its answer, or has left; legs may still have to end
	ended
)

type legState struct {
	started   bool
	running   bool
	cancelled bool
	since     time.Time // last sign of life, or start
}

// Machine runs the legs of one client request.
//
// Whatever happens, there is exactly one of Complete, Reject, Break or nothing (the client left), no
// Commit after a failure, and End once every started leg has ended.
//
// A hand-off of P's that no D has taken when the attempt is over (D refused or failed, or had no leg yet;
// the client left; the engines are no pair) is released, once, if P has said how; so is what P may keep if
// its leg ended before its answer was read. Of a P that has not,
// which a stock one is, it goes into D's leg, and if nobody waits for the answer any more, that leg is
// cancelled at once and D lets P know. What neither reaches is left to P's lease: the hand-off of such a P
// for engines that are no pair, or to a D that refuses its leg.
type Machine struct {
	cfg          Config
	disaggregate bool
	alone        bool // P failed: the last attempt is D's alone
	phase        phase
	attempt      int
	committed    bool
	legs         [numLegs]legState
	located      bool // the rest is about the attempt, too
	order        Order
	unpaired     bool // located without success
	prefilled    bool // P has answered
	handoff      bool // and keeps the KV
	keeps        bool // P keeps KV and has said how it is let go, or it may keep some
	taken        bool // D has answered: it has what it wanted of it
	outcome      Outcome
	out          []Action
}

// NewMachine is the machine of a request that goes to both engines, or to D alone.
func NewMachine(cfg Config, disaggregate bool) *Machine {
	return &Machine{cfg: cfg, disaggregate: disaggregate}
}

// Deadline is when the machine wants a Tick.
func (m *Machine) Deadline() (time.Time, bool) {
	_, at, ok := m.next()
	return at, ok
}

// Step takes one event. The actions are valid until the next call.
func (m *Machine) Step(now time.Time, ev Event) []Action {
	m.out = m.out[:0]
	switch ev := ev.(type) {
	case Begin:
		if m.phase == idle {
			m.start(now)
		}
	case Located:
		m.locate(now, ev)
	case Chunk:
		m.chunk(now, ev)
	case Ended:
		m.legEnded(now, ev)
	case ClientGone:
		m.clientGone(now)
	case Tick:
	}
	m.expire(now)
	m.settle(now)
	return m.out
}

func (m *Machine) do(a Action) { m.out = append(m.out, a) }

func (m *Machine) start(now time.Time) {
	m.phase = running
	m.attempt++
	m.legs = [numLegs]legState{}
	m.located, m.unpaired, m.prefilled, m.handoff, m.keeps, m.taken = false, false, false, false, false, false
	m.outcome = Outcome{}
	if !m.disaggregate || m.alone {
		m.startDecode(now, NoKV)
		return
	}
	m.legs[Prefill] = legState{started: true, running: true, since: now}
	m.outcome.PrefillStart = now
	m.do(StartLeg{Leg: Prefill, Attempt: m.attempt})
	m.do(Locate{m.attempt})
}

func (m *Machine) startDecode(now time.Time, from Source) {
	m.legs[Decode] = legState{started: true, running: true, since: now}
	m.outcome.DecodeStart = now
	m.do(StartLeg{Decode, m.attempt, from})
}

func (m *Machine) locate(now time.Time, ev Located) {
	if ev.Attempt != m.attempt || m.located || !m.disaggregate {
		return
	}
	m.located, m.order, m.unpaired = true, ev.Order, ev.Failure != nil
	if m.phase != running {
		return
	}
	if ev.Failure != nil {
		m.fail(now, ev.Failure)
		return
	}
	m.proceed(now)
}

// proceed sends D's leg when its time has come.
func (m *Machine) proceed(now time.Time) {
	switch {
	case !m.located || m.legs[Decode].started:
	case m.order == Together && m.prefilled && !m.handoff:
		m.fail(now, noHandoff())
	case m.order == Together:
		m.startDecode(now, FromCoordinates)
	case m.handoff:
		m.startDecode(now, FromHandoff)
	case m.prefilled:
		m.startDecode(now, NoKV)
	}
}

// passOn gives a hand-off that nobody will use to D, to be told off at once, unless P itself can be told.
func (m *Machine) passOn(now time.Time, cause string) {
	if m.handoff && !m.keeps && !m.unpaired && !m.legs[Decode].started {
		m.startDecode(now, FromHandoff)
		m.cancelLeg(Decode, cause)
	}
}

func (m *Machine) chunk(now time.Time, ev Chunk) {
	if m.phase != running || ev.Attempt != m.attempt {
		return
	}
	m.legs[Decode].since = now
	if !m.committed {
		m.committed = true
		m.outcome.FirstChunk = now
		m.do(Commit{})
	}
	m.do(Forward{})
}

func (m *Machine) legEnded(now time.Time, ev Ended) {
	leg := &m.legs[ev.Leg]
	if ev.Attempt != m.attempt || !leg.running {
		return
	}
	leg.running = false
	switch {
	case ev.Leg == Decode:
		m.taken = ev.Failure == nil
	case ev.Failure == nil:
		m.prefilled, m.handoff = true, ev.Handoff
		m.outcome.PrefillDone = now
		fallthrough
	default:
		m.keeps = ev.Handoff && ev.Releasable || ev.Unread
	}
	switch {
	case m.phase != running:
		m.passOn(now, "nobody waits for it")
	case ev.Failure != nil:
		m.fail(now, ev.Failure)
	case ev.Leg == Decode:
		m.phase = answered
		m.do(Complete{Streamed: m.committed})
		m.cancel("decode has answered")
	case !m.handoff && m.located && m.order == Together:
		m.fail(now, noHandoff())
	default:
		m.legs[Decode].since = now
		m.proceed(now)
	}
}

// noHandoff: D waits for KV that will not come. In order, D would not have been asked for it.
func noHandoff() *Failure {
	return &Failure{
		Leg: Prefill, Kind: NoHandoff, Status: 502,
		Message: "it computed the prompt but kept no KV: see its log, and whether it runs with a KV connector",
	}
}

// fail ends the attempt: the first failure counts, what the sibling says afterwards does not. Once D
// streams it has all of P's KV, so that a failure of P costs the client nothing any more.
func (m *Machine) fail(now time.Time, f *Failure) {
	if f.Leg == Prefill && m.committed {
		m.cancelLeg(Prefill, "decode goes on without it")
		return
	}
	switch {
	case m.committed:
		m.phase = answered
		m.outcome.Failure = f
		m.do(Break{f})
	case f.Retry && m.attempt < m.cfg.Attempts:
		m.phase = retrying
	case m.cfg.Recompute && m.disaggregate && !m.alone && f.Status >= 500 && (f.Leg == Prefill || f.NoKV):
		m.alone = true
		m.phase = retrying
	default:
		m.phase = answered
		m.outcome.Failure = f
		m.do(Reject{f})
	}
	m.cancel("the " + f.Leg.String() + " leg failed")
	m.passOn(now, "the "+f.Leg.String()+" leg failed")
}

func (m *Machine) clientGone(now time.Time) {
	if m.phase != running && m.phase != retrying {
		return
	}
	m.phase = answered
	m.outcome.ClientGone = true
	m.cancel("the client left")
	m.passOn(now, "the client left")
}

func (m *Machine) cancel(cause string) {
	for leg := Prefill; leg < numLegs; leg++ {
		m.cancelLeg(leg, cause)
	}
}

func (m *Machine) cancelLeg(leg Leg, cause string) {
	if m.legs[leg].running && !m.legs[leg].cancelled {
		m.legs[leg].cancelled = true
		m.do(CancelLeg{leg, m.attempt, cause})
	}
}

// next is the running leg whose silence is over first.
func (m *Machine) next() (leg Leg, at time.Time, ok bool) {
	if m.phase != running {
		return 0, time.Time{}, false
	}
	for l := Prefill; l < numLegs; l++ {
		s := m.legs[l]
		if !s.running || s.cancelled || l == Decode && m.legs[Prefill].running && !m.committed {
			continue // while P works, D's silence says nothing
		}
		bound := m.cfg.FirstByte
		if l == Decode && m.committed {
			bound = m.cfg.Idle
		}
		if end := s.since.Add(bound); !ok || end.Before(at) {
			leg, at, ok = l, end, true
		}
	}
	return leg, at, ok
}

func (m *Machine) expire(now time.Time) {
	leg, at, ok := m.next()
	if !ok || now.Before(at) {
		return
	}
	bound, what := m.cfg.FirstByte, "has not begun to answer"
	if leg == Decode && m.committed {
		bound, what = m.cfg.Idle, "has sent nothing of its stream"
	}
	m.fail(now, &Failure{
		Leg: leg, Kind: Timeout, Status: 504,
		Message: "the engine " + what + " for " + bound.String() + "; it is overloaded or stuck: see its /metrics, or raise the router's timeout",
	})
}

// settle moves on once no leg runs.
func (m *Machine) settle(now time.Time) {
	for _, s := range m.legs {
		if s.running {
			return
		}
	}
	if m.phase != retrying && m.phase != answered {
		return
	}
	if m.keeps && !m.taken && !m.committed {
		m.do(Release{m.attempt})
	}
	switch m.phase {
	case retrying:
		m.start(now)
	case answered:
		m.phase = ended
		m.outcome.Attempts = m.attempt
		m.do(End{m.outcome})
	}
}
