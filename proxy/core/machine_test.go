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
	case StartLeg:
		return fmt.Sprintf("start %s #%d", a.Leg, a.Attempt)
	case CancelLeg:
		return fmt.Sprintf("cancel %s #%d: %s", a.Leg, a.Attempt, a.Cause)
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

// TestScenarios runs testdata/legs: "new" makes a machine, "at" gives it one event and shows what
// it wants done and when it wants to be called next.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var m *Machine
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				m = NewMachine(conf, !d.HasArg("alone"))
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
			case "done":
				ev = Ended{Leg: which, Attempt: attempt}
			case "failed":
				f := &Failure{Leg: which, Kind: Status, Status: 500, Retry: d.HasArg("retry"), Told: d.HasArg("told")}
				ev = Ended{Leg: which, Attempt: attempt, Failure: f}
			case "cancelled":
				ev = Ended{Leg: which, Attempt: attempt, Failure: &Failure{Leg: which, Kind: Cancelled}}
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
		alone := rapid.Bool().Draw(t, "alone")
		m := NewMachine(cfg, !alone)
		d := &modelDriver{t: t, alone: alone}
		now := t0
		d.take(m.Step(now, Begin{}))
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "dt")) * time.Second)
			d.take(m.Step(now, d.event()))
		}
		// Whatever the state: time alone must bring the answer, and ended legs the end.
		for range 20 {
			if d.over {
				break
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
		if got := m.Step(now.Add(time.Hour), Tick{}); len(got) != 0 {
			t.Fatalf("actions after the end: %v", got)
		}
	})
}

type modelDriver struct {
	t         *rapid.T
	alone     bool
	attempt   int
	running   [2]bool
	cancelled [2]bool
	failed    bool // a leg of this attempt failed
	committed bool
	answers   int
	gone      bool
	over      bool
}

// event draws one that a driver could send now.
func (d *modelDriver) event() Event {
	var possible []Event
	for i, r := range d.running {
		if !r {
			continue
		}
		leg := Leg(i)
		f := &Failure{Leg: leg, Kind: Broken, Status: 502, Retry: rapid.Bool().Draw(d.t, "retry"), Told: rapid.Bool().Draw(d.t, "told")}
		possible = append(possible, Ended{leg, d.attempt, f}, Ended{leg, d.attempt, nil})
		if leg == Decode {
			possible = append(possible, Chunk{d.attempt}, Chunk{d.attempt})
		}
	}
	if !d.gone {
		possible = append(possible, ClientGone{})
	}
	possible = append(possible, Tick{}, Chunk{d.attempt - 1}, Ended{Decode, d.attempt - 1, nil})
	ev := rapid.SampledFrom(possible).Draw(d.t, "event")
	switch ev := ev.(type) {
	case Ended:
		if ev.Attempt == d.attempt {
			d.running[ev.Leg] = false
			if ev.Failure != nil {
				d.failed = true
			}
		}
	case ClientGone:
		d.gone = true
	}
	return ev
}

func (d *modelDriver) take(actions []Action) {
	t := d.t
	for _, a := range actions {
		if d.over {
			t.Fatalf("%s after the end", describe(a))
		}
		switch a := a.(type) {
		case StartLeg:
			if d.running[a.Leg] || d.answers > 0 || d.committed || d.gone {
				t.Fatalf("%s, but: %+v", describe(a), d)
			}
			if a.Leg == Prefill && d.alone {
				t.Fatal("a prefill leg of a request that D serves alone")
			}
			if a.Attempt != d.attempt && (d.running[Prefill] || d.running[Decode]) {
				t.Fatal("a new attempt while a leg of the last one runs")
			}
			d.attempt, d.failed = a.Attempt, false
			d.running[a.Leg], d.cancelled[a.Leg] = true, false
		case CancelLeg:
			if !d.running[a.Leg] || d.cancelled[a.Leg] {
				t.Fatalf("%s, but: %+v", describe(a), d)
			}
			d.cancelled[a.Leg] = true
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
