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
}

// Event is what a driver tells a Machine.
type Event interface{ event() }

type (
	// Begin starts the request. It is the first event and comes once.
	Begin struct{}
	// Chunk: D has sent a piece of a stream.
	Chunk struct{ Attempt int }
	// Ended: a leg is over and nothing of it is left. Failure is nil when its answer is complete:
	// P keeps the KV; D's stream is whole, or its answer is at hand. Each leg that was started ends
	// once.
	Ended struct {
		Leg     Leg
		Attempt int
		Failure *Failure
	}
	// ClientGone: nobody reads the answer any more.
	ClientGone struct{}
	// Tick: a deadline may have passed.
	Tick struct{}
)

func (Begin) event()      {}
func (Chunk) event()      {}
func (Ended) event()      {}
func (ClientGone) event() {}
func (Tick) event()       {}

// Action is what a driver must do, in order.
type Action interface{ action() }

type (
	// StartLeg sends a leg. Attempts count from 1; each has ids of its own.
	StartLeg struct {
		Leg     Leg
		Attempt int
	}
	// CancelLeg ends a leg at once; Ended follows.
	CancelLeg struct {
		Leg     Leg
		Attempt int
		Cause   string
	}
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

func (StartLeg) action()  {}
func (CancelLeg) action() {}
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
	FirstChunk time.Time // zero if D streamed nothing
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
	running   bool
	cancelled bool
	since     time.Time // last sign of life, or start
}

// Machine runs the legs of one client request.
//
// Whatever happens, there is exactly one of Complete, Reject, Break or nothing (the client left), no
// Commit after a failure, and End once every started leg has ended.
type Machine struct {
	cfg          Config
	disaggregate bool
	phase        phase
	attempt      int
	committed    bool
	legs         [numLegs]legState
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
	case Chunk:
		m.chunk(now, ev)
	case Ended:
		m.legEnded(now, ev)
	case ClientGone:
		m.clientGone()
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
	for leg := Prefill; leg < numLegs; leg++ {
		m.legs[leg] = legState{}
		if leg == Prefill && !m.disaggregate {
			continue
		}
		m.legs[leg] = legState{running: true, since: now}
		m.do(StartLeg{leg, m.attempt})
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
	if m.phase != running {
		return
	}
	switch {
	case ev.Failure != nil:
		m.fail(ev.Failure)
	case ev.Leg == Prefill:
		m.legs[Decode].since = now
	default:
		m.phase = answered
		m.do(Complete{Streamed: m.committed})
		m.cancel("decode has answered")
	}
}

// fail ends the attempt: the first failure counts, what the sibling says afterwards does not. Once D
// streams it has all of P's KV, so that a failure of P costs the client nothing any more.
func (m *Machine) fail(f *Failure) {
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
	default:
		m.phase = answered
		m.outcome.Failure = f
		m.do(Reject{f})
	}
	m.cancel("the " + f.Leg.String() + " leg failed")
}

func (m *Machine) clientGone() {
	if m.phase != running && m.phase != retrying {
		return
	}
	m.phase = answered
	m.outcome.ClientGone = true
	m.cancel("the client left")
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
	m.fail(&Failure{
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
	switch m.phase {
	case retrying:
		m.start(now)
	case answered:
		m.phase = ended
		m.outcome.Attempts = m.attempt
		m.do(End{m.outcome})
	}
}
