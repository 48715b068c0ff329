package worker

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

func wrapped(x *tamper) func(int, agent.Agent) agent.Agent {
	return func(_ int, a agent.Agent) agent.Agent {
		x.Agent = a
		return x.start()
	}
}

// One of two P ranks cannot post its WRITE. Both D ranks end, only after both have stopped, and
// nothing is written into the blocks afterwards (field-reports.md, C2 and B-002).
func TestOneFailingRank(t *testing.T) {
	for _, failing := range []int{0, 1} {
		t.Run(fmt.Sprintf("rank %d", failing), func(t *testing.T) {
			wrap := func(rank int, a agent.Agent) agent.Agent {
				x := &tamper{Agent: a}
				if rank == failing {
					x.post = func(int) error { return &agent.PostError{Reason: "injected"} }
				}
				return x.start()
			}
			bubble(t, slow, options{tp: 2, wrap: wrap}, options{tp: 2}, func(t *testing.T, p, d *engine) {
				d.decodeLeg(p, legD, 0)
				p.prefillLeg(legP, connector.FinishLength)
				o := d.outcome(legD.id, 2*time.Second)
				if o.Kind != connector.ReceiveFailed || o.Err == nil {
					t.Fatalf("D: %+v", o)
				}
				d.reuse()
				if o := p.outcome(legP.id, time.Minute); o.Kind != connector.Released || o.Err == nil {
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

// The agent has no room for the first tries; the WRITE is posted when it has.
func TestBusyAgent(t *testing.T) {
	x := &tamper{post: func(n int) error {
		if n < 5 {
			return agent.ErrBusy
		}
		return nil
	}}
	bubble(t, millisecond, options{wrap: wrapped(x)}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		if o := d.outcome(legD.id, 2*time.Second); o.Kind != connector.Received {
			t.Fatalf("D: %+v", o)
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
			t.Error(err)
		}
	})
}

// An agent that never has room is no progress: D's watchdog ends the wait, and P is told.
func TestBusyForEver(t *testing.T) {
	x := &tamper{post: func(int) error { return agent.ErrBusy }}
	bubble(t, millisecond, options{wrap: wrapped(x)}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(time.Second)
		d.do(func(h *scheduler.Half) {}) // the heartbeats of a waiting D keep the lease
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(5 * time.Minute)
		if o := p.outcomes(legP.id); len(o) != 0 {
			t.Fatalf("P: %+v while D waits", o)
		}
		if o := d.outcome(legD.id, 4*time.Minute); o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseWait {
			t.Errorf("D: %+v", o)
		}
		if o := p.outcome(legP.id, time.Second); o.Err == nil || o.Err.Phase != connector.PhaseCancel {
			t.Errorf("P: %+v", o)
		}
		p.idle()
	})
}

// A cable is pulled in the middle of a WRITE and plugged in again after everybody has given up.
func TestStalledWrite(t *testing.T) {
	bubble(t, slow, options{silence: 5 * time.Second}, options{timeout: 20 * time.Second}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		time.Sleep(2 * time.Second)
		p.c.fabric.Partition(p.ranks[0].name, d.ranks[0].name)
		if o := p.outcome(legP.id, time.Minute); o.Err == nil || o.Err.Phase != connector.PhaseTransfer {
			t.Errorf("P: %+v", o)
		}
		if o := d.outcome(legD.id, time.Minute); o.Kind != connector.ReceiveFailed {
			t.Errorf("D: %+v", o)
		}
		d.reuse()
		p.c.fabric.Heal(p.ranks[0].name, d.ranks[0].name)
		time.Sleep(time.Minute)
		d.wantCanary()
		p.idle()
		d.idle()
	})
}

// P's agent reports a failure while bytes still move. P's blocks stay until Stopped, D is told at
// once, and nothing is written into D's blocks after D was told.
func TestFailureReportedWhileBytesMove(t *testing.T) {
	var early agent.TransferID
	x := &tamper{}
	x.posted = func(id agent.TransferID, to agent.PeerID) []agent.Event {
		early = id
		return []agent.Event{agent.Result{Transfer: id, Peer: to, Outcome: agent.OutcomeFailed, Err: errors.New("injected")}}
	}
	x.mangle = func(e agent.Event) []agent.Event {
		if r, ok := e.(agent.Result); ok && r.Transfer == early {
			return nil // told already
		}
		return []agent.Event{e}
	}
	bubble(t, slow, options{wrap: wrapped(x)}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.ReceiveFailed {
			t.Fatalf("D: %+v", o)
		}
		d.reuse()
		if o := p.outcome(legP.id, time.Minute); o.Err == nil {
			t.Errorf("P: %+v", o)
		}
		if s := p.ranks[0].worker.Stats(); s.InFlight != 0 {
			t.Errorf("P gave the blocks back with %d transfers in flight", s.InFlight)
		}
		time.Sleep(time.Minute)
		d.wantCanary()
	})
}

// Every notification comes twice. Nothing ends twice, nothing is written twice.
func TestDuplicatedNotifications(t *testing.T) {
	twice := func(e agent.Event) []agent.Event {
		if n, ok := e.(agent.Notification); ok {
			return []agent.Event{n, n}
		}
		return []agent.Event{e}
	}
	xp, xd := &tamper{mangle: twice}, &tamper{mangle: twice}
	bubble(t, millisecond, options{wrap: wrapped(xp)}, options{wrap: wrapped(xd)}, func(t *testing.T, p, d *engine) {
		for _, first := range []string{"D", "P"} {
			l, m := legD, legP
			l.id, m.id = legD.id+"-"+requestID(first), legP.id+"-"+requestID(first)
			l.transfer, m.transfer = kv.TransferID(first), kv.TransferID(first)
			if first == "D" {
				d.decodeLeg(p, l, 0)
				time.Sleep(time.Second)
			}
			p.prefillLeg(m, connector.FinishLength)
			if first == "P" {
				time.Sleep(time.Second)
				d.decodeLeg(p, l, 0)
			}
			if o := d.outcome(l.id, time.Second); o.Kind != connector.Received {
				t.Fatalf("%s first, D: %+v", first, o)
			}
			time.Sleep(time.Minute)
			if n, m := len(d.outcomes(l.id)), len(p.outcomes(m.id)); n != 1 || m != 1 {
				t.Errorf("%s first: %d outcomes on D, %d on P", first, n, m)
			}
		}
		if n := p.ranks[0].worker.Stats().TransfersPosted; n != 2 {
			t.Errorf("%d transfers for two hand-offs", n)
		}
		if s := d.ranks[0].worker.Stats(); s.Ignored != 2 {
			t.Errorf("D ignored %d notifications, want the second copies of 2 completions", s.Ignored)
		}
		p.idle()
		d.idle()
	})
}

// P dies while D waits, before and during the write.
func TestPrefillEngineDies(t *testing.T) {
	for _, during := range []bool{false, true} {
		bubble(t, slow, options{}, options{}, func(t *testing.T, p, d *engine) {
			d.decodeLeg(p, legD, 0)
			if during {
				p.prefillLeg(legP, connector.FinishLength)
			}
			time.Sleep(2 * time.Second)
			p.c.fabric.Kill(p.ranks[0].name)
			if o := d.outcome(legD.id, time.Second); o.Kind != connector.ReceiveFailed {
				t.Errorf("D: %+v", o)
			}
			d.reuse()
			time.Sleep(time.Minute)
			d.wantCanary()
			d.idle()
		})
	}
}

// A D that dies costs P its registrations, and its blocks until the lease ends.
func TestDecodeEngineDies(t *testing.T) {
	bubble(t, slow, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		time.Sleep(time.Second)
		p.c.fabric.Kill(d.ranks[0].name)
		time.Sleep(time.Second)
		if s := p.ranks[0].worker.Stats(); s.Waiting != 0 || s.Senders != 0 {
			t.Errorf("%d registrations of a dead D, %d senders", s.Waiting, s.Senders)
		}
		p.prefillLeg(legP, connector.FinishLength)
		if o := p.outcome(legP.id, 31*time.Second); o.Err == nil || o.Err.Phase != connector.PhaseLease {
			t.Errorf("P: %+v", o)
		}
	})
}

// P does not answer: no side channel, another engine at the address.
func TestDecodeSideHandshakeFails(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		for name, change := range map[string]func(*kv.TransferParams){
			"no listener":    func(k *kv.TransferParams) { k.RemotePort = 1 },
			"another engine": func(k *kv.TransferParams) { k.RemoteEngineID = "Q" },
		} {
			id := requestID("cmpl-" + name + "-0-dddddddd")
			d.do(func(h *scheduler.Half) {
				params := kv.TransferParams{DoRemotePrefill: true, RemoteEngineID: p.id, RemoteRequestID: "client",
					RemoteHost: p.host, RemotePort: 5600, TPSize: 1, PPSize: 1}
				change(&params)
				if err := h.Arrived(time.Now(), connector.Request{ID: id, PromptTokens: 10, Params: params}); err != nil {
					t.Error(err)
				}
				h.Allocated(time.Now(), id, kv.BlockIDs{legD.blocks}, 0, 10)
			})
			o := d.outcome(id, 10*time.Second)
			if o.Kind != connector.ReceiveFailed || o.Err == nil || o.Err.Phase != connector.PhaseHandshake {
				t.Errorf("%s: %+v", name, o)
			}
		}
		d.idle()
	})
}

// P cannot reach D's side channel: the pair is given up at the first failure. D, which nobody can
// tell, hears nothing of P and ends within three heartbeats.
func TestPrefillSideHandshakeFails(t *testing.T) {
	bubble(t, millisecond, options{}, options{timeout: time.Minute}, func(t *testing.T, p, d *engine) {
		if err := d.listener.Close(); err != nil {
			t.Fatal(err)
		}
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		o := p.outcome(legP.id, 29*time.Second)
		if o.Err == nil || o.Err.Phase != connector.PhaseHandshake {
			t.Errorf("P: %+v", o)
		}
		if n := p.trace.count("handshake_started"); n < 1 || n > 2 {
			t.Errorf("%d handshakes for one registration and one push", n)
		}
		if o := d.outcome(legD.id, 15*time.Second); o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseWait {
			t.Errorf("D: %+v", o)
		}
	})
}

// A D whose side channel accepts and never answers delays no other D (field-reports.md, S2).
func TestMuteDDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t, millisecond)
		defer cl.close()
		p := cl.engine("P", options{role: connector.Producer})
		d := cl.engine("D", options{role: connector.Consumer})
		mute := cl.net.listen("mute:5600") // accepts nobody: a dial waits
		defer mute.Close()
		x, to, end := cl.outsider("mute", p)
		msg, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: "cmpl-m-0-dddddddd", DecodeEngineID: "M", DecodeHost: "mute",
			DecodePort: 5600, DecodeTPSize: 1, LocalBlockIDs: legD.wireBlocks()})
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Notify(to, msg); err != nil {
			t.Fatal(err)
		}
		other := legP
		other.id, other.transfer = "cmpl-m-0-aaaaaaaa", ""
		p.prefillLeg(other, connector.FinishLength) // P now waits for the mute D
		time.Sleep(50 * time.Millisecond)
		began := time.Now()
		p.fill(legP.blocks, 0, kvOfP)
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
			t.Errorf("D: %+v", o)
		}
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("D waited %v for a mute one", took)
		}
		if o := p.outcome(other.id, time.Minute); o.Err == nil {
			t.Errorf("P: %+v", o)
		}
		end()
	})
}

// Reports that nobody reads do not hold up the writer.
func TestSlowReaderOfOutputs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t, millisecond)
		defer cl.close()
		p := cl.engine("P", options{role: connector.Producer})
		d := cl.engine("D", options{role: connector.Consumer})
		p.fill(legP.blocks, 0, kvOfP)
		stuck := make(chan struct{})
		go p.do(func(*scheduler.Half) { <-stuck }) // P's loop is in a long step
		time.Sleep(time.Millisecond)
		for i := range 50 {
			p.ranks[0].worker.Submit(connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: requestID(fmt.Sprintf("cmpl-r%d-0-aaaaaaaa", i)),
				Blocks: kv.BlockIDs{legP.blocks}, NumTokens: 10, Lease: 30 * time.Second, Digest: connector.Digest{1}}}})
		}
		for i := range 50 {
			l := legD
			l.id, l.transfer = requestID(fmt.Sprintf("cmpl-r%d-0-dddddddd", i)), ""
			d.decodeLeg(p, l, 0)
			if o := d.outcome(l.id, time.Second); o.Kind != connector.Received {
				t.Fatalf("D: %+v", o)
			}
		}
		close(stuck)
		time.Sleep(time.Second)
		if s := p.ranks[0].worker.Stats(); s.TransfersDone != 50 || s.Held != 0 {
			t.Errorf("P: %+v", s)
		}
	})
}

// With nothing waiting the writer sleeps; with blocks unmatched only the lease wakes it.
func TestIdleWriterSleeps(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		d.decodeLeg(p, legD, 0)
		p.prefillLeg(legP, connector.FinishLength)
		d.outcome(legD.id, time.Second)
		p.outcome(legP.id, time.Second)
		time.Sleep(time.Minute)
		before, beforeD := p.ranks[0].worker.Stats().Wakeups, d.ranks[0].worker.Stats().Wakeups
		time.Sleep(24 * time.Hour)
		if n := p.ranks[0].worker.Stats().Wakeups - before; n != 0 {
			t.Errorf("P's writer woke %d times in an idle day", n)
		}
		if n := d.ranks[0].worker.Stats().Wakeups - beforeD; n != 0 {
			t.Errorf("D's writer woke %d times in an idle day", n)
		}
		other := legP
		other.id = "cmpl-other-0-aaaaaaaa"
		p.prefillLeg(other, connector.FinishLength)
		time.Sleep(20 * time.Second)
		if n := p.ranks[0].worker.Stats().Wakeups - before; n > 2 {
			t.Errorf("P's writer woke %d times in 20 s with blocks that nobody has asked for", n)
		}
	})
}
