package peer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// The same instance at another address is the same generation, and its agents are not added again.
func TestSecondAddressOfOneInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		defer b.serve(t, addrQ, "P", "i1", 1).Close()
		first := b.connect(t, target("P", addrP))
		for range 2 * maxAddrs {
			if c := b.connect(t, target("P", addrQ)); c != first {
				t.Fatal("another generation")
			}
		}
		if n := b.dials(addrQ); n != 1 {
			t.Errorf("%d handshakes with the second address", n)
		}
		if b.table.Ensure(target("P", addrP), nil) != first {
			t.Error("the first address was forgotten")
		}
		b.wantSizes(t, 1, 1)
	})
}

// Addresses of one engine are bounded; a forgotten one is asked again and changes nothing.
func TestAddressesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		var first *Connected
		for i := range 3 * maxAddrs {
			addr := fmt.Sprintf("p%d:5600", i)
			defer b.serve(t, addr, "P", "i1", 1).Close()
			c := b.connect(t, target("P", addr))
			if first == nil {
				first = c
			}
			if c != first {
				t.Fatal("another generation")
			}
		}
		b.table.mu.Lock()
		n := len(b.table.mu.engines["P"].addrs)
		b.table.mu.Unlock()
		if n != maxAddrs {
			t.Errorf("%d addresses are kept", n)
		}
	})
}

// Another instance at a new address replaces the old one, also under work in flight; a new address
// that fails changes nothing.
func TestReplacedAtNewAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		first := b.connect(t, target("P", addrP))
		b.table.Pin("P", first.Gen)
		b.refused(t, target("P", "nowhere:5600"), PhaseDial)
		if b.table.Lookup("P") != first {
			t.Fatal("a failed handshake with another address took the peer away")
		}
		defer b.serve(t, addrQ, "P", "i2", 1).Close()
		second := b.connect(t, target("P", addrQ))
		if second.Gen <= first.Gen || b.table.Lookup("P") != second {
			t.Errorf("generation %d after %d", second.Gen, first.Gen)
		}
		b.wantSizes(t, 1, 1)
		if b.agent.names()[0] != agentName("P", "i2", kv.Rank{}) {
			t.Errorf("the agent has %v", b.agent.names())
		}
		b.table.Unpin("P", first.Gen)
	})
}

// Metadata that the same process replaced is a new generation, although the agent has the same name.
func TestMetadataReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		l := b.serve(t, addrP, "P", "i1", 1)
		defer l.Close()
		first := b.connect(t, target("P", addrP))
		m := metadata("P", "i1", kv.Rank{})
		m.NumBlocks = 4
		if err := l.Set(kv.Rank{}, 2, payload(t, m, testHash)); err != nil {
			t.Fatal(err)
		}
		l2 := b.serve(t, addrQ, "P", "i1", 0)
		defer l2.Close()
		if err := l2.Set(kv.Rank{}, 2, payload(t, m, testHash)); err != nil {
			t.Fatal(err)
		}
		second := b.connect(t, target("P", addrQ))
		if second.Gen == first.Gen || second.Ranks[0].Regions[0].NumBlocks != 4 {
			t.Errorf("got %+v", second)
		}
		b.wantSizes(t, 1, 1)
	})
}

// Ranks that are not connected tell as well: when rank (0,0), which is always asked, has changed, or
// one of the ranks in common, it is another generation.
func TestOtherIncarnationByAnyRank(t *testing.T) {
	rank0, rank1, rank2 := kv.Rank{}, kv.Rank{TP: 1}, kv.Rank{TP: 2}
	for name, tc := range map[string]struct {
		second Target
		change kv.Rank
		same   bool
	}{
		"nothing":              {target("P", addrQ, 1, 2), kv.Rank{TP: 9}, true},
		"rank 0, not asked":    {target("P", addrQ, 2), rank0, false},
		"rank in common":       {target("P", addrQ, 1, 2), rank1, false},
		"rank that was absent": {target("P", addrQ, 1, 2), rank2, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, nil)
				defer b.table.Close()
				defer b.serve(t, addrP, "P", "i1", 3).Close()
				first := b.connect(t, target("P", addrP, 1))
				l := b.serve(t, addrQ, "P", "i1", 3)
				defer l.Close()
				m := metadata("P", "i1", tc.change)
				m.DeviceID = 7
				if err := l.Set(tc.change, 2, payload(t, m, testHash)); err != nil {
					t.Fatal(err)
				}
				if c := b.connect(t, tc.second); (c.Gen == first.Gen) != tc.same {
					t.Errorf("generation %d after %d", c.Gen, first.Gen)
				}
			})
		})
	}
}

// A second engine that claims the agent of a first one takes it over: the first is gone, as its
// transfers have ended. When the claim fails later, both are gone.
func TestAgentClaimedByAnotherEngine(t *testing.T) {
	for _, fails := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, func(_ *Config, a *fakeAgent) {
				a.onAdd = func(_ context.Context, name agent.Name, _ agent.PeerID) error {
					if strings.HasSuffix(string(name), "/1.9") {
						return errors.New("no")
					}
					return nil
				}
			})
			defer b.table.Close()
			defer b.serve(t, addrP, "P", "i1", 1).Close()
			b.connect(t, target("P", addrP))
			thief := metadata("T", "i", kv.Rank{})
			thief.Extension.Agents[0].Blob = []byte(agentName("P", "i1", kv.Rank{}))
			l := b.serve(t, addrQ, "T", "i", 0)
			defer l.Close()
			tg := Target{Engine: "T", Host: "q", Port: 5600, TP: 10, PP: 2, Ranks: []kv.Rank{{}}}
			if fails {
				tg.Ranks = append(tg.Ranks, kv.Rank{PP: 1, TP: 9})
				if err := l.Set(tg.Ranks[1], 1, payload(t, metadata("T", "i", tg.Ranks[1]), testHash)); err != nil {
					t.Fatal(err)
				}
			}
			if err := l.Set(kv.Rank{}, 1, payload(t, thief, testHash)); err != nil {
				t.Fatal(err)
			}
			if fails {
				b.refused(t, tg, PhaseAdmit)
				b.wantSizes(t, 0, 0)
			} else {
				b.connect(t, tg)
				b.wantSizes(t, 1, 1)
			}
			if b.table.Lookup("P") != nil {
				t.Error("P is still said to be connected")
			}
		})
	}
}

// A target with more ranks extends the generation; ranks already there keep their agents.
func TestMoreRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 4).Close()
		small := b.connect(t, target("P", addrP, 2))
		b.table.Pin("P", small.Gen)
		big := b.connect(t, target("P", addrP, 1, 2, 3))
		if big.Gen != small.Gen || len(big.Ranks) != 3 || len(small.Ranks) != 1 {
			t.Errorf("%+v after %+v", big, small)
		}
		old, _ := small.Rank(kv.Rank{TP: 2})
		kept, _ := big.Rank(kv.Rank{TP: 2})
		if old.Agent != kept.Agent {
			t.Error("the first rank's agent was added again")
		}
		if b.table.Ensure(target("P", addrP, 2), nil) != big || b.table.Ensure(target("P", addrP, 3, 1), nil) != big {
			t.Error("not found by fewer ranks")
		}
		b.table.Lost(big.Ranks[2].Agent.ID, errors.New("cut"))
		b.wantSizes(t, 0, 0)
	})
}

// Who joins a flight and needs more ranks than it asks for goes on with one of its own; still one at
// a time.
func TestJoinWithOtherRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 3).Close()
		one, two := b.ask(target("P", addrP, 1)), b.ask(target("P", addrP, 1, 2))
		r1, r2 := <-one, <-two
		if r1.err != nil || r2.err != nil {
			t.Fatal(r1.err, r2.err)
		}
		if _, ok := r2.c.Rank(kv.Rank{TP: 2}); !ok || r1.c.Gen != r2.c.Gen {
			t.Errorf("got %+v and %+v", r1.c, r2.c)
		}
		if n := b.dials(addrP); n != 2 {
			t.Errorf("%d handshakes", n)
		}
		b.wantSizes(t, 1, 2)
	})
}

// A peer that is lost while it is being extended fails the extension, and nothing stays.
func TestLostWhileExtended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *bed
		var first *Connected
		b = newBed(t, func(_ *Config, a *fakeAgent) {
			a.onAdd = func(_ context.Context, name agent.Name, _ agent.PeerID) error {
				if strings.HasSuffix(string(name), ".1") {
					b.table.Lost(first.Ranks[0].Agent.ID, errors.New("cut"))
				}
				return nil
			}
		})
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 2).Close()
		first = b.connect(t, target("P", addrP))
		b.refused(t, target("P", addrP, 1), PhaseLost)
		b.wantSizes(t, 0, 0)
	})
}

// Handshakes with one engine id at two addresses don't wait for each other, and when both lead to
// one instance there is one generation.
func TestTwoAddressesInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(_ *Config, a *fakeAgent) {
			a.onAdd = func(context.Context, agent.Name, agent.PeerID) error { time.Sleep(time.Millisecond); return nil }
		})
		defer b.table.Close()
		end := make(chan struct{})
		defer close(end)
		b.set("old:5600", mute(end))
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		defer b.serve(t, addrQ, "P", "i1", 1).Close()
		dead := b.ask(target("P", "old:5600"))
		r1, r2 := b.ask(target("P", addrP)), b.ask(target("P", addrQ))
		p, q := <-r1, <-r2
		if p.err != nil || q.err != nil || p.c != q.c {
			t.Errorf("got %+v and %+v", p, q)
		}
		if len(dead) != 0 {
			t.Error("the dead address ended before the live ones")
		}
		if r := <-dead; r.err == nil {
			t.Error("a mute address connected")
		}
		b.wantSizes(t, 1, 1)
	})
}

func TestEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(c *Config, _ *fakeAgent) { c.TTL = time.Minute })
		defer b.table.Close()
		for _, e := range []kv.EngineID{"idle", "pinned", "used"} {
			defer b.serve(t, string(e)+":5600", e, "i", 1).Close()
			b.connect(t, target(e, string(e)+":5600"))
		}
		gen := b.table.Lookup("pinned").Gen
		used := b.table.Lookup("used").Gen
		for range 2 {
			if !b.table.Pin("pinned", gen) {
				t.Fatal("not pinned")
			}
		}
		if b.table.Pin("pinned", gen+100) {
			t.Fatal("another generation was pinned")
		}
		time.Sleep(40 * time.Second)
		b.connect(t, target("used", "used:5600"))
		time.Sleep(40 * time.Second)
		if b.table.Lookup("idle") == nil {
			t.Error("evicted without an Ensure")
		}
		if c := b.connect(t, target("used", "used:5600")); c.Gen != used {
			t.Error("Ensure did not count as use")
		}
		if b.table.Lookup("idle") != nil || b.table.Lookup("pinned") == nil || b.table.Lookup("used") == nil {
			t.Error("the wrong ones were evicted")
		}
		b.table.Unpin("pinned", gen)
		time.Sleep(2 * time.Minute)
		b.connect(t, target("used", "used:5600"))
		if b.table.Lookup("pinned") == nil {
			t.Error("evicted with one pin left")
		}
		b.table.Unpin("pinned", gen)
		b.connect(t, target("used", "used:5600")) // so that the other one is first in line
		time.Sleep(59 * time.Second)
		b.connect(t, target("used", "used:5600"))
		if b.table.Lookup("pinned") == nil {
			t.Error("the last Unpin did not count as use")
		}
		time.Sleep(2 * time.Second)
		b.connect(t, target("used", "used:5600"))
		b.wantSizes(t, 1, 1)
		for _, g := range recorded[event.PeerGone](b.events) {
			if !strings.Contains(g.Reason, "not used for 1m0s") {
				t.Errorf("reason %q", g.Reason)
			}
		}
	})
}

// An evicted engine is reached again by the very request that found it stale.
func TestEvictedThenAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		first := b.connect(t, target("P", addrP))
		time.Sleep(DefaultTTL + time.Second)
		second := b.connect(t, target("P", addrP))
		if second.Gen == first.Gen {
			t.Error("was not evicted")
		}
		b.wantSizes(t, 1, 1)
	})
}

func TestNoTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(c *Config, _ *fakeAgent) { c.TTL = -1 })
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		first := b.connect(t, target("P", addrP))
		time.Sleep(10000 * time.Hour)
		if b.connect(t, target("P", addrP)) != first {
			t.Error("was evicted")
		}
	})
}

// A full table gives up who was not used for longest, never one with work in flight.
func TestFullTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(c *Config, _ *fakeAgent) { c.MaxPeers = 3 })
		defer b.table.Close()
		for i := range 5 {
			e := kv.EngineID(fmt.Sprint("E", i))
			addr := fmt.Sprintf("e%d:5600", i)
			defer b.serve(t, addr, e, "i", 1).Close()
			if i == 4 {
				break
			}
			c := b.connect(t, target(e, addr))
			if i != 1 {
				b.table.Pin(e, c.Gen)
			}
		}
		if b.table.Lookup("E1") != nil || b.table.Lookup("E0") == nil {
			t.Error("the wrong one made room")
		}
		e := b.refused(t, target("E4", "e4:5600"), PhaseAdmit)
		var limit *agent.LimitError
		if !errors.As(e, &limit) || limit.Limit != 3 {
			t.Error(e)
		}
		if n := len(b.agent.names()); n != 3 {
			t.Errorf("the agent has %d peers", n)
		}
	})
}
