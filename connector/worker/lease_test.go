package worker

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// A D that is alive but slow to admit keeps P's blocks for many leases, whatever the router calls
// the request (field-reports.md, B-001); when D is gone they come back within one.
func TestHeartbeatsKeepTheLease(t *testing.T) {
	bubble(t, millisecond, options{lease: 6 * time.Second}, options{lease: 6 * time.Second}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, -1)
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(time.Minute)
		if o := p.outcomes(legP.id); len(o) != 0 {
			t.Fatalf("P gave the blocks back: %+v", o)
		}
		if n := p.trace.count("lease_extended"); n < 50 {
			t.Errorf("the lease was extended %d times in a minute of heartbeats per second", n)
		}
		d.abort(legD.id)
		o := p.outcome(legP.id, time.Second)
		if o.Err == nil || o.Err.Phase != connector.PhaseCancel {
			t.Errorf("P: %+v", o)
		}
	})
}

func TestDeadDFreesTheLease(t *testing.T) {
	bubble(t, millisecond, options{lease: 6 * time.Second}, options{lease: 6 * time.Second}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, -1)
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(30 * time.Second)
		d.c.fabric.Kill(d.ranks[0].name)
		if o := p.outcome(legP.id, 6*time.Second); o.Err == nil || o.Err.Phase != connector.PhaseLease {
			t.Errorf("P: %+v", o)
		}
	})
}

// D registers after P's lease ended: it is told, and nothing is written (field-reports.md, I5).
func TestRegistrationAfterLease(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		p.prefillLeg(legP, connector.FinishLength)
		p.outcome(legP.id, 31*time.Second)
		d.decodeLeg(p, legD, 0)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.ReceiveFailed {
			t.Errorf("D: %+v", o)
		}
		d.reuse()
		time.Sleep(time.Minute)
		d.wantCanary()
	})
}

// The lease ends while the WRITE runs: the blocks are kept until it has stopped, and D's KV is whole
// (nixl-connector.md, H2).
func TestLeaseEndsDuringWrite(t *testing.T) {
	bubble(t, slow, options{lease: time.Second}, options{lease: 60 * time.Second}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(100 * time.Millisecond)
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(2500 * time.Millisecond)
		if o := p.outcomes(legP.id); len(o) != 0 {
			t.Fatalf("P gave back blocks that are being read: %+v", o)
		}
		if s := p.ranks[0].worker.Stats(); s.LeasesExpired != 1 {
			t.Fatalf("the lease has not ended; the test proves nothing: %+v", s)
		}
		if o := d.outcome(legD.id, time.Minute); o.Kind != connector.Received {
			t.Fatalf("D: %+v", o)
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
			t.Error(err)
		}
		if o := p.outcome(legP.id, time.Second); o.Err != nil {
			t.Errorf("P: %+v", o)
		}
	})
}

// Ten thousand registrations that nobody's prefill answers cost bounded memory and go away, and the
// hand-offs of another D are not touched.
func TestOrphanRegistrationsAreBounded(t *testing.T) {
	bubble(t, millisecond, options{timeout: time.Minute}, options{timeout: time.Minute}, func(t *testing.T, p, d *engine) {
		x, to, end := p.c.outsider("orphans", p)
		for i := range 10000 {
			msg, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: requestID(fmt.Sprintf("cmpl-orphan%d-0", i)), DecodeEngineID: "X",
				DecodeHost: "x", DecodePort: 1, DecodeTPSize: 1, LocalBlockIDs: legD.wireBlocks(),
				Extension: &wire.PushRegExtension{NumTokens: 10, Generation: kv.Generation(i + 1), Token: tokenOf(kv.Generation(i + 1))}})
			if err != nil {
				t.Fatal(err)
			}
			if err := x.Notify(to, msg); err != nil {
				t.Fatal(err)
			}
			if i%500 == 499 {
				time.Sleep(10 * time.Millisecond) // the fabric bounds what waits to be read
			}
		}
		time.Sleep(time.Second)
		s := p.ranks[0].worker.Stats()
		if s.Waiting != maxPerSender || s.WaitingBlocks != 3*maxPerSender {
			t.Errorf("%d registrations with %d blocks wait", s.Waiting, s.WaitingBlocks)
		}
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
			t.Errorf("D: %+v", o)
		}
		time.Sleep(2 * time.Minute)
		s = p.ranks[0].worker.Stats()
		if s.Waiting != 0 || s.WaitingBlocks != 0 {
			t.Errorf("%d registrations with %d blocks are left", s.Waiting, s.WaitingBlocks)
		}
		end()
		time.Sleep(time.Second)
		if s := p.ranks[0].worker.Stats(); s.Senders != 1 {
			t.Errorf("%d senders are remembered, want D alone", s.Senders)
		}
	})
}
