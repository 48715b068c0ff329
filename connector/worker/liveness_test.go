package worker

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/fault"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/kv"
)

// faulty wraps an engine's agents by package fault, with rules for all of them.
func faulty(rules ...fault.Rule) func(int, agent.Agent) agent.Agent {
	return func(_ int, a agent.Agent) agent.Agent {
		f := fault.Wrap(a, fault.Options{})
		f.Add(rules...)
		return f
	}
}

// arrive lets P's request arrive, and run if it is allocated.
func (e *engine) arrive(l leg, allocate bool) {
	e.c.t.Helper()
	e.do(func(h *scheduler.Half) {
		if err := h.Arrived(time.Now(), connector.Request{ID: l.id, PromptTokens: l.tokens, Digest: l.digest,
			Params: kv.TransferParams{DoRemoteDecode: true, TransferID: l.transfer}}); err != nil {
			e.c.t.Error(err)
		}
		if allocate {
			h.Allocated(time.Now(), l.id, kv.BlockIDs{l.blocks}, 0, 0)
		}
	})
}

func (e *engine) allocate(l leg) {
	e.do(func(h *scheduler.Half) { h.Allocated(time.Now(), l.id, kv.BlockIDs{l.blocks}, 0, 0) })
}

func (e *engine) finish(l leg) {
	e.do(func(h *scheduler.Half) {
		h.Finished(time.Now(), l.id, connector.FinishLength, kv.BlockIDs{l.blocks}, l.tokens)
	})
}

// wantSilence checks that D's request failed because nothing was heard of P for three heartbeats.
func wantSilence(t *testing.T, o connector.Outcome) {
	t.Helper()
	if o.Kind != connector.ReceiveFailed || o.Err == nil || o.Err.Phase != connector.PhaseWait || !strings.Contains(o.Err.Error(), `engine "P"`) ||
		!strings.Contains(o.Err.Reason, "nothing was heard of its prefill engine for 15s") {
		t.Errorf("D: %+v", o)
	}
}

// P is stopped (SIGSTOP: its connections stay open, nothing is heard) at four moments. D's request
// ends within three heartbeats, and what P does when it goes on harms nobody (field-reports.md, L1).
func TestStoppedPrefillEngine(t *testing.T) {
	for _, when := range []string{"before the registration arrives", "while the prefill runs", "before the write", "during the write"} {
		t.Run(when, func(t *testing.T) {
			bubble(t, slow, options{}, options{}, func(t *testing.T, p, d *engine) {
				stop := func() { p.c.fabric.Partition(p.ranks[0].name, d.ranks[0].name) }
				d.decodeLeg(p, legD, -1)
				time.Sleep(time.Second) // connected
				p.arrive(legP, true)
				register := func() {
					d.do(func(h *scheduler.Half) {
						h.Allocated(time.Now(), legD.id, kv.BlockIDs{legD.blocks}, 0, h.External(legD.id, 0))
					})
				}
				switch when {
				case "before the registration arrives":
					stop()
					register()
				case "while the prefill runs":
					register()
					time.Sleep(time.Second)
					stop()
				case "before the write":
					register()
					time.Sleep(time.Second)
					stop()
					p.finish(legP)
				default:
					register()
					time.Sleep(time.Second)
					p.finish(legP)
					time.Sleep(2 * time.Second)
					stop()
				}
				began := time.Now()
				wantSilence(t, d.outcome(legD.id, 16*time.Second))
				t.Logf("after %v", time.Since(began))
				d.reuse()
				p.c.fabric.Heal(p.ranks[0].name, d.ranks[0].name)
				time.Sleep(10 * time.Second)
				if strings.Contains(when, "registration") || strings.Contains(when, "runs") {
					p.finish(legP)
				}
				time.Sleep(time.Minute)
				d.wantCanary()
				p.idle()
				d.idle()
				if n := len(d.outcomes(legD.id)); n != 1 {
					t.Errorf("%d outcomes", n)
				}
			})
		})
	}
}

// P's agent answers nothing although it takes everything in: the same end.
func TestMutePrefillEngine(t *testing.T) {
	mute := faulty(fault.Rule{Match: fault.Match{On: fault.OnNotify}, Do: fault.Drop})
	bubble(t, millisecond, options{wrap: mute}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		wantSilence(t, d.outcome(legD.id, 16*time.Second))
		d.idle()
		time.Sleep(time.Minute)
		p.idle()
	})
}

// Single notifications are lost, of every kind: nobody notices.
func TestLostNotifications(t *testing.T) {
	drop := func(prefix string, skip int) fault.Rule {
		return fault.Rule{Match: fault.Match{On: fault.OnNotify, Prefix: prefix}, Do: fault.Drop, After: skip, Times: 1}
	}
	for name, rules := range map[string][2]fault.Rule{
		"the registration":          {drop("nothing", 0), drop("PUSH_REG:", 0)},
		"its acknowledgement":       {drop("KVFERRY:", 0), drop("nothing", 0)},
		"a beat":                    {drop("nothing", 0), drop("KVFERRY:", 1)},
		"an answer":                 {drop("KVFERRY:", 2), drop("nothing", 0)},
		"registration and answer":   {drop("KVFERRY:", 1), drop("PUSH_REG:", 0)},
		"the second of everything":  {drop("", 1), drop("", 1)},
		"the third, and the second": {drop("", 2), drop("", 1)},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, millisecond, options{wrap: faulty(rules[0])}, options{wrap: faulty(rules[1])}, func(t *testing.T, p, d *engine) {
				p.arrive(legP, true)
				d.decodeLeg(p, legD, 0)
				time.Sleep(20 * time.Second)
				p.finish(legP)
				if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
					t.Fatalf("D: %+v", o)
				}
				if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
					t.Error(err)
				}
				p.outcome(legP.id, time.Second)
				p.idle()
				d.idle()
			})
		})
	}
}

// A registration that never arrives, although P lives, ends after a few tries; a completion that
// never arrives, after two heartbeats.
func TestNotificationsThatNeverArrive(t *testing.T) {
	bubble(t, millisecond, options{}, options{wrap: faulty(fault.Rule{Match: fault.Match{On: fault.OnNotify, Prefix: "PUSH_REG:"}, Do: fault.Drop})},
		func(t *testing.T, p, d *engine) {
			p.arrive(legP, true)
			d.decodeLeg(p, legD, 0)
			o := d.outcome(legD.id, 21*time.Second)
			if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseRegistration || !strings.Contains(o.Err.Reason, "after 4 tries") {
				t.Errorf("D: %+v", o)
			}
			p.finish(legP)
			if o := p.outcome(legP.id, time.Second); o.Err == nil || o.Err.Phase != connector.PhaseCancel {
				t.Errorf("P: %+v", o)
			}
			p.idle()
			d.idle()
		})
	bubble(t, millisecond, options{}, options{wrap: faulty(fault.Rule{Match: fault.Match{On: fault.OnNotification, Prefix: "cmpl"}, Do: fault.Drop})},
		func(t *testing.T, p, d *engine) {
			d.decodeLeg(p, legD, 0)
			p.prefillLeg(legP, connector.FinishLength)
			o := d.outcome(legD.id, 11*time.Second)
			if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseTransfer || !strings.Contains(o.Err.Reason, "its completion never came") {
				t.Errorf("D: %+v", o)
			}
			p.idle()
			d.idle()
		})
}

// A P that is slow but lives is never given up: a queue of ten minutes, a prefill of ten more, a
// network on which every message takes four seconds.
func TestSlowPrefillEngine(t *testing.T) {
	for _, latency := range []time.Duration{time.Millisecond, 4 * time.Second} {
		t.Run(latency.String(), func(t *testing.T) {
			bubble(t, local.Config{Latency: latency}, options{}, options{}, func(t *testing.T, p, d *engine) {
				p.arrive(legP, false)
				d.decodeLeg(p, legD, 0)
				time.Sleep(10 * time.Minute)
				p.allocate(legP)
				time.Sleep(10 * time.Minute)
				if o := d.outcomes(legD.id); len(o) != 0 {
					t.Fatalf("D gave up a P that works: %+v", o)
				}
				p.finish(legP)
				if o := d.outcome(legD.id, time.Minute); o.Kind != connector.Received {
					t.Errorf("D: %+v", o)
				}
				if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Minute)
				p.idle()
				d.idle()
			})
		})
	}
}

// P lives, but no prefill request of it ever arrives there: the lease bounds the wait, and the
// message says what to look at.
func TestNoPrefillLeg(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(29 * time.Second)
		if o := d.outcomes(legD.id); len(o) != 0 {
			t.Fatalf("D: %+v", o)
		}
		o := d.outcome(legD.id, 7*time.Second)
		if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhasePrefill || !strings.Contains(o.Err.Reason, "check that the router") {
			t.Errorf("D: %+v", o)
		}
		time.Sleep(time.Second)
		if s := p.ranks[0].worker.Stats(); s.Waiting != 0 {
			t.Errorf("%d registrations are left on P", s.Waiting)
		}
	})
}

// One rank's registration does not arrive: both ranks of D end, nothing is written afterwards.
func TestRegistrationReachesOneRank(t *testing.T) {
	for _, failing := range []int{0, 1} {
		t.Run(fmt.Sprint(failing), func(t *testing.T) {
			wrap := func(rank int, a agent.Agent) agent.Agent {
				f := fault.Wrap(a, fault.Options{})
				if rank == failing {
					f.Add(fault.Rule{Match: fault.Match{On: fault.OnNotify, Prefix: "PUSH_REG:"}, Do: fault.Drop})
				}
				return f
			}
			bubble(t, millisecond, options{tp: 2}, options{tp: 2, wrap: wrap}, func(t *testing.T, p, d *engine) {
				p.arrive(legP, true)
				d.decodeLeg(p, legD, 0)
				if o := d.outcome(legD.id, 21*time.Second); o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseRegistration {
					t.Errorf("D: %+v", o)
				}
				d.reuse()
				p.finish(legP)
				if o := p.outcome(legP.id, time.Second); o.Err == nil {
					t.Errorf("P: %+v", o)
				}
				time.Sleep(time.Minute)
				d.wantCanary()
				p.idle()
				d.idle()
			})
		})
	}
}

// D's own process was stopped: what P has said meanwhile lies unread, and is not taken for silence.
func TestLateTimerIsNoSilence(t *testing.T) {
	m := newMachine(machineConfig())
	s := &scenario{m: m}
	now := time.Unix(1000, 0)
	m.Step(now, stepMeta{connector.StepMeta{Registrations: []connector.Registration{{ID: "d-11111111", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Peer: addrOf("Q")}}}})
	m.Step(now, connected{addrOf("Q"), s.peerOf("Q")})
	m.Step(now, granted{receive: 1, grant: agent.GrantID{1}})
	failed := func(acts []action) bool {
		for _, a := range acts {
			if _, ok := a.(reportReceived); ok {
				return true
			}
		}
		return false
	}
	now = now.Add(time.Hour / 60)
	if failed(m.Step(now, tick{})) {
		t.Error("a timer that comes a minute late is taken for P's silence")
	}
	if failed(m.Step(now.Add(m.interval()-1), tick{})) {
		t.Error("P has no time to answer")
	}
	if !failed(m.Step(now.Add(m.interval()), tick{})) {
		t.Error("P is not given up")
	}
}

// An idle pair has no timer of any kind after a hand-off, whatever its end.
func TestNoTimerWhenNothingWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t, millisecond)
		defer cl.close()
		p, d := cl.engine("P", options{role: connector.Producer}), cl.engine("D", options{role: connector.Consumer})
		for i, end := range []string{"received", "aborted", "prefill aborted", "no prefill"} {
			l, m := legD, legP
			l.id, m.id = requestID(fmt.Sprintf("cmpl-%d-0-dddddddd", i)), requestID(fmt.Sprintf("cmpl-%d-0-aaaaaaaa", i))
			l.transfer, m.transfer = kv.TransferID(end), kv.TransferID(end)
			d.decodeLeg(p, l, 0)
			time.Sleep(time.Second)
			switch end {
			case "received":
				p.prefillLeg(m, connector.FinishLength)
			case "aborted":
				d.abort(l.id)
			case "prefill aborted":
				p.prefillLeg(m, connector.FinishAbort)
			}
			d.outcome(l.id, time.Minute)
		}
		time.Sleep(20 * time.Minute)
		before := p.ranks[0].worker.Stats().Wakeups + d.ranks[0].worker.Stats().Wakeups
		time.Sleep(24 * time.Hour)
		if n := p.ranks[0].worker.Stats().Wakeups + d.ranks[0].worker.Stats().Wakeups - before; n != 0 {
			t.Errorf("%d wake-ups in an idle day", n)
		}
		for _, e := range []*engine{p, d} {
			if s := e.ranks[0].worker.Stats(); s.Letters != 0 || s.LettersLost != 0 || s.Prefills != 0 || s.Notes != 0 {
				t.Errorf("%s: %+v", e.id, s)
			}
		}
	})
}
