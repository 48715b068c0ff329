package worker

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/fault"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/kv"
)

// handOver runs one hand-off of its own ids, which must succeed.
func handOver(t *testing.T, p, d *engine, name string) {
	t.Helper()
	l, m := legD, legP
	l.id, m.id = requestID("cmpl-"+name+"-0-dddddddd"), requestID("cmpl-"+name+"-0-aaaaaaaa")
	l.transfer, m.transfer = kv.TransferID(name), kv.TransferID(name)
	p.fill(m.blocks, 0, kvOfP)
	d.decodeLeg(p, l, 0)
	time.Sleep(time.Second)
	p.prefillLeg(m, connector.FinishLength)
	if o := d.outcome(l.id, time.Minute); o.Kind != connector.Received {
		t.Errorf("%s: D: %+v", name, o)
	}
	if err := d.holds(l.blocks, 0, kvOfP); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	p.outcome(m.id, time.Minute)
}

// P dies and comes back with the same engine id. What waited for it ends at once, or within three
// heartbeats when nobody says that its connection is gone; what comes afterwards is served.
func TestPrefillEngineRestarts(t *testing.T) {
	deaf := fault.Rule{Match: fault.Match{On: fault.OnPeerLost}, Do: fault.Delay, Delay: 24 * time.Hour}
	for name, rules := range map[string][]fault.Rule{"told": nil, "untold": {deaf}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cl := newCluster(t, millisecond)
				defer cl.close()
				old := cl.engine("P", options{role: connector.Producer})
				d := cl.engine("D", options{role: connector.Consumer, wrap: faulty(rules...)})
				handOver(t, old, d, "before")
				d.decodeLeg(old, legD, 0)
				time.Sleep(time.Second)
				cl.fabric.Kill("P.0")
				if err := old.listener.Close(); err != nil {
					t.Fatal(err)
				}
				p := cl.engine("P", options{role: connector.Producer, agents: "P again", host: "P"})
				bound := time.Second
				if rules != nil {
					bound = 16 * time.Second
				}
				if o := d.outcome(legD.id, bound); o.Kind != connector.ReceiveFailed {
					t.Errorf("D: %+v", o)
				}
				d.reuse()
				handOver(t, p, d, "after")
				p.idle()
				d.idle()
			})
		})
	}
}

// D dies while P writes, and comes back with the same engine id: P's blocks are given back, and the
// new D is served.
func TestDecodeEngineRestartsDuringWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t, slow)
		defer cl.close()
		p := cl.engine("P", options{role: connector.Producer})
		old := cl.engine("D", options{role: connector.Consumer})
		old.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(2 * time.Second)
		cl.fabric.Kill("D.0")
		if err := old.listener.Close(); err != nil {
			t.Fatal(err)
		}
		if o := p.outcome(legP.id, time.Second); o.Err == nil || o.Err.Phase != connector.PhaseTransfer {
			t.Errorf("P: %+v", o)
		}
		d := cl.engine("D", options{role: connector.Consumer, agents: "D again", host: "D"})
		handOver(t, p, d, "after")
		p.idle()
		d.idle()
	})
}

// finished lets P finish a request and gives what its response tells.
func (e *engine) finished(l leg) (p *kv.TransferParams) {
	e.c.t.Helper()
	e.arrive(l, true)
	e.do(func(h *scheduler.Half) {
		_, p = h.Finished(time.Now(), l.id, connector.FinishLength, kv.BlockIDs{l.blocks}, l.tokens)
	})
	return p
}

// decodeWith lets D register with parameters that came from P's response.
func (e *engine) decodeWith(l leg, p *kv.TransferParams) {
	e.c.t.Helper()
	q := *p
	q.TransferID = l.transfer
	e.do(func(h *scheduler.Half) {
		if err := h.Arrived(time.Now(), connector.Request{ID: l.id, PromptTokens: l.tokens, Digest: l.digest, Params: q}); err != nil {
			e.c.t.Errorf("%s: %v", e.id, err)
		}
		h.Allocated(time.Now(), l.id, kv.BlockIDs{l.blocks}, 0, h.External(l.id, 0))
	})
}

// The hand-off parameters carry the lease: they are good once, while it lasts, for its blocks.
func TestLeaseInParameters(t *testing.T) {
	refused := func(t *testing.T, d *engine, id kv.RequestID) {
		t.Helper()
		o := d.outcome(id, time.Second)
		if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseRegistration || !strings.Contains(o.Err.Reason, "lease") {
			t.Errorf("D: %+v", o)
		}
		d.reuse()
	}
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		params := p.finished(legP)
		if params.Lease == 0 {
			t.Fatal("no lease in the parameters")
		}
		d.decodeWith(legD, params)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
			t.Fatalf("D: %+v", o)
		}
		d.reuse()

		// The same parameters a second time.
		again := legD
		again.id = "cmpl-r1-0-eeeeeeee"
		d.decodeWith(again, params)
		refused(t, d, again.id)

		// After the lease has ended, while a new request of the same ids holds blocks under its own.
		second, third := legP, legP
		second.id, third.id = "cmpl-r1-0-bbbbbbbb", "cmpl-r1-0-cccccccc"
		params = p.finished(second)
		p.outcome(second.id, 31*time.Second)
		fresh := p.finished(third)
		late := legD
		late.id = "cmpl-r1-0-ffffffff"
		d.decodeWith(late, params)
		refused(t, d, late.id)
		if fresh.Lease <= params.Lease {
			t.Errorf("lease %d after %d", fresh.Lease, params.Lease)
		}
		last := legD
		last.id = "cmpl-r1-0-99999999"
		d.decodeWith(last, fresh)
		if o := d.outcome(last.id, time.Second); o.Kind != connector.Received {
			t.Errorf("the new lease: %+v", o)
		}
		d.reuse()
		time.Sleep(time.Minute)
		d.wantCanary()
		p.idle()
		d.idle()
	})
}

// D ends a request that it never registered, at every moment of P's work: P's blocks come back at
// once (nixl-connector.md, H15), and a sibling of the same dispatch keeps its own.
func TestWithdrawnRequest(t *testing.T) {
	for _, when := range []string{"before P has it", "queued", "running", "finished"} {
		for _, how := range []string{"abort", "full hit"} {
			t.Run(when+", "+how, func(t *testing.T) {
				bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
					sibling, theirs := legP, legD
					sibling.id, theirs.id = "cmpl-r1-1-aaaaaaaa", "cmpl-r1-1-dddddddd"
					p.prefillLeg(sibling, connector.FinishLength)
					withdraw := func() {
						d.decodeLeg(p, legD, -1)
						time.Sleep(time.Second)
						if how == "abort" {
							if d.abort(legD.id) {
								t.Error("held")
							}
						} else {
							d.do(func(h *scheduler.Half) { h.Allocated(time.Now(), legD.id, kv.BlockIDs{legD.blocks}, 8, 0) })
						}
						time.Sleep(time.Second)
					}
					if when == "before P has it" {
						withdraw()
					}
					p.arrive(legP, false)
					if when == "queued" {
						withdraw()
					}
					p.allocate(legP)
					if when == "running" {
						withdraw()
					}
					p.finish(legP)
					if when == "finished" {
						withdraw()
					}
					if o := p.outcome(legP.id, time.Second); o.Kind != connector.Released || o.Err == nil || o.Err.Phase != connector.PhaseCancel {
						t.Errorf("P: %+v", o)
					}
					d.decodeLeg(p, theirs, 0)
					if o := d.outcome(theirs.id, time.Second); o.Kind != connector.Received {
						t.Errorf("the sibling: %+v", o)
					}
					p.outcome(sibling.id, time.Second)
					time.Sleep(time.Minute)
					p.idle()
					d.idle()
				})
			})
		}
	}
}

// A registered request that D aborts gives P its blocks back at once, whatever P is at.
func TestCancelledRequest(t *testing.T) {
	for _, when := range []string{"queued", "running", "writing"} {
		t.Run(when, func(t *testing.T) {
			bubble(t, slow, options{}, options{}, func(t *testing.T, p, d *engine) {
				p.arrive(legP, when != "queued")
				d.decodeLeg(p, legD, 0)
				time.Sleep(time.Second)
				if when == "writing" {
					p.finish(legP)
					time.Sleep(2 * time.Second)
				}
				d.abort(legD.id)
				d.outcome(legD.id, time.Second)
				d.reuse()
				time.Sleep(time.Second)
				if when != "writing" {
					p.allocate(legP)
					p.finish(legP)
				}
				if o := p.outcome(legP.id, time.Second); o.Err == nil || o.Err.Phase != connector.PhaseCancel {
					t.Errorf("P: %+v", o)
				}
				time.Sleep(time.Minute)
				d.wantCanary()
				p.idle()
				d.idle()
				if s := d.ranks[0].worker.Stats(); s.Letters != 0 || s.LettersLost != 0 {
					t.Errorf("%d letters wait, %d were lost", s.Letters, s.LettersLost)
				}
			})
		})
	}
}

// Each reason for which P does not serve a registration ends in D's error, with its phase.
func TestReasonsReachD(t *testing.T) {
	for name, c := range map[string]struct {
		po    options
		do    func(t *testing.T, p, d *engine)
		phase connector.Phase
		text  string
	}{
		"prefill aborted": {do: func(t *testing.T, p, d *engine) {
			d.decodeLeg(p, legD, 0)
			time.Sleep(time.Second)
			p.prefillLeg(legP, connector.FinishAbort)
		}, phase: connector.PhasePrefill, text: `the prefill ended as "abort"`},
		"lease over": {do: func(t *testing.T, p, d *engine) {
			p.prefillLeg(legP, connector.FinishLength)
			p.outcome(legP.id, 31*time.Second)
			d.decodeLeg(p, legD, 0)
		}, phase: connector.PhaseLease, text: "its lease ended"},
		"not posted": {po: options{wrap: faulty(fault.Rule{Match: fault.Match{On: fault.OnPost}, Do: fault.Fail})},
			do: func(t *testing.T, p, d *engine) {
				d.decodeLeg(p, legD, 0)
				p.prefillLeg(legP, connector.FinishLength)
			}, phase: connector.PhaseTransfer, text: "injected fault"},
		"write failed": {po: options{wrap: faulty(fault.Rule{Match: fault.Match{On: fault.OnResult}, Do: fault.Fail})},
			do: func(t *testing.T, p, d *engine) {
				d.ranks[0].agent.(*fault.Agent).Add(fault.Rule{Match: fault.Match{On: fault.OnNotification, Prefix: "cmpl"}, Do: fault.Drop})
				d.decodeLeg(p, legD, 0)
				p.prefillLeg(legP, connector.FinishLength)
			}, phase: connector.PhaseTransfer, text: "the write failed"},
		"other prompt": {do: func(t *testing.T, p, d *engine) {
			l := legD
			l.digest = connector.Digest{9}
			d.decodeLeg(p, l, 0)
			p.prefillLeg(legP, connector.FinishLength)
		}, phase: connector.PhaseRegistration, text: "the prompts differ"},
		"other length": {do: func(t *testing.T, p, d *engine) {
			l := legD
			l.tokens = 9
			d.decodeLeg(p, l, 0)
			p.prefillLeg(legP, connector.FinishLength)
		}, phase: connector.PhaseRegistration, text: "9 tokens, ours 10"},
		"empty prefill": {do: func(t *testing.T, p, d *engine) {
			d.decodeLeg(p, legD, 0)
			m := legP
			m.blocks = nil
			p.prefillLeg(m, connector.FinishLength)
		}, phase: connector.PhasePrefill, text: "the prefill left no blocks"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, millisecond, c.po, options{wrap: faulty()}, func(t *testing.T, p, d *engine) {
				c.do(t, p, d)
				o := d.outcome(legD.id, time.Second)
				if o.Kind != connector.ReceiveFailed || o.Err.Phase != c.phase || !strings.Contains(o.Err.Error(), c.text) || !strings.Contains(o.Err.Error(), `engine "P"`) {
					t.Errorf("D: %+v", o)
				}
				time.Sleep(time.Minute)
				p.idle()
				d.idle()
				if s := p.ranks[0].worker.Stats(); s.Letters != 0 || s.LettersLost != 0 || s.FailuresSent != 1 {
					t.Errorf("%d letters wait, %d were lost, %d sent", s.Letters, s.LettersLost, s.FailuresSent)
				}
			})
		})
	}
}

// A peer without control messages is sent none, and PUSH_FAIL where it announces that.
func TestPeersWithoutControl(t *testing.T) {
	control := 0
	count := func(_ int, a agent.Agent) agent.Agent {
		f := fault.Wrap(a, fault.Options{})
		f.Add(fault.Rule{Match: fault.Match{On: fault.OnNotify, Where: func(o fault.Occasion) bool {
			if strings.HasPrefix(string(o.Msg), "KVFERRY:") {
				control++
			}
			return false
		}}, Do: fault.Drop})
		return f
	}
	bubble(t, millisecond, options{old: true, wrap: count}, options{old: true, wrap: count, timeout: time.Minute}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(20 * time.Second)
		p.prefillLeg(legP, connector.FinishLength)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
			t.Errorf("D: %+v", o)
		}
		other := legD
		other.id, other.transfer = "cmpl-other-0-dddddddd", ""
		d.decodeLeg(p, other, 0)
		if o := d.outcome(other.id, 61*time.Second); o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseWait {
			t.Errorf("D: %+v", o)
		}
		if control != 0 {
			t.Errorf("%d control messages", control)
		}
	})
}
