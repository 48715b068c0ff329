package core

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"
)

var (
	t0   = time.Unix(1_700_000_000, 0)
	conf = Config{FirstByte: 10 * time.Minute, Idle: time.Minute, Attempts: 2}
)

func describe(a Action) string {
	switch a := a.(type) {
	case Locate:
		return fmt.Sprintf("locate #%d", a.Attempt)
	case StartLeg:
		s := fmt.Sprintf("start %s #%d", a.Leg, a.Attempt)
		if a.Leg == Decode {
			s += [...]string{", no KV", ", from coordinates", ", from hand-off"}[a.Source]
		}
		return s
	case CancelLeg:
		return fmt.Sprintf("cancel %s #%d: %s", a.Leg, a.Attempt, a.Cause)
	case Release:
		return fmt.Sprintf("release #%d", a.Attempt)
	case Commit:
		return "commit"
	case Forward:
		return "forward"
	case Complete:
		return fmt.Sprintf("complete streamed=%v", a.Streamed)
	case Reject:
		return fmt.Sprintf("reject %d: %s %s", a.Failure.Status, a.Failure.Leg, a.Failure.Kind)
	case Break:
		return fmt.Sprintf("break %s %s told=%v", a.Failure.Leg, a.Failure.Kind, a.Failure.Told)
	case End:
		o := a.Outcome
		s := fmt.Sprintf("end after %d attempts", o.Attempts)
		if o.Failure != nil {
			s += fmt.Sprintf(", %s %s", o.Failure.Leg, o.Failure.Kind)
		}
		if o.ClientGone {
			s += ", client gone"
		}
		return s
	}
	return fmt.Sprintf("unknown action %T", a)
}

// TestScenarios runs testdata/scenarios: "new" makes a machine, "at" gives it one event and shows what
// it wants done and when it wants to be called next.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		var m *Machine
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				cfg := conf
				cfg.Recompute = d.HasArg("recompute")
				m = NewMachine(cfg, !d.HasArg("alone"))
				return ""
			}
			var at, kind, leg string
			attempt := 1
			d.ScanArgs(t, "t", &at)
			d.ScanArgs(t, "ev", &kind)
			d.MaybeScanArgs(t, "leg", &leg)
			d.MaybeScanArgs(t, "attempt", &attempt)
			after, err := time.ParseDuration(at)
			if err != nil {
				t.Fatal(err)
			}
			which := Prefill
			if leg == "decode" {
				which = Decode
			}
			var ev Event
			switch kind {
			case "begin":
				ev = Begin{}
			case "chunk":
				ev = Chunk{attempt}
			case "push":
				ev = Located{Attempt: attempt}
			case "pull":
				ev = Located{Attempt: attempt, Order: InOrder}
			case "unpaired":
				ev = Located{Attempt: attempt, Failure: &Failure{Leg: Prefill, Kind: Unpaired, Status: 502, Retry: d.HasArg("retry")}}
			case "done":
				ev = Ended{Leg: which, Attempt: attempt, Handoff: which == Prefill && !d.HasArg("nothing"), Releasable: d.HasArg("releasable")}
			case "failed":
				f := &Failure{Leg: which, Kind: Status, Status: 500, Retry: d.HasArg("retry"), Told: d.HasArg("told"), NoKV: d.HasArg("nokv")}
				d.MaybeScanArgs(t, "status", &f.Status)
				ev = Ended{Leg: which, Attempt: attempt, Failure: f, Handoff: d.HasArg("handoff"), Releasable: d.HasArg("releasable"), Unread: d.HasArg("unread")}
			case "cancelled":
				ev = Ended{Leg: which, Attempt: attempt, Failure: &Failure{Leg: which, Kind: Cancelled}, Unread: d.HasArg("unread")}
			case "gone":
				ev = ClientGone{}
			case "tick":
				ev = Tick{}
			default:
				t.Fatalf("unknown event %q", kind)
			}
			var b strings.Builder
			for _, a := range m.Step(t0.Add(after), ev) {
				fmt.Fprintln(&b, describe(a))
			}
			if at, ok := m.Deadline(); ok {
				fmt.Fprintf(&b, "(until %v)\n", at.Sub(t0))
			}
			return b.String()
		})
	})
}

// TestMachineInvariants drives a machine with random events through a driver that behaves as the
// contract says, and checks what every client request is promised.
func TestMachineInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := conf
		cfg.Attempts = rapid.IntRange(1, 3).Draw(t, "attempts")
		cfg.Recompute = rapid.Bool().Draw(t, "recompute")
		alone := rapid.Bool().Draw(t, "alone")
		m := NewMachine(cfg, !alone)
		d := &modelDriver{t: t, alone: alone, recompute: cfg.Recompute}
		now := t0
		d.take(m.Step(now, Begin{}))
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "dt")) * time.Second)
			d.take(m.Step(now, d.event()))
		}
		// Whatever the state: located, time alone must bring the answer, and ended legs the end.
		for range 20 {
			if d.over {
				break
			}
			if d.locating {
				d.locating = false
				d.located = true
				d.take(m.Step(now, Located{Attempt: d.attempt, Order: d.drawOrder()}))
			}
			if at, ok := m.Deadline(); ok {
				now = at
				d.take(m.Step(now, Tick{}))
			}
			for leg := range d.running {
				if d.cancelled[leg] && d.running[leg] {
					d.running[leg] = false
					d.take(m.Step(now, Ended{Leg: Leg(leg), Attempt: d.attempt, Failure: &Failure{Leg: Leg(leg), Kind: Cancelled}}))
				}
			}
		}
		if !d.over {
			t.Fatalf("the request has no end: %+v", d)
		}
		if d.handoffs != d.handed {
			t.Fatalf("%d hand-offs of P's, %d reached D", d.handoffs, d.handed)
		}
		if got := m.Step(now.Add(time.Hour), Tick{}); len(got) != 0 {
			t.Fatalf("actions after the end: %v", got)
		}
	})
}

type modelDriver struct {
	t         *rapid.T
	alone     bool
	recompute bool
	attempt   int
	running   [2]bool
	cancelled [2]bool
	failed    bool // a leg of this attempt failed
	committed bool
	answers   int
	gone      bool
	over      bool

	locating, located, unpaired bool // of this attempt
	order                       Order
	prefilled, handoff          bool
	decode, taken               bool // started; has answered
	handoffs, handed            int  // in all: hand-offs that only D can let go, and legs of D's that brought one
	releasable                  bool // P has said how its hand-off is let go
	keeps                       bool // and still waits for D or for that
}

func (d *modelDriver) drawOrder() Order {
	d.order = rapid.SampledFrom([]Order{Together, InOrder}).Draw(d.t, "order")
	return d.order
}

// event draws one that a driver could send now.
func (d *modelDriver) event() Event {
	var possible []Event
	for i, r := range d.running {
		if !r {
			continue
		}
		leg := Leg(i)
		f := &Failure{Leg: leg, Kind: Broken, Status: 502, Retry: rapid.Bool().Draw(d.t, "retry"), NoKV: rapid.Bool().Draw(d.t, "no KV"), Told: rapid.Bool().Draw(d.t, "told")}
		possible = append(possible, Ended{Leg: leg, Attempt: d.attempt, Failure: f},
			Ended{Leg: leg, Attempt: d.attempt, Handoff: leg == Prefill && rapid.Bool().Draw(d.t, "hand-off"), Releasable: leg == Prefill && rapid.Bool().Draw(d.t, "releasable")},
			Ended{Leg: leg, Attempt: d.attempt, Failure: f, Handoff: leg == Prefill, Releasable: leg == Prefill}, // one that cannot be used
			Ended{Leg: leg, Attempt: d.attempt, Failure: f, Unread: leg == Prefill})
		if leg == Decode {
			possible = append(possible, Chunk{d.attempt}, Chunk{d.attempt})
		}
	}
	if !d.gone {
		possible = append(possible, ClientGone{})
	}
	if d.locating {
		f := &Failure{Leg: Prefill, Kind: Coordinates, Status: 502, Retry: rapid.Bool().Draw(d.t, "retry")}
		possible = append(possible, Located{Attempt: d.attempt, Order: rapid.SampledFrom([]Order{Together, InOrder}).Draw(d.t, "order")},
			Located{Attempt: d.attempt, Failure: f})
	}
	possible = append(possible, Tick{}, Chunk{d.attempt - 1}, Ended{Leg: Decode, Attempt: d.attempt - 1}, Located{Attempt: d.attempt - 1})
	ev := rapid.SampledFrom(possible).Draw(d.t, "event")
	switch ev := ev.(type) {
	case Ended:
		if ev.Attempt == d.attempt {
			d.running[ev.Leg] = false
			switch {
			case ev.Leg == Prefill:
				d.keeps = (ev.Handoff && ev.Releasable || ev.Unread) && !d.taken
			case ev.Failure == nil:
				d.taken, d.keeps = true, false
			}
			if ev.Failure != nil {
				d.failed = d.failed || ev.Leg == Decode || !d.committed // D that streams needs no P
			} else if ev.Leg == Prefill {
				d.prefilled, d.handoff = true, ev.Handoff
				d.releasable = ev.Handoff && ev.Releasable
				if ev.Handoff && !d.releasable && !d.decode && !d.unpaired {
					d.handoffs++
				}
			}
		}
	case Located:
		if ev.Attempt == d.attempt {
			d.locating, d.located = false, true
			d.order = ev.Order
			if ev.Failure != nil {
				d.failed, d.unpaired = true, true
				if d.handoff && !d.releasable && !d.decode {
					d.handoffs-- // it is left to the lease
				}
			}
		}
	case ClientGone:
		d.gone = true
	}
	return ev
}

func (d *modelDriver) take(actions []Action) {
	t := d.t
	for i, a := range actions {
		if d.over {
			t.Fatalf("%s after the end", describe(a))
		}
		switch a := a.(type) {
		case Locate:
			if a.Attempt != d.attempt || d.alone {
				t.Fatalf("%s, but: %+v", describe(a), d)
			}
			d.locating = true
		case StartLeg:
			if a.Attempt != d.attempt {
				if d.running[Prefill] || d.running[Decode] {
					t.Fatal("a new attempt while a leg of the last one runs")
				}
				if d.keeps {
					t.Fatalf("a new attempt, and P keeps what nobody takes: %+v", d)
				}
				d.failed, d.locating, d.located, d.unpaired, d.prefilled, d.handoff, d.decode = false, false, false, false, false, false, false
				d.releasable, d.taken = false, false
			}
			if a.Attempt != d.attempt && a.Attempt > 1 && a.Leg == Decode && !d.alone {
				if !d.recompute {
					t.Fatalf("%s, but: %+v", describe(a), d)
				}
				d.alone = true // from here on
			}
			d.attempt = a.Attempt
			d.startLeg(a, actions[i+1:])
			d.running[a.Leg], d.cancelled[a.Leg] = true, false
		case CancelLeg:
			if !d.running[a.Leg] || d.cancelled[a.Leg] {
				t.Fatalf("%s, but: %+v", describe(a), d)
			}
			d.cancelled[a.Leg] = true
		case Release:
			if a.Attempt != d.attempt || !d.keeps || d.committed || d.running[Prefill] || d.running[Decode] {
				t.Fatalf("%s, but: %+v", describe(a), d)
			}
			d.keeps = false
		case Commit:
			if d.committed || d.answers > 0 || d.failed {
				t.Fatalf("commit, but: %+v", d)
			}
			d.committed = true
		case Forward:
			if !d.committed || d.answers > 0 {
				t.Fatalf("forward, but: %+v", d)
			}
		case Complete:
			if a.Streamed != d.committed || d.failed {
				t.Fatalf("complete, but: %+v", d)
			}
			d.answers++
		case Reject:
			if d.committed {
				t.Fatal("an error status after the headers")
			}
			d.answers++
		case Break:
			if !d.committed {
				t.Fatal("a broken stream that has not begun")
			}
			d.answers++
		case End:
			if d.running[Prefill] || d.running[Decode] {
				t.Fatalf("the end while a leg runs: %+v", d)
			}
			if d.keeps && !d.committed {
				t.Fatalf("the end, and P keeps what nobody takes: %+v", d)
			}
			d.over = true
		}
	}
	if d.answers > 1 {
		t.Fatal("two answers")
	}
	if d.over && d.answers == 0 && !d.gone {
		t.Fatal("the end without an answer, and the client waits")
	}
}

// startLeg checks one start; behind are the actions of the same step that follow it.
func (d *modelDriver) startLeg(a StartLeg, behind []Action) {
	t := d.t
	if d.running[a.Leg] {
		t.Fatalf("%s twice", describe(a))
	}
	if a.Leg == Prefill {
		if d.alone || d.answers > 0 || d.committed || d.gone {
			t.Fatalf("%s, but: %+v", describe(a), d)
		}
		return
	}
	if d.decode {
		t.Fatalf("%s twice in one attempt", describe(a))
	}
	d.decode = true
	wanted := d.answers == 0 && !d.committed && !d.gone && !d.failed
	switch a.Source {
	case NoKV:
		if !d.alone && (!d.located || d.order != InOrder || !d.prefilled || d.handoff) || !wanted {
			t.Fatalf("%s, but: %+v", describe(a), d)
		}
	case FromCoordinates:
		if d.alone || !d.located || d.order != Together || d.unpaired || !wanted {
			t.Fatalf("%s, but: %+v", describe(a), d)
		}
		if d.handoff && !d.releasable {
			d.handed++ // by the coordinates, as it should
		}
	case FromHandoff:
		if d.alone || !d.handoff || d.unpaired || d.running[Prefill] || d.located && d.order == Together && wanted {
			t.Fatalf("%s, but: %+v", describe(a), d)
		}
		if !d.releasable {
			d.handed++
		}
		if !wanted && d.releasable {
			t.Fatalf("%s, but P can be told itself: %+v", describe(a), d)
		}
		if !wanted { // only to tell P to let go
			for _, b := range behind {
				if c, ok := b.(CancelLeg); ok && c.Leg == Decode {
					return
				}
			}
			t.Fatalf("%s runs, and nobody waits for it: %+v", describe(a), d)
		}
	}
}
