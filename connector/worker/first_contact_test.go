package worker

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/wire"
)

// slowDial is a way to D's side channel that takes almost a handshake's patience.
func slowDial(dial dialer) dialer {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		time.Sleep(4900 * time.Millisecond)
		return dial(ctx, network, addr)
	}
}

// slowAdmission is an agent that takes as long to connect.
type slowAdmission struct{ agent.Agent }

func (a slowAdmission) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	time.Sleep(4900 * time.Millisecond)
	return a.Agent.AddPeer(ctx, info)
}

// hasty is a lease whose three heartbeats, 3 s, are less than one question of a handshake may take.
const hasty = 6 * time.Second

// P lives, and its handshake with D takes longer than three heartbeats: its first word comes when it has ended,
// and D waits for it.
func TestSlowFirstContact(t *testing.T) {
	for name, p := range map[string]options{
		"one slow step":  {lease: hasty, dial: slowDial},
		"two slow steps": {lease: hasty, dial: slowDial, wrap: func(_ int, a agent.Agent) agent.Agent { return slowAdmission{a} }},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, millisecond, p, options{lease: hasty}, func(t *testing.T, p, d *engine) {
				p.arrive(legP, true)
				d.decodeLeg(p, legD, 0)
				time.Sleep(20 * time.Second)
				if o := d.outcomes(legD.id); len(o) != 0 {
					t.Fatalf("P is given up while it shakes hands: %+v", o)
				}
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

// A P that never says a word has the time of one step and a heartbeat; while D's side channel is asked, by
// whomever it is, that of a whole handshake and a heartbeat, and no more. One that has spoken has three
// heartbeats, whoever asks.
func TestFirstContactIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		lease        time.Duration
		asked, spoke bool
		want         time.Duration
	}{
		"nobody asks":         {hasty, false, false, 6 * time.Second},
		"somebody asks":       {hasty, true, false, 31 * time.Second},
		"it has spoken":       {hasty, true, true, 3 * time.Second},
		"default lease":       {0, false, false, 15 * time.Second},
		"and somebody asks":   {0, true, false, 35 * time.Second},
		"default, has spoken": {0, true, true, 15 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := machineConfig()
			if c.lease != 0 {
				cfg.Lease = c.lease
			}
			var got []*connector.Error
			r := receivingAs(t, cfg, 0, &got)
			if c.spoke {
				r.step(from("q.0", statesOf(t, r.m, 1)))
			}
			began := r.now
			for ; len(got) == 0 && r.now.Sub(began) < time.Hour; r.pass(100 * time.Millisecond) {
				if c.asked {
					r.m.outside.asked = r.now
				}
			}
			if took := r.now.Sub(began); took < c.want || took > c.want+200*time.Millisecond {
				t.Errorf("ended after %v, want %v", took, c.want)
			}
			if len(got) != 1 || got[0] == nil || got[0].Phase != connector.PhaseWait || !strings.Contains(got[0].Reason, "nothing was heard") {
				t.Errorf("%v", got)
			}
		})
	}
}

// P's engine hangs in a step that never ends, and its worker goes on to answer that the prefill runs: the
// registration timeout ends it. An engine that is merely slow, one step in many minutes, is waited for.
func TestHungEngineLoop(t *testing.T) {
	const timeout = 8 * time.Minute
	bubble(t, millisecond, options{}, options{timeout: timeout}, func(t *testing.T, p, d *engine) {
		p.ranks[0].worker.Stepped()
		p.arrive(legP, true)
		d.decodeLeg(p, legD, 0)
		for range 20 {
			time.Sleep(5 * time.Minute)
			p.ranks[0].worker.Stepped()
		}
		if o := d.outcomes(legD.id); len(o) != 0 {
			t.Fatalf("a slow engine is given up: %+v", o)
		}
		hung := time.Now()
		o := d.outcome(legD.id, timeout+timeout/4+time.Minute)
		if o.Kind != connector.ReceiveFailed || o.Err == nil || o.Err.Phase != connector.PhaseWait {
			t.Errorf("D: %+v", o)
		}
		t.Logf("after %v: %v", time.Since(hung), o.Err)
		if took := time.Since(hung); took < timeout-time.Minute {
			t.Errorf("given up after %v", took)
		}
		p.finish(legP)
		time.Sleep(time.Minute)
		p.idle()
		d.idle()
	})
}

// A WRITE needs no step: while it moves, D waits, whatever P's engine does.
func TestWriteNeedsNoSteps(t *testing.T) {
	var got []*connector.Error
	r := receiving(t, 0, &got)
	progress := 0
	do := r.do
	r.do = func(a action) input {
		if _, ok := a.(reportProgress); ok {
			progress++
		}
		return do(a)
	}
	for _, c := range []struct {
		state wire.RequestState
		steps uint64
		tells bool
	}{
		{wire.StateQueued, 7, true}, {wire.StateQueued, 7, false}, {wire.StateQueued, 8, true}, {wire.StateRunning, 8, true}, {wire.StateRunning, 8, false},
		{wire.StateRunning, 0, true}, // one that does not tell is not judged by it
		{wire.StateWriting, 8, true}, {wire.StateWriting, 8, true},
	} {
		r.now = r.now.Add(r.m.timeout() / 3)
		before := progress
		r.step(from("q.0", controlOf(t, &wire.States{Seq: 1, Steps: c.steps, Answers: []wire.StateAnswer{{RegistrationRef: r.m.ourRef("d-11111111", 1), State: c.state}}})))
		if told := progress > before; told != c.tells && len(got) == 0 {
			t.Errorf("%s at step %d is progress: %v", c.state, c.steps, told)
		}
	}
}

func statesOf(t *testing.T, m *machine, steps uint64) []byte {
	return controlOf(t, &wire.States{Steps: steps, Answers: []wire.StateAnswer{{RegistrationRef: m.ourRef("d-11111111", 1), State: wire.StateQueued}}})
}
