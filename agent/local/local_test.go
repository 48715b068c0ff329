package local

import (
	"bytes"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/agenttest"
	"github.com/kvferry/kvferry/kv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// factory makes networks of local agents.
func factory(cfg Config) agenttest.Factory {
	return func(testing.TB) agenttest.Net {
		f := New(cfg)
		n := 0
		return agenttest.Net{
			New: func(t testing.TB, limits agent.Limits) agent.Agent {
				n++
				a, err := f.AgentWithLimits(agent.Name(fmt.Sprintf("agent-%d", n)), limits)
				if err != nil {
					t.Fatal(err)
				}
				return a
			},
			Stall: func(_ testing.TB, a agent.Agent) func() {
				all := n
				each := func(do func(a, b agent.Name)) {
					for i := range all {
						if other := agent.Name(fmt.Sprintf("agent-%d", i+1)); other != a.Name() {
							do(a.Name(), other)
						}
					}
				}
				each(f.Partition)
				return func() { each(f.Heal) }
			},
			Kill: func(_ testing.TB, a agent.Agent) {
				f.Kill(a.Name())
				for i := range n {
					f.Heal(a.Name(), agent.Name(fmt.Sprintf("agent-%d", i+1)))
				}
			},
		}
	}
}

func TestConformance(t *testing.T) {
	for name, cfg := range map[string]Config{
		"immediate": {},
		"slow":      {Latency: 2 * time.Millisecond, Bandwidth: 10e9, Chunk: 64 << 10},
	} {
		t.Run(name, func(t *testing.T) { agenttest.Run(t, factory(cfg), agenttest.Options{Bubble: true}) })
	}
}

// Time passes as configured, to the nanosecond: two transfers share the bandwidth of one link.
func TestLatencyAndBandwidth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := New(Config{Latency: 3 * time.Millisecond, Bandwidth: 1 << 20, Chunk: 1 << 20})
		p, _ := f.Agent("p")
		d, _ := f.Agent("d")
		defer p.Close()
		defer d.Close()
		pm, err := p.Alloc(1 << 20)
		if err != nil {
			t.Fatal(err)
		}
		dm, _ := d.Alloc(1 << 20)
		peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()})
		if err != nil {
			t.Fatal(err)
		}
		whole := []kv.Descriptor{{Addr: dm.Addr(), Length: 1 << 20}}
		g, _ := d.Grant(agent.GrantSpec{Peer: "p", Ranges: whole})
		local, _ := p.Prepare(agent.Local, []kv.Descriptor{{Addr: pm.Addr(), Length: 1 << 20}})
		remote, _ := p.Prepare(peer.ID, whole)
		pm.Bytes()[5] = 5
		for range 2 {
			if _, err := p.Post(agent.Transfer{
				Local: local, Remote: remote, LocalIdx: []uint32{0}, RemoteIdx: []uint32{0},
				Grant: g, Silence: 5 * time.Second,
			}); err != nil {
				t.Fatal(err)
			}
		}
		for _, want := range []time.Duration{time.Second, 2 * time.Second} {
			r := (<-p.Events()).(agent.Result)
			<-p.Events()
			if want += 6 * time.Millisecond; r.Took != want || r.Outcome != agent.OutcomeDone {
				t.Errorf("%v after %v, want %v", r.Outcome, r.Took, want)
			}
		}
		if !bytes.Equal(pm.Bytes(), dm.Bytes()) {
			t.Error("bytes differ")
		}
	})
}

// Cut tells both sides, and the same agents can connect again.
func TestCut(t *testing.T) {
	f := New(Config{})
	p, _ := f.Agent("p")
	d, _ := f.Agent("d")
	defer p.Close()
	defer d.Close()
	for range 2 {
		if _, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()}); err != nil {
			t.Fatal(err)
		}
		f.Cut("d", "p")
		if l := (<-p.Events()).(agent.PeerLost); l.Inbound || l.Peer.Name != "d" {
			t.Errorf("p sees %+v", l)
		}
		if l := (<-d.Events()).(agent.PeerLost); !l.Inbound || l.Peer.Name != "p" {
			t.Errorf("d sees %+v", l)
		}
	}
}
