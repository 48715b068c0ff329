package worker

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/fault"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// The bytes of one of two ranks' READs change on the way, so that their checksum does not match: the agent says
// that the READ failed, and no notification follows it. Nothing of it is taken, both ranks end, P is told.
func TestFailedRead(t *testing.T) {
	for _, failing := range []int{0, 1} {
		on := func(rule fault.Rule) func(int, agent.Agent) agent.Agent {
			return func(rank int, a agent.Agent) agent.Agent {
				f := fault.Wrap(a, fault.Options{})
				if rank == failing {
					f.Add(rule)
				}
				return f
			}
		}
		bad := on(fault.Rule{Match: fault.Match{On: fault.OnResult}, Do: fault.Fail, Err: errors.New("checksum of the received bytes is wrong")})
		unsaid := on(fault.Rule{Match: fault.Match{On: fault.OnNotification, Where: func(o fault.Occasion) bool { return isReadDone(o.Msg) }}, Do: fault.Drop})
		pullBubble(t, millisecond, options{tp: 2, wrap: unsaid}, options{tp: 2, wrap: bad}, func(t *testing.T, p, d *engine) {
			d.pullLeg(p.prefilled(legP), legD, 0)
			o := d.outcome(legD.id, time.Second)
			if o.Kind != connector.ReceiveFailed || o.Err == nil || o.Err.Phase != connector.PhaseTransfer || !strings.Contains(o.Err.Error(), "checksum") {
				t.Fatalf("D: %+v", o)
			}
			d.reuse()
			if o := p.outcome(legP.id, time.Second); o.Kind != connector.Released || o.Err == nil {
				t.Errorf("P: %+v", o)
			}
			time.Sleep(time.Minute)
			d.wantCanary()
			if n := len(d.outcomes(legD.id)); n != 1 {
				t.Errorf("%d outcomes", n)
			}
			p.idle()
			d.idle()
		})
	}
}

// P's first handshake with D, which it needs for its answer, takes longer than three heartbeats. A claim is
// made four times: within that D waits, behind it the request ends by its phase, and P has its blocks.
func TestSlowFirstContactInPull(t *testing.T) {
	for name, c := range map[string]struct {
		lease time.Duration
		slow  bool // the agent's admission, too
		comes bool
	}{
		"within four heartbeats": {7 * time.Second, false, false}, // 4 x 1.17 s are less than one step's 4.9 s
		"default lease":          {0, false, true},
		"two slow steps":         {0, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			po := options{lease: c.lease, dial: slowDial}
			if c.slow {
				po.wrap = func(_ int, a agent.Agent) agent.Agent { return slowAdmission{a} }
			}
			pullBubble(t, millisecond, po, options{lease: c.lease}, func(t *testing.T, p, d *engine) {
				began := time.Now()
				d.pullLeg(p.prefilled(legP), legD, 0)
				o := d.outcome(legD.id, 31*time.Second)
				t.Logf("after %v: %+v", time.Since(began), o)
				if c.comes {
					if o.Kind != connector.Received {
						t.Fatalf("D: %+v", o)
					}
					if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
						t.Error(err)
					}
				} else if o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseWait || !strings.Contains(o.Err.Error(), "did not answer 4 times") {
					t.Fatalf("D: %+v", o)
				}
				p.outcome(legP.id, time.Minute)
				time.Sleep(time.Minute)
				p.idle()
				d.idle()
			})
		})
	}
}

// A D whose side channel accepts and never answers has claimed, and another D reads a P of the same kind:
// neither delays the healthy pair (field-reports.md, S2).
func TestMutePeersDelayNobodyInPull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl := newCluster(t, millisecond)
		defer cl.close()
		p := cl.engine("P", options{role: connector.Producer, mode: kv.Pull})
		d := cl.engine("D", options{role: connector.Consumer, mode: kv.Pull})
		mute := cl.net.listen("mute:5600") // accepts nobody: a dial waits
		defer mute.Close()
		x, to, end := cl.outsider("mute", p)
		other := legP
		other.id = "cmpl-m-0-aaaaaaaa"
		p.prefilled(other)
		msg, err := wire.AppendControl(nil, &wire.Claim{Seq: 1, From: wire.Sender{Engine: "M", Host: "mute", Port: 5600, TP: 1},
			RegistrationRef: testRef(other.id, 1), Tokens: other.tokens, Readers: 1, Digest: other.digest, Blocks: wire.BlocksDigest(other.wireBlocks())})
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Notify(to, msg); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
		if n := p.trace.count("claim_received"); n != 1 {
			t.Fatalf("%d claims of the mute D", n)
		}
		stuck := legD
		stuck.id = "cmpl-m-0-dddddddd"
		d.pullLeg(&kv.TransferParams{DoRemotePrefill: true, RemoteEngineID: "M", RemoteRequestID: "r", RemoteHost: "mute", RemotePort: 5600,
			RemoteBlockIDs: other.wireBlocks(), RemoteNumTokens: other.tokens, TPSize: 1, PPSize: 1, Mode: kv.Pull}, stuck, 0)
		time.Sleep(50 * time.Millisecond) // both handshakes with the mute run now
		began := time.Now()
		p.fill(legP.blocks, 0, kvOfP)
		l := legD
		l.blocks = []kv.BlockID{10, 11, 12}
		d.pullLeg(p.prefilled(legP), l, 0)
		if o := d.outcome(l.id, time.Second); o.Kind != connector.Received {
			t.Errorf("D: %+v", o)
		}
		if err := d.holds(l.blocks, 0, kvOfP); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("D waited %v for mute ones", took)
		}
		if len(d.outcomes(stuck.id)) != 0 || len(p.outcomes(other.id)) != 0 {
			t.Fatal("the handshakes with the mute are over; the test proves nothing")
		}
		if o := d.outcome(stuck.id, time.Minute); o.Kind != connector.ReceiveFailed || o.Err.Phase != connector.PhaseHandshake {
			t.Errorf("D, of the mute P: %+v", o)
		}
		if o := p.outcome(other.id, time.Minute); o.Err == nil {
			t.Errorf("P, of the mute D: %+v", o)
		}
		end()
	})
}

// Every notification comes twice: claims, permissions, ends of reads. Nothing is read or ends twice, also when
// the claim comes once more behind its end.
func TestDuplicatedNotificationsInPull(t *testing.T) {
	var claim agent.Event
	twice := func(e agent.Event) []agent.Event {
		if n, ok := e.(agent.Notification); ok {
			if strings.Contains(string(n.Msg), "\xa4kind\xa5claim") {
				claim = e
			}
			return []agent.Event{n, n}
		}
		return []agent.Event{e}
	}
	xp, xd := &tamper{mangle: twice}, &tamper{mangle: twice}
	pullBubble(t, millisecond, options{wrap: wrapped(xp)}, options{wrap: wrapped(xd)}, func(t *testing.T, p, d *engine) {
		d.pullLeg(p.prefilled(legP), legD, 0)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
			t.Fatalf("D: %+v", o)
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
			t.Error(err)
		}
		p.outcome(legP.id, time.Second)
		d.reuse()
		synctest.Wait()
		if claim == nil {
			t.Fatal("no claim has come; the test proves nothing")
		}
		xp.extra <- claim
		time.Sleep(time.Minute)
		d.wantCanary()
		if n, m := len(d.outcomes(legD.id)), len(p.outcomes(legP.id)); n != 1 || m != 1 {
			t.Errorf("%d outcomes on D, %d on P", n, m)
		}
		if n := d.ranks[0].worker.Stats().TransfersPosted; n != 1 {
			t.Errorf("%d transfers for one hand-off", n)
		}
		if n := p.trace.count("grant_issued"); n != 1 {
			t.Errorf("%d permissions for one claim", n)
		}
		p.idle()
		d.idle()
	})
}

// A D refuses a P whose memory is unlike its own in the handshake: unlike blocks (H23), a stage of a pipeline whose
// size the router has left out (H5), and what kvferry does not have (H6, H16, H30).
func TestUnlikeMemoryIsRefused(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		for name, c := range map[string]struct {
			change func(*wire.AgentMetadata)
			says   string
		}{
			"tokens per block": {func(m *wire.AgentMetadata) { m.BlockSize = 2 * testBlockSize }, "block size"},
			"bytes per block": {func(m *wire.AgentMetadata) {
				for i := range m.BlockLens {
					m.BlockLens[i] = testBlockLen / 2
				}
			}, "block length"},
			"state-space layers":  {func(m *wire.AgentMetadata) { m.SSMSizes = [2]int{64, 64} }, "state-space"},
			"context parallelism": {func(m *wire.AgentMetadata) { m.PCPSize = 2 }, "context parallelism"},
			"several groups":      {func(m *wire.AgentMetadata) { m.RegionGroupIDs = []int{0, 1} }, "several KV-cache groups"},
			"a stage of two": {func(m *wire.AgentMetadata) {
				m.KVCachesBaseAddr, m.BlockLens, m.BlockStrides = m.KVCachesBaseAddr[:1], m.BlockLens[:1], m.BlockStrides[:1]
			}, "regions"},
		} {
			t.Run(string(mode)+", "+name, func(t *testing.T) {
				bubble(t, millisecond, options{mode: mode, shape: c.change}, options{mode: mode}, func(t *testing.T, p, d *engine) {
					if mode == kv.Push {
						d.decodeLeg(p, legD, 0)
						p.prefillLeg(legP, connector.FinishLength)
					} else {
						d.pullLeg(p.prefilled(legP), legD, 0)
					}
					o := d.outcome(legD.id, time.Second)
					if o.Kind != connector.ReceiveFailed || o.Err == nil || o.Err.Phase != connector.PhaseHandshake || !strings.Contains(o.Err.Error(), c.says) {
						t.Errorf("D: %+v", o)
					}
					if n := p.ranks[0].worker.Stats().TransfersPosted + d.ranks[0].worker.Stats().TransfersPosted; n != 0 {
						t.Errorf("%d transfers", n)
					}
					p.outcome(legP.id, time.Minute)
					d.wantCanary()
					time.Sleep(time.Minute)
					p.idle()
					d.idle()
				})
			})
		}
	}
}

func isReadDone(msg []byte) bool { return strings.Contains(string(msg), "\xa4kind\xa4read") }
