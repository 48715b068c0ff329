package worker

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/fault"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// irrevocable is an agent that cannot take a grant back, as NIXL cannot.
type irrevocable struct{ agent.Agent }

func (a irrevocable) Capabilities() agent.Capabilities {
	c := a.Agent.Capabilities()
	c.Revocable = false
	return c
}

func (a irrevocable) Revoke(agent.GrantID) {}

func noRevoke(_ int, a agent.Agent) agent.Agent { return irrevocable{a} }

func (e *engine) quarantined() (requests, blocks int) {
	s := e.ranks[0].worker.Stats()
	return s.Quarantined, s.QuarantinedBlocks
}

// P's agent reports a failure and writes later. D, which cannot keep it from that, uses the blocks
// only after it: whoever has them next is never written.
func TestFailureReportedAndWrittenLater(t *testing.T) {
	late := faulty(fault.Rule{Match: fault.Match{On: fault.OnPost}, Do: fault.WriteLate, Delay: 8 * time.Second})
	bubble(t, millisecond, options{wrap: late}, options{wrap: noRevoke}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(time.Second)
		began := time.Now()
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(2 * time.Second)
		if o := d.outcomes(legD.id); len(o) != 0 {
			t.Fatalf("D's blocks are given back before the late write: %+v", o)
		}
		if n, blocks := d.quarantined(); n != 1 || blocks != 3 {
			t.Errorf("%d requests, %d blocks in quarantine", n, blocks)
		}
		o := d.outcome(legD.id, time.Minute)
		if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseTransfer {
			t.Errorf("D: %+v", o)
		}
		if took := time.Since(began); took < 8*time.Second {
			t.Errorf("given back after %v", took)
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
			t.Errorf("the late write never came; the test proves nothing: %v", err)
		}
		d.reuse()
		time.Sleep(time.Minute)
		d.wantCanary()
		p.idle()
		d.idle()
		if a, b := d.trace.count("blocks_quarantined"), d.trace.count("quarantine_ended"); a != 1 || b != 1 {
			t.Errorf("%d quarantines begun, %d ended", a, b)
		}
	})
}

// D aborts at many moments around a slow write that nothing stops but P's word.
func TestAbortWithoutRevoke(t *testing.T) {
	for at := time.Duration(0); at < 5*time.Second; at += 600 * time.Millisecond {
		for _, registered := range []bool{true, false} {
			bubble(t, slow, options{}, options{wrap: noRevoke}, func(t *testing.T, p, d *engine) {
				if registered {
					d.decodeLeg(p, legD, 0)
					p.prefillLeg(legP, connector.FinishLength)
				} else {
					p.prefillLeg(legP, connector.FinishLength)
					d.decodeLeg(p, legD, 0)
				}
				time.Sleep(at)
				hold := d.abort(legD.id)
				if hold {
					d.outcome(legD.id, 2*time.Second)
				}
				d.reuse()
				time.Sleep(time.Minute)
				d.wantCanary()
				p.idle()
				d.idle()
			})
		}
	}
}

// P says nothing, so that only the end of its connection ends the quarantine.
func TestQuarantineEndsWithTheConnection(t *testing.T) {
	mute := faulty(fault.Rule{Match: fault.Match{On: fault.OnNotify}, Do: fault.Drop})
	bubble(t, millisecond, options{wrap: mute}, options{wrap: noRevoke}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(time.Second)
		if !d.abort(legD.id) {
			t.Fatal("not held")
		}
		time.Sleep(time.Hour)
		if o := d.outcomes(legD.id); len(o) != 0 {
			t.Fatalf("given back without P's word: %+v", o)
		}
		if n, blocks := d.quarantined(); n != 1 || blocks != 3 {
			t.Errorf("%d requests, %d blocks in quarantine", n, blocks)
		}
		p.c.fabric.Kill(p.ranks[0].name)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Released {
			t.Errorf("D: %+v", o)
		}
		d.idle()
	})
}

// P is stopped and goes on a minute later: then it confirms.
func TestQuarantineEndsWhenPGoesOn(t *testing.T) {
	bubble(t, slow, options{}, options{wrap: noRevoke}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(2 * time.Second)
		p.c.fabric.Partition(p.ranks[0].name, d.ranks[0].name)
		time.Sleep(time.Minute)
		if o := d.outcomes(legD.id); len(o) != 0 {
			t.Fatalf("given back while P may write: %+v", o)
		}
		p.c.fabric.Heal(p.ranks[0].name, d.ranks[0].name)
		wantSilence(t, d.outcome(legD.id, 11*time.Second))
		d.reuse()
		time.Sleep(time.Minute)
		d.wantCanary()
		p.idle()
		d.idle()
	})
}

// So many blocks may be at risk and no more: beyond it registrations are refused, until P confirms.
func TestQuarantineIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t, millisecond)
		defer cl.close()
		p := cl.engine("P", options{role: connector.Producer})
		d := cl.engine("D", options{role: connector.Consumer, wrap: noRevoke})
		register := func(i int) kv.RequestID {
			l := legD
			l.id, l.transfer, l.blocks = requestID(fmt.Sprintf("cmpl-%d-0-dddddddd", i)), "", []kv.BlockID{kv.BlockID(i)}
			l.tokens = 4
			d.decodeLeg(p, l, 0)
			time.Sleep(10 * time.Millisecond)
			return l.id
		}
		var ids []kv.RequestID
		for i := range testBlocks / 4 {
			ids = append(ids, register(i))
		}
		cl.fabric.Partition("P.0", "D.0")
		for _, id := range ids {
			d.abort(id)
		}
		time.Sleep(time.Second)
		if n, blocks := d.quarantined(); n != testBlocks/4 || blocks != testBlocks/4 {
			t.Errorf("%d requests, %d blocks in quarantine", n, blocks)
		}
		id := register(testBlocks / 4)
		if o := d.outcome(id, time.Second); o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseLimit {
			t.Errorf("one too many: %+v", o)
		}
		cl.fabric.Heal("P.0", "D.0")
		for _, id := range ids {
			if o := d.outcome(id, 11*time.Second); o.Kind != connector.Released {
				t.Errorf("%s: %+v", id, o)
			}
		}
		last := register(testBlocks/4 + 1)
		time.Sleep(time.Second)
		d.do(func(h *scheduler.Half) {
			if s := h.Stats(); s.Receiving != 1 {
				t.Errorf("%d receive after the quarantine", s.Receiving)
			}
		})
		d.abort(last)
		d.outcome(last, time.Second)
		d.idle()
	})
}

// The cancel is lost again and again: D does not give up asking before P has confirmed.
func TestQuarantineAsksAgain(t *testing.T) {
	wrap := func(_ int, a agent.Agent) agent.Agent {
		f := fault.Wrap(a, fault.Options{})
		f.Add(fault.Rule{Match: fault.Match{On: fault.OnNotify, Prefix: "KVFERRY:"}, Do: fault.Drop, Times: 12})
		return irrevocable{f}
	}
	bubble(t, millisecond, options{}, options{wrap: wrap}, func(t *testing.T, p, d *engine) {
		p.arrive(legP, true)
		d.decodeLeg(p, legD, 0)
		time.Sleep(time.Second)
		d.abort(legD.id)
		time.Sleep(45 * time.Second)
		if o := d.outcomes(legD.id); len(o) != 0 {
			t.Fatalf("given back without P's word: %+v", o)
		}
		if o := d.outcome(legD.id, 20*time.Second); o.Kind != connector.Released {
			t.Errorf("D: %+v", o)
		}
		p.finish(legP)
		if o := p.outcome(legP.id, time.Second); o.Err == nil || o.Err.Phase != connector.PhaseCancel {
			t.Errorf("P: %+v", o)
		}
		p.idle()
		d.idle()
	})
}

// P writes by its own connection: the loss of ours alone proves nothing.
func TestQuarantineMindsTheRightConnection(t *testing.T) {
	for _, reached := range []bool{true, false} {
		m := newMachine(machineConfig())
		m.irrevocable = true
		s, now := &scenario{m: m}, time.Unix(1000, 0)
		m.Step(now, stepMeta{connector.StepMeta{Registrations: []connector.Registration{{ID: "d-11111111", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Peer: addrOf("Q")}}}})
		m.Step(now, connected{addrOf("Q"), s.peerOf("Q")})
		m.Step(now, granted{receive: 1, grant: agent.GrantID{1}})
		if reached {
			m.Step(now, notification{agent.Notification{From: agent.PeerID{Name: "q.0", Gen: 7}, Msg: []byte("HB:x")}})
		}
		reported := func(in input) bool {
			for _, a := range m.Step(now, in) {
				if _, ok := a.(reportReceived); ok {
					return true
				}
			}
			return false
		}
		if reported(stepMeta{connector.StepMeta{Cancels: []kv.RequestID{"d-11111111"}}}) {
			t.Fatal("reported without P's word")
		}
		if got := reported(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: "q.0", Gen: 1}}}); got == reached {
			t.Errorf("P has reached us: %v; reported at the loss of our connection: %v", reached, got)
		}
		if got := reported(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: "q.0", Gen: 7}, Inbound: true}}); got != reached {
			t.Errorf("P has reached us: %v; reported at the loss of its connection: %v", reached, got)
		}
	}
}

// A D agent whose WRITE runs is not forgotten for others: its beats get true answers.
func TestBusySenderIsKept(t *testing.T) {
	m, now := busy(t)
	m.Step(now, from("q.0", func() []byte { // nothing of it waits
		b, err := wire.AppendControl(nil, &wire.Cancel{Seq: 1, From: wire.Sender{Engine: "Q", Host: "q", Port: 5600, TP: 1}, RegistrationRef: testRef("q-22222222", 2)})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}()))
	if s := m.snapshot(); s.Waiting != 0 || s.InFlight != 1 {
		t.Fatalf("%+v", s)
	}
	for i := range 8 * maxSenders {
		m.producer.senderOf(agent.Name(fmt.Sprint("idle", i)))
	}
	if n := len(m.producer.senders); n != maxSenders {
		t.Errorf("%d senders are remembered", n)
	}
	if got := m.stateOf(m.producer.senders["q.0"], testRef("w-22222222", 1)); got != "writing" {
		t.Errorf("the WRITE under way is %q", got)
	}
}
