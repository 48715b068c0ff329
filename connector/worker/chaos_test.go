package worker

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/fault"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// Random faults of every kind on both agents, random aborts, two requests of one P block each way:
// every request ends, what was received is right, and nobody writes a block after it was given back.
func TestChaos(t *testing.T) {
	received, failed, released := 0, 0, 0
	for seed := range uint64(150) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			wrap := func(_ int, a agent.Agent) agent.Agent {
				f := fault.Wrap(a, fault.Options{Seed: seed})
				f.Add(randomRules(r)...)
				if seed%3 == 2 {
					return irrevocable{f}
				}
				return f
			}
			// A request ends within its watchdog; one whose blocks only P's word gives back, when P has
			// given up its write.
			bound := 21 * time.Second
			if seed%3 == 2 {
				bound = time.Minute
			}
			cl := newCluster(t, local.Config{Latency: time.Millisecond, Bandwidth: 2000, Chunk: 16})
			defer cl.close()
			tp := 1 + int(seed%2)
			o := options{tp: tp, lease: 6 * time.Second, timeout: 20 * time.Second, silence: 3 * time.Second, wrap: wrap}
			o.role = connector.Producer
			p := cl.engine("P", o)
			o.role = connector.Consumer
			d := cl.engine("D", o)
			const requests = 5
			var ls, ms [requests]leg
			for i := range requests {
				id := fmt.Sprintf("cmpl-r%d-0", i)
				ms[i] = leg{id: requestID(id + "-aaaaaaaa"), tokens: 10, digest: connector.Digest{byte(i)}, blocks: []kv.BlockID{kv.BlockID(3 * i), kv.BlockID(3*i + 1), kv.BlockID(3*i + 2)}}
				ls[i] = ms[i]
				ls[i].id = requestID(id + "-dddddddd")
				if r.IntN(2) == 0 {
					ms[i].transfer = kv.TransferID(fmt.Sprint("x", i))
					ls[i].transfer = ms[i].transfer
				}
				p.fill(ms[i].blocks, 0, uint32(1000+i))
				d.fill(ls[i].blocks, 0, canary)
			}
			what := make([]uint32, requests)
			ended := make(chan connector.OutcomeKind, requests)
			for i := range requests {
				dStart, pStart := time.Duration(r.IntN(3000))*time.Millisecond, time.Duration(r.IntN(3000))*time.Millisecond
				dAborts, pAborts := r.IntN(4) == 0, r.IntN(6) == 0
				abortAt := dStart + time.Duration(r.IntN(3000))*time.Millisecond
				time.AfterFunc(pStart, func() {
					reason := connector.FinishLength
					if pAborts {
						reason = connector.FinishAbort
					}
					p.prefillLeg(ms[i], reason)
				})
				time.AfterFunc(dStart, func() { d.decodeLeg(p, ls[i], 0) })
				if dAborts {
					time.AfterFunc(abortAt, func() { d.abort(ls[i].id) })
				}
				if !pAborts {
					go func() {
						p.outcome(ms[i].id, 4*time.Minute)
						p.fill(ms[i].blocks, 0, 9000) // somebody else's: a late read would show
					}()
				}
				go func() {
					// Whatever happens, D's request ends within its bound, at once when it is told.
					o := d.outcome(ls[i].id, dStart+bound)
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

// randomRules are a few faults that act now and then.
func randomRules(r *rand.Rand) []fault.Rule {
	all := []fault.Rule{
		{Match: fault.Match{On: fault.OnPost}, Do: fault.Fail},
		{Match: fault.Match{On: fault.OnPost}, Do: fault.Delay},
		{Match: fault.Match{On: fault.OnPost}, Do: fault.Stall},
		{Match: fault.Match{On: fault.OnPost}, Do: fault.WriteLate},
		{Match: fault.Match{On: fault.OnPost}, Do: fault.Cut},
		{Match: fault.Match{On: fault.OnNotify, Prefix: "PUSH_REG"}, Do: fault.Drop},
		{Match: fault.Match{On: fault.OnNotify, Prefix: "PUSH_REG"}, Do: fault.Fail},
		{Match: fault.Match{On: fault.OnNotify, Prefix: "PUSH_REG"}, Do: fault.Duplicate},
		{Match: fault.Match{On: fault.OnNotify}, Do: fault.Reorder},
		{Match: fault.Match{On: fault.OnNotify}, Do: fault.Delay},
		{Match: fault.Match{On: fault.OnNotify, Prefix: "PUSH_FAIL"}, Do: fault.Drop},
		{Match: fault.Match{On: fault.OnNotify, Prefix: "KVFERRY"}, Do: fault.Drop},
		{Match: fault.Match{On: fault.OnNotify, Prefix: "KVFERRY"}, Do: fault.Fail},
		{Match: fault.Match{On: fault.OnNotification, Prefix: "KVFERRY"}, Do: fault.Duplicate},
		{Match: fault.Match{On: fault.OnNotification, Prefix: "KVFERRY"}, Do: fault.Delay},
		{Match: fault.Match{On: fault.OnAddPeer}, Do: fault.Fail},
		{Match: fault.Match{On: fault.OnAddPeer}, Do: fault.Delay},
		{Match: fault.Match{On: fault.OnResult}, Do: fault.Fail},
		{Match: fault.Match{On: fault.OnResult}, Do: fault.Delay},
		{Match: fault.Match{On: fault.OnStopped}, Do: fault.Delay},
		{Match: fault.Match{On: fault.OnNotification, Prefix: "cmpl"}, Do: fault.Drop},
		{Match: fault.Match{On: fault.OnNotification}, Do: fault.Duplicate},
		{Match: fault.Match{On: fault.OnNotification}, Do: fault.Reorder},
		{Match: fault.Match{On: fault.OnNotification}, Do: fault.Delay},
		{Match: fault.Match{On: fault.OnNotification}, Do: fault.Cut},
	}
	var out []fault.Rule
	for range r.IntN(4) {
		x := all[r.IntN(len(all))]
		x.Chance = 0.1 + 0.4*r.Float64()
		x.Times = 1 + r.IntN(3)
		if x.Do == fault.Delay || x.Do == fault.Reorder || x.Do == fault.WriteLate {
			x.Delay = time.Duration(1+r.IntN(2000)) * time.Millisecond
		}
		out = append(out, x)
	}
	return out
}
