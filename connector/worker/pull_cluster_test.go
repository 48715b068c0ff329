package worker

import (
	"fmt"
	"math/rand/v2"
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

func pullBubble(t *testing.T, cfg local.Config, po, do options, f func(t *testing.T, p, d *engine)) {
	po.mode, do.mode = kv.Pull, kv.Pull
	bubble(t, cfg, po, do, f)
}

// prefilled runs P's leg and returns what its answer says.
func (e *engine) prefilled(l leg) *kv.TransferParams {
	e.c.t.Helper()
	var params *kv.TransferParams
	e.do(func(h *scheduler.Half) {
		if err := h.Arrived(time.Now(), connector.Request{ID: l.id, PromptTokens: l.tokens, Digest: l.digest, Params: kv.TransferParams{DoRemoteDecode: true}}); err != nil {
			e.c.t.Errorf("%s: %v", e.id, err)
			return
		}
		h.Allocated(time.Now(), l.id, kv.BlockIDs{l.blocks}, 0, 0)
		_, params = h.Finished(time.Now(), l.id, connector.FinishLength, kv.BlockIDs{l.blocks}, l.tokens)
	})
	return params
}

// pullLeg lets D arrive with P's answer and, unless computed is negative, get its blocks.
func (e *engine) pullLeg(params *kv.TransferParams, l leg, computed int) {
	e.c.t.Helper()
	p := *params
	e.do(func(h *scheduler.Half) {
		if err := h.Arrived(time.Now(), connector.Request{ID: l.id, PromptTokens: l.tokens, Digest: l.digest, Params: p}); err != nil {
			e.c.t.Errorf("%s: %v", e.id, err)
		}
		if computed >= 0 {
			h.Allocated(time.Now(), l.id, kv.BlockIDs{l.blocks}, computed, h.External(l.id, computed))
		}
	})
}

// Every rank reads from its rank, and both engines are done at once.
func TestPullOfTwoRanks(t *testing.T) {
	pullBubble(t, millisecond, options{tp: 2}, options{tp: 2}, func(t *testing.T, p, d *engine) {
		d.pullLeg(p.prefilled(legP), legD, 0)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received || o.Transfer.Bytes != 2*3*testLayers*testBlockLen {
			t.Fatalf("D: %+v", o)
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
			t.Error(err)
		}
		if o := p.outcome(legP.id, time.Second); o.Kind != connector.Released || o.Err != nil {
			t.Errorf("P: %+v", o)
		}
		p.idle()
		d.idle()
		time.Sleep(time.Minute) // until the last timer is gone
		n := [2]uint64{p.ranks[0].worker.Stats().Wakeups, d.ranks[0].worker.Stats().Wakeups}
		time.Sleep(time.Hour)
		if p.ranks[0].worker.Stats().Wakeups != n[0] || d.ranks[0].worker.Stats().Wakeups != n[1] {
			t.Error("idle workers wake up")
		}
	})
}

// No beat of D arrives, and P's lease ends under D's READ (H1, H2): P uses its blocks again at once, and
// D never takes them for its own.
func TestLeaseEndsUnderRead(t *testing.T) {
	for _, exact := range []bool{true, false} {
		t.Run(fmt.Sprintf("agent can revoke %v", exact), func(t *testing.T) {
			var wrap func(int, agent.Agent) agent.Agent
			if !exact {
				wrap = noRevoke
			}
			mute := faulty(fault.Rule{Match: fault.Match{On: fault.OnNotify, Where: func(o fault.Occasion) bool { return isBeat(o.Msg) }}, Do: fault.Drop})
			pullBubble(t, slow, options{lease: 2 * time.Second, wrap: wrap}, options{lease: 2 * time.Second, wrap: mute}, func(t *testing.T, p, d *engine) {
				d.pullLeg(p.prefilled(legP), legD, 0)
				go func() {
					p.outcome(legP.id, time.Minute)
					p.fill(legP.blocks, 0, 9000)
				}()
				o := d.outcome(legD.id, time.Minute)
				if o.Kind == connector.Received {
					t.Fatal("the READ was over before the lease; the test proves nothing")
				}
				if o.Err == nil || o.Err.Phase != connector.PhaseLease && o.Err.Phase != connector.PhaseTransfer {
					t.Errorf("D: %+v", o)
				}
				if o := p.outcome(legP.id, time.Minute); o.Err == nil || o.Err.Phase != connector.PhaseLease {
					t.Errorf("P: %+v", o)
				}
				time.Sleep(time.Minute)
				p.idle()
				d.idle()
			})
		})
	}
}

func isBeat(msg []byte) bool { return strings.Contains(string(msg), "\xa4kind\xa4beat") }

// P's answers do not arrive: D's wait ends after as many heartbeats as it asked.
func TestMuteLender(t *testing.T) {
	drop := faulty(fault.Rule{Match: fault.Match{On: fault.OnNotify}, Do: fault.Drop})
	pullBubble(t, millisecond, options{wrap: drop}, options{}, func(t *testing.T, p, d *engine) {
		d.pullLeg(p.prefilled(legP), legD, 0)
		o := d.outcome(legD.id, 21*time.Second)
		if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseWait {
			t.Errorf("D: %+v", o)
		}
		if o := p.outcome(legP.id, time.Minute); o.Err == nil || o.Err.Phase != connector.PhaseCancel {
			t.Errorf("P: %+v", o)
		}
		time.Sleep(time.Minute)
		p.idle()
		d.idle()
	})
}

// One permission is lost on the way: D asks again, P answers the same.
func TestLostPermission(t *testing.T) {
	drop := faulty(fault.Rule{Match: fault.Match{On: fault.OnNotify}, Do: fault.Drop, Times: 1})
	pullBubble(t, millisecond, options{wrap: drop}, options{}, func(t *testing.T, p, d *engine) {
		d.pullLeg(p.prefilled(legP), legD, 0)
		if o := d.outcome(legD.id, 6*time.Second); o.Kind != connector.Received {
			t.Fatalf("D: %+v", o)
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
			t.Error(err)
		}
		p.outcome(legP.id, time.Second)
		p.idle()
	})
}

// A READ that stands still ends by its bound of silence (H14), and P is told.
func TestReadStandsStill(t *testing.T) {
	stall := faulty(fault.Rule{Match: fault.Match{On: fault.OnPost}, Do: fault.Stall})
	pullBubble(t, millisecond, options{}, options{wrap: stall, silence: 3 * time.Second}, func(t *testing.T, p, d *engine) {
		d.pullLeg(p.prefilled(legP), legD, 0)
		o := d.outcome(legD.id, 4*time.Second)
		if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseTransfer {
			t.Errorf("D: %+v", o)
		}
		if o := p.outcome(legP.id, time.Second); o.Err == nil || o.Err.Phase != connector.PhaseCancel {
			t.Errorf("P: %+v", o)
		}
		p.idle()
		d.idle()
	})
}

// D waits in its own queue for much longer than a lease: its beats keep P's blocks, on no engine's steps.
func TestBeatsKeepTheHold(t *testing.T) {
	pullBubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		params := p.prefilled(legP)
		d.pullLeg(params, legD, -1)
		time.Sleep(10 * time.Minute)
		if n := len(p.outcomes(legP.id)); n != 0 {
			t.Fatalf("P gave its blocks back: %+v", p.outcomes(legP.id))
		}
		d.do(func(h *scheduler.Half) {
			h.Allocated(time.Now(), legD.id, kv.BlockIDs{legD.blocks}, 0, h.External(legD.id, 0))
		})
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
			t.Errorf("D: %+v", o)
		}
		p.outcome(legP.id, time.Second)
	})
}

// Random faults of every kind on both agents, random aborts, random siblings: every request ends, what
// was received is right, P's blocks come home, and nobody reads a block after it was given back.
func TestPullChaos(t *testing.T) {
	received, failed, released := 0, 0, 0
	for seed := range uint64(150) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			wrap := func(_ int, a agent.Agent) agent.Agent {
				f := fault.Wrap(a, fault.Options{Seed: seed})
				f.Add(randomRules(r)...)
				if seed%3 == 2 {
					return irrevocable{f}
				}
				return f
			}
			cl := newCluster(t, local.Config{Latency: time.Millisecond, Bandwidth: 2000, Chunk: 16})
			defer cl.close()
			o := options{tp: 1 + int(seed%2), lease: 6 * time.Second, timeout: 20 * time.Second, silence: 3 * time.Second, wrap: wrap, mode: kv.Pull}
			o.role = connector.Producer
			p := cl.engine("P", o)
			o.role = connector.Consumer
			d := cl.engine("D", o)
			const requests = 5
			var ls, ms [requests]leg
			for i := range requests {
				id := fmt.Sprintf("cmpl-r%d-0", i)
				ms[i] = leg{id: kv.RequestID(id + "-aaaaaaaa"), tokens: 10, digest: connector.Digest{byte(i)}, blocks: []kv.BlockID{kv.BlockID(3 * i), kv.BlockID(3*i + 1), kv.BlockID(3*i + 2)}}
				ls[i] = ms[i]
				ls[i].id = kv.RequestID(id + "-dddddddd")
				p.fill(ms[i].blocks, 0, uint32(1000+i))
				d.fill(ls[i].blocks, 0, canary)
			}
			what := make([]uint32, requests)
			ended := make(chan connector.OutcomeKind, requests)
			for i := range requests {
				pStart := time.Duration(r.IntN(3000)) * time.Millisecond
				dStart := pStart + time.Duration(r.IntN(8000))*time.Millisecond // now and then after the lease
				dAborts := r.IntN(4) == 0
				abortAt := dStart + time.Duration(r.IntN(400))*time.Millisecond
				time.AfterFunc(pStart, func() {
					params := p.prefilled(ms[i])
					time.AfterFunc(dStart-pStart, func() { d.pullLeg(params, ls[i], 0) })
				})
				if dAborts {
					time.AfterFunc(abortAt+time.Millisecond, func() { d.abort(ls[i].id) })
				}
				go func() {
					p.outcome(ms[i].id, 4*time.Minute)
					p.fill(ms[i].blocks, 0, 9000) // somebody else's: a late read would show
				}()
				go func() {
					o := d.outcome(ls[i].id, dStart+time.Minute)
					if o.Kind == connector.Received {
						what[i] = uint32(1000 + i)
						if err := d.holds(ls[i].blocks, 0, what[i]); err != nil {
							t.Errorf("seed %d, request %d: received, but %v", seed, i, err)
						}
					}
					what[i] = 5000 + uint32(i)
					d.fill(ls[i].blocks, 0, what[i]) // somebody else's from now on
					ended <- o.Kind
				}()
			}
			for range requests {
				switch <-ended {
				case connector.Received:
					received++
				case connector.ReceiveFailed:
					failed++
				default:
					released++
				}
			}
			time.Sleep(5 * time.Minute)
			for i := range requests {
				if err := d.holds(ls[i].blocks, 0, what[i]); err != nil {
					t.Errorf("seed %d, request %d: written after its end: %v", seed, i, err)
				}
				if n := len(d.outcomes(ls[i].id)); n != 1 {
					t.Errorf("seed %d, request %d: %d outcomes", seed, i, n)
				}
				if n := len(p.outcomes(ms[i].id)); n != 1 {
					t.Errorf("seed %d, request %d: P has %d outcomes", seed, i, n)
				}
			}
			p.idle()
			d.idle()
		})
		if t.Failed() {
			return
		}
	}
	t.Logf("%d received, %d failed, %d released", received, failed, released)
	if received < 100 || failed < 50 || released < 20 {
		t.Error("the faults are not of every kind any more")
	}
}
