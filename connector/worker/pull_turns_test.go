package worker

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/kv"
)

// The second turn of a conversation whose first was legD's.
var (
	turnD = []kv.BlockID{3, 7, 1, 8} // D's blocks of prompt and answer, 14 tokens
	turnP = leg{id: "cmpl-r2-0-bbbbbbbb", tokens: 20, digest: connector.Digest{9}, blocks: []kv.BlockID{4, 6, 11, 12, 13}}
)

const kvOfD = 0xdddddddd

// kept runs a first turn: D pulls P's KV, answers, and keeps what it has.
func (d *engine) kept(p *engine) *kv.TransferParams {
	d.c.t.Helper()
	d.pullLeg(p.prefilled(legP), legD, 0)
	if o := d.outcome(legD.id, time.Minute); o.Kind != connector.Received {
		d.c.t.Fatalf("D: %+v", o)
	}
	p.outcome(legP.id, time.Minute)
	d.fill(turnD, 0, kvOfD)
	var params *kv.TransferParams
	d.do(func(h *scheduler.Half) {
		_, params = h.Finished(time.Now(), legD.id, connector.FinishStop, kv.BlockIDs{turnD}, 14)
		h.Kept(legD.id, connector.Digest{14}, []connector.Digest{{4}, {8}, {12}})
	})
	if params == nil {
		d.c.t.Fatal("D has kept nothing")
	}
	return params
}

// readBack lets P's second turn arrive and get its blocks; earlier is the digest of the tokens that it has
// in common with D.
func (p *engine) readBack(params *kv.TransferParams, earlier byte) {
	p.c.t.Helper()
	p.do(func(h *scheduler.Half) {
		if err := h.Arrived(time.Now(), connector.Request{ID: turnP.id, PromptTokens: turnP.tokens, Digest: turnP.digest,
			Earlier: connector.Digest{earlier}, Params: *params}); err != nil {
			p.c.t.Errorf("%s: %v", p.id, err)
		}
		h.Allocated(time.Now(), turnP.id, kv.BlockIDs{turnP.blocks}, 0, h.External(turnP.id, 0))
	})
}

// computed ends P's second turn as a prefill that is as good as any, and lets nobody take it.
func (p *engine) computed() {
	p.c.t.Helper()
	var hold bool
	p.do(func(h *scheduler.Half) {
		hold, _ = h.Finished(time.Now(), turnP.id, connector.FinishLength, kv.BlockIDs{turnP.blocks}, turnP.tokens)
	})
	if !hold {
		p.c.t.Error("P does not hand its KV over after it has read an earlier turn's")
	}
	time.Sleep(10 * time.Minute) // P's lease, D's time
}

// P reads what D kept, on every rank, and D has its blocks back at once.
func TestSecondTurn(t *testing.T) {
	both := options{tp: 2, both: true}
	pullBubble(t, millisecond, both, both, func(t *testing.T, p, d *engine) {
		p.readBack(d.kept(p), 14)
		if o := p.outcome(turnP.id, time.Second); o.Kind != connector.Received || o.Transfer.Blocks != 4 {
			t.Fatalf("P: %+v", o)
		}
		if err := p.holds(turnP.blocks[:4], 0, kvOfD); err != nil {
			t.Error(err)
		}
		d.fill(turnD, 0, canary)
		time.Sleep(time.Second)
		if out := d.outcomes(legD.id); len(out) != 2 || out[1].Kind != connector.Released || out[1].Err != nil {
			t.Errorf("D: %+v", out)
		}
		d.idle()
		p.computed()
		p.idle()
		time.Sleep(time.Hour)
		n := [2]uint64{p.ranks[0].worker.Stats().Wakeups, d.ranks[0].worker.Stats().Wakeups}
		time.Sleep(time.Hour)
		if p.ranks[0].worker.Stats().Wakeups != n[0] || d.ranks[0].worker.Stats().Wakeups != n[1] {
			t.Error("idle workers wake up")
		}
	})
}

// The time that D keeps its blocks ends under P's READ: D uses them again at once, and P never takes the
// new bytes for the old ones. Then P computes, and its request goes on.
func TestSecondTurnEndsUnderRead(t *testing.T) {
	crawl := local.Config{Latency: time.Millisecond, Bandwidth: 50, Chunk: 16} // more than 10 s for four blocks
	for _, exact := range []bool{true, false} {
		t.Run(fmt.Sprintf("agent can revoke %v", exact), func(t *testing.T) {
			var wrap func(int, agent.Agent) agent.Agent
			if !exact {
				wrap = noRevoke
			}
			pullBubble(t, crawl, options{both: true}, options{both: true, ttl: 8 * time.Second, wrap: wrap}, func(t *testing.T, p, d *engine) {
				p.readBack(d.kept(p), 14)
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					for len(d.outcomes(legD.id)) < 2 {
						time.Sleep(time.Millisecond)
					}
					d.fill(turnD, 0, canary)
				}()
				o := p.outcome(turnP.id, time.Minute)
				if o.Kind != connector.ReceiveFailed || o.Err == nil || o.Err.Phase != connector.PhaseLease && o.Err.Phase != connector.PhaseTransfer {
					t.Errorf("P: %+v", o)
				}
				<-ended
				if out := d.outcomes(legD.id); out[1].Kind != connector.Released || out[1].Err == nil || out[1].Err.Phase != connector.PhaseLease {
					t.Errorf("D: %+v", out)
				}
				p.computed()
				p.idle()
				d.idle()
			})
		})
	}
}

// What cannot be read any more, or is another conversation's, is not; P computes, and nothing is left.
func TestSecondTurnNotRead(t *testing.T) {
	for _, c := range []struct {
		name    string
		after   time.Duration
		earlier byte
		phase   connector.Phase
		decline bool
	}{
		{"almost over", 475 * time.Second, 14, connector.PhaseLease, true},
		{"over", 500 * time.Second, 14, connector.PhaseLease, true},
		{"another conversation", 0, 13, connector.PhaseParams, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			pullBubble(t, millisecond, options{both: true}, options{both: true}, func(t *testing.T, p, d *engine) {
				params := d.kept(p)
				time.Sleep(c.after)
				p.fill(turnP.blocks, 0, canary)
				p.readBack(params, c.earlier)
				if o := p.outcome(turnP.id, time.Second); o.Kind != connector.ReceiveFailed || o.Err.Phase != c.phase {
					t.Errorf("P: %+v", o)
				}
				if s := p.ranks[0].worker.Stats(); s.TransfersPosted+s.TransfersFailed != 0 || (s.ReadsDeclined == 1) != c.decline {
					t.Errorf("P: %+v", s)
				}
				if err := p.holds(turnP.blocks, 0, canary); err != nil {
					t.Error(err)
				}
				p.computed()
				p.idle()
				d.idle()
			})
		})
	}
}

// A handle is good for one turn: a retried turn computes, whatever its first try has taken.
func TestSecondTurnTwice(t *testing.T) {
	pullBubble(t, millisecond, options{both: true}, options{both: true}, func(t *testing.T, p, d *engine) {
		params := d.kept(p)
		p.readBack(params, 14)
		if o := p.outcome(turnP.id, time.Second); o.Kind != connector.Received {
			t.Fatalf("P: %+v", o)
		}
		time.Sleep(time.Second)
		p.do(func(h *scheduler.Half) {
			if err := h.Arrived(time.Now(), connector.Request{ID: "again", PromptTokens: turnP.tokens, Earlier: connector.Digest{14}, Params: *params}); err != nil {
				t.Error(err)
			}
			h.Allocated(time.Now(), "again", kv.BlockIDs{{1, 2, 3, 5, 9}}, 0, h.External("again", 0))
		})
		if o := p.outcome("again", time.Second); o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseLease {
			t.Errorf("P: %+v", o)
		}
		p.abort("again")
		p.computed()
		p.idle()
		d.idle()
	})
}

// A P without the setting (H12), or one that needs nothing of it, has D's blocks given back.
func TestSecondTurnNotWanted(t *testing.T) {
	pullBubble(t, millisecond, options{}, options{both: true}, func(t *testing.T, p, d *engine) {
		p.readBack(d.kept(p), 14)
		time.Sleep(time.Second)
		if out := d.outcomes(legD.id); len(out) != 2 || out[1].Kind != connector.Released || out[1].Err != nil {
			t.Errorf("D: %+v", out)
		}
		d.idle()
		p.computed()
		p.idle()
	})
}
