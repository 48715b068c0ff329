package worker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/kv"
)

// bubble runs a test of one P and one D.
func bubble(t *testing.T, cfg local.Config, po, do options, f func(t *testing.T, p, d *engine)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t, cfg)
		defer cl.close()
		if po.role == "" {
			po.role = connector.Producer
		}
		if do.role == "" {
			do.role = connector.Consumer
		}
		p, d := cl.engine("P", po), cl.engine("D", do)
		p.fill(legP.blocks, 0, kvOfP)
		d.fill(legD.blocks, 0, canary)
		f(t, p, d)
	})
}

var millisecond = local.Config{Latency: time.Millisecond}

// slow is a network on which the three blocks of a test request take some seconds.
var slow = local.Config{Latency: time.Millisecond, Bandwidth: 100, Chunk: 16}

// reuse gives D's blocks to somebody else, as an engine does right after an outcome.
func (e *engine) reuse() { e.fill(legD.blocks, 0, canary) }

// wantCanary checks that nobody has written blocks that were given to somebody else.
func (e *engine) wantCanary() {
	e.c.t.Helper()
	if err := e.holds(legD.blocks, 0, canary); err != nil {
		e.c.t.Errorf("a block was written after it was given back: %v", err)
	}
}

func TestAbortOnDBeforeAllocation(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, -1)
		time.Sleep(time.Second)
		if d.abort(legD.id) {
			t.Error("blocks are held for a request that had none")
		}
		d.idle()
		sent := d.ranks[0].worker.Stats().HeartbeatsSent
		time.Sleep(time.Minute)
		if now := d.ranks[0].worker.Stats().HeartbeatsSent; now != sent || sent == 0 {
			t.Errorf("%d heartbeats before the abort, %d after a minute", sent, now)
		}
		// P finishes for nobody, knows it, and gives its blocks back at once.
		p.prefillLeg(legP, connector.FinishLength)
		o := p.outcome(legP.id, time.Second)
		if o.Kind != connector.Released || o.Err == nil || o.Err.Phase != connector.PhaseCancel {
			t.Errorf("P: %+v", o)
		}
		p.idle()
	})
}

// The worst fault of the reference push design: D aborts, its blocks go to another request, and P,
// which knows nothing, writes into them (field-reports.md, C1).
func TestAbortOnDWhileWaiting(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(time.Second)
		if !d.abort(legD.id) {
			t.Fatal("blocks that P may write are not held")
		}
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Released {
			t.Fatalf("D: %+v", o)
		}
		d.reuse()
		p.prefillLeg(legP, connector.FinishLength)
		if o := p.outcome(legP.id, time.Minute); o.Kind != connector.Released || o.Err == nil {
			t.Errorf("P: %+v, want an error: nothing was delivered", o)
		}
		time.Sleep(time.Minute)
		d.wantCanary()
		p.idle()
		d.idle()
	})
}

func TestAbortOnDDuringWrite(t *testing.T) {
	bubble(t, slow, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(2 * time.Second)
		if err := d.holds(legD.blocks, 0, canary); err == nil {
			t.Fatal("the write has not begun; the test proves nothing")
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err == nil {
			t.Fatal("the write has ended; the test proves nothing")
		}
		if !d.abort(legD.id) {
			t.Fatal("blocks under a running write are not held")
		}
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Released {
			t.Fatalf("D: %+v", o)
		}
		d.reuse()
		if o := p.outcome(legP.id, time.Minute); o.Err == nil {
			t.Errorf("P: %+v, want an error", o)
		}
		time.Sleep(time.Minute)
		d.wantCanary()
		p.idle()
		d.idle()
	})
}

func TestAbortOnDAfterReceive(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		if o := d.outcome(legD.id, time.Minute); o.Kind != connector.Received {
			t.Fatalf("D: %+v", o)
		}
		if d.abort(legD.id) {
			t.Error("blocks of a finished receive are held")
		}
		time.Sleep(time.Minute)
		if n := len(d.outcomes(legD.id)); n != 1 {
			t.Errorf("%d outcomes", n)
		}
		d.idle()
	})
}

// P's prefill fails before or after D registers: D is told at once, not after its watchdog.
func TestAbortOnP(t *testing.T) {
	for _, after := range []bool{false, true} {
		name := "D registers first"
		if after {
			name = "D registers after"
		}
		t.Run(name, func(t *testing.T) {
			bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
				if !after {
					d.decodeLeg(p, legD, 0)
					time.Sleep(time.Second)
				}
				if p.prefillLeg(legP, connector.FinishAbort) {
					t.Error("blocks of an aborted prefill are held")
				}
				if after {
					time.Sleep(time.Minute)
					d.decodeLeg(p, legD, 0)
				}
				o := d.outcome(legD.id, time.Second)
				if o.Kind != connector.ReceiveFailed || o.Err == nil {
					t.Fatalf("D: %+v", o)
				}
				d.reuse()
				time.Sleep(time.Hour)
				d.wantCanary()
				p.idle()
				d.idle()
				if s := p.ranks[0].worker.Stats(); s.Notes != 0 || s.Waiting != 0 {
					t.Errorf("P remembers %d ended requests and %d registrations", s.Notes, s.Waiting)
				}
			})
		})
	}
}

func TestPrefillWithoutBlocks(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(time.Second)
		p.do(func(h *scheduler.Half) {
			_ = h.Arrived(time.Now(), connector.Request{ID: legP.id, PromptTokens: 10, Digest: legP.digest,
				Params: kv.TransferParams{DoRemoteDecode: true, TransferID: legP.transfer}})
			hold, params := h.Finished(time.Now(), legP.id, connector.FinishLength, kv.BlockIDs{{}}, 0)
			if hold || params == nil || len(params.RemoteBlockIDs) != 0 {
				t.Errorf("hold %v, params %+v", hold, params)
			}
		})
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.ReceiveFailed {
			t.Errorf("D: %+v", o)
		}
	})
}

// An abort of P's request after its end changes nothing: D still gets its KV.
func TestAbortOnPAfterFinish(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		p.prefillLeg(legP, connector.FinishLength)
		if !p.abort(legP.id) {
			t.Error("the hold is given up by an abort after the end")
		}
		d.decodeLeg(p, legD, 0)
		if o := d.outcome(legD.id, time.Minute); o.Kind != connector.Received {
			t.Errorf("D: %+v", o)
		}
		p.outcome(legP.id, time.Minute)
		p.idle()
	})
}

// Nothing is left waiting for a writer that is closed in the middle of everything.
func TestCloseInTheMiddle(t *testing.T) {
	for _, wait := range []time.Duration{0, time.Millisecond, 3 * time.Second} {
		bubble(t, slow, options{}, options{}, func(t *testing.T, p, d *engine) {
			d.decodeLeg(p, legD, 0)
			p.prefillLeg(legP, connector.FinishLength)
			time.Sleep(wait)
		})
	}
}
