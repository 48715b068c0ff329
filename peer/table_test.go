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

const addrP, addrQ = "p:5600", "q:5600"

func TestConnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 2).Close()
		tg := target("P", addrP, 1, 0)
		asked := b.ask(tg)
		tg.Ranks[0].TP = 63 // the caller's slice is its own
		r1 := <-asked
		if r1.err != nil {
			t.Fatal(r1.err)
		}
		c := r1.c
		if c.Engine != "P" || c.Gen == 0 || c.Addr != addrP || len(c.Ranks) != 2 || c.Ranks[0].Rank.TP != 1 {
			t.Errorf("connected as %+v", c)
		}
		if !c.Has("push_fail") || c.Has("other") {
			t.Error("capabilities are not those announced")
		}
		r, ok := c.Rank(kv.Rank{TP: 1})
		if !ok || r.Agent.ID.Name != agentName("P", "i1", kv.Rank{TP: 1}) || r.Agent.Transport != "tcp" || len(r.Regions) != 1 || r.Regions[0].NumBlocks != 8 {
			t.Errorf("rank 1 is %+v", r)
		}
		if _, ok := c.Rank(kv.Rank{TP: 2}); ok {
			t.Error("has a rank that was not asked for")
		}
		if b.agent.mu.infos[0].HostID != "host" {
			t.Errorf("the agent was told %+v", b.agent.mu.infos[0])
		}
		if got := b.connect(t, target("P", addrP)); got != c || b.table.Lookup("P") != c || b.table.Lookup("Q") != nil {
			t.Error("the connected peer is not found")
		}
		if n := b.dials(addrP); n != 1 {
			t.Errorf("%d connections for one handshake", n)
		}
		fin := recorded[event.HandshakeFinished](b.events)
		if len(fin) != 1 || fin[0].Err != nil || fin[0].Gen != c.Gen || fin[0].Waiters != 1 || fin[0].Transport != "tcp" || fin[0].Why == "" {
			t.Errorf("events %+v", fin)
		}
	})
}

// All who ask while a handshake is in flight wait for that one and are released together; one who
// asks for a connected peer meanwhile does not wait.
func TestSingleFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(c *Config, a *fakeAgent) {
			a.onAdd = func(_ context.Context, name agent.Name, _ agent.PeerID) error {
				if strings.HasPrefix(string(name), "P/") {
					time.Sleep(time.Second)
				}
				return nil
			}
		})
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		defer b.serve(t, addrQ, "Q", "i1", 1).Close()
		q := b.connect(t, target("Q", addrQ))
		started := time.Now()
		var all []<-chan result
		for range 50 {
			all = append(all, b.ask(target("P", addrP)))
			time.Sleep(10 * time.Millisecond)
			if b.table.Ensure(target("Q", addrQ), nil) != q {
				t.Fatal("the connected peer had to wait")
			}
		}
		gens := map[kv.Generation]int{}
		for _, ch := range all {
			r := <-ch
			if r.err != nil {
				t.Fatal(r.err)
			}
			if took := time.Since(started); took > time.Second {
				t.Errorf("released after %v", took)
			}
			gens[r.c.Gen]++
		}
		synctest.Wait()
		for _, ch := range all {
			if len(ch) != 0 {
				t.Error("a waiter was called twice")
			}
		}
		if len(gens) != 1 || b.dials(addrP) != 1 {
			t.Errorf("%d generations from %d connections", len(gens), b.dials(addrP))
		}
		fin := recorded[event.HandshakeFinished](b.events)
		if n := fin[len(fin)-1].Waiters; n != 50 {
			t.Errorf("%d waiters were counted", n)
		}
	})
}

// A failure fails all its waiters, says how many, leaves nothing, and the next request tries again.
func TestFailureThenSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		end := make(chan struct{})
		b.set(addrP, mute(end))
		var all []<-chan result
		for range 3 {
			all = append(all, b.ask(target("P", addrP)))
		}
		for _, ch := range all {
			r := <-ch
			var e *HandshakeError
			if !errors.As(r.err, &e) || e.Waiters != 3 || e.Phase != PhaseDial || e.Engine != "P" || e.Addr != addrP {
				t.Fatalf("got %v", r.err)
			}
			if !strings.Contains(r.err.Error(), "3 requests waiting for it are failed") {
				t.Errorf("the message does not say what happens to whom: %v", r.err)
			}
		}
		close(end)
		synctest.Wait()
		b.wantSizes(t, 0, 0)
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		b.connect(t, target("P", addrP))
	})
}

// What earlier ranks left in the agent goes when a later rank fails.
func TestFailureRemovesEarlierRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		b := newBed(t, func(_ *Config, a *fakeAgent) {
			a.onAdd = func(_ context.Context, name agent.Name, _ agent.PeerID) error {
				if strings.HasSuffix(string(name), ".2") {
					return broken
				}
				return nil
			}
		})
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 3).Close()
		e := b.refused(t, target("P", addrP, 0, 1, 2), PhaseAdmit)
		if e.Rank.TP != 2 || !errors.Is(e, broken) {
			t.Errorf("got %v", e)
		}
		b.wantSizes(t, 0, 0)
	})
}

func TestRefusals(t *testing.T) {
	meta := func(t *testing.T, engine kv.EngineID, instance string, r kv.Rank, blocks int, hash string) []byte {
		m := metadata(engine, instance, r)
		m.NumBlocks = blocks
		return payload(t, m, hash)
	}
	otherHash := strings.Repeat("f", 64)
	for _, tc := range []struct {
		name   string
		phase  Phase
		served func(t *testing.T, r kv.Rank) []byte
		says   []string
	}{
		{"near hash", PhaseHash, func(t *testing.T, r kv.Rank) []byte { return meta(t, "P", "i", r, 8, nearHash) },
			[]string{nearHash, testHash, "one setting", "its mode is pull, ours is push"}},
		{"other hash", PhaseHash, func(t *testing.T, r kv.Rank) []byte { return meta(t, "P", "i", r, 8, otherHash) },
			[]string{otherHash, testHash, "model=m", "enforce_handshake_compat", "both sides"}},
		{"other engine", PhaseIdentity, func(t *testing.T, r kv.Rank) []byte { return meta(t, "X", "i", r, 8, testHash) }, []string{`engine "X" answers there`, `--engine-id "P"`}},
		{"ourselves", PhaseIdentity, func(t *testing.T, r kv.Rank) []byte { return meta(t, "self", "i", r, 8, testHash) }, []string{"--advertise-host", "localhost"}},
		{"ranks of two instances", PhaseRanks, func(t *testing.T, r kv.Rank) []byte { return meta(t, "P", fmt.Sprint("i", r.TP), r, 8, testHash) }, []string{"instance", "i0", "i1"}},
		{"ranks of unlike size", PhaseRanks, func(t *testing.T, r kv.Rank) []byte { return meta(t, "P", "i", r, 8+r.TP, testHash) }, []string{"num_blocks"}},
		{"no blocks", PhaseMetadata, func(t *testing.T, r kv.Rank) []byte { return meta(t, "P", "i", r, 0, testHash) }, []string{"num_blocks"}},
		{"one agent for two ranks", PhaseRanks, func(t *testing.T, r kv.Rank) []byte {
			m := metadata("P", "i", r)
			m.Extension.Agents[0].Blob = []byte("shared")
			return payload(t, m, testHash)
		}, []string{"agent"}},
		{"other transport", PhaseOffers, func(t *testing.T, r kv.Rank) []byte {
			m := metadata("P", "i", r)
			m.Extension.Agents[0].Transport = "rdma"
			return payload(t, m, testHash)
		}, []string{"rdma", "tcp"}},
		{"stock", PhaseOffers, func(t *testing.T, r kv.Rank) []byte {
			m := metadata("P", "i", r)
			m.Extension = nil
			return payload(t, m, testHash)
		}, []string{"not kvferry", "nixl", "tcp"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, nil)
				defer b.table.Close()
				l, err := NewListener(b.listen(addrP), ListenerConfig{})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				for r := range 2 {
					if err := l.Set(kv.Rank{TP: r}, 1, tc.served(t, kv.Rank{TP: r})); err != nil {
						t.Fatal(err)
					}
				}
				e := b.refused(t, target("P", addrP, 0, 1), tc.phase)
				for _, s := range tc.says {
					if !strings.Contains(e.Error(), s) {
						t.Errorf("the message lacks %q: %v", s, e)
					}
				}
				b.wantSizes(t, 0, 0)
			})
		})
	}
}

// The metadata of a peer with another hash is not looked at, and with the check off it is.
func TestHashComesBeforeMetadata(t *testing.T) {
	for _, enforce := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, func(c *Config, _ *fakeAgent) { c.EnforceHash = enforce })
			defer b.table.Close()
			l := b.serve(t, addrP, "P", "i1", 0)
			defer l.Close()
			if err := l.Set(kv.Rank{}, 1, payloadOf(strings.Repeat("f", 64), []byte("garbage"))); err != nil {
				t.Fatal(err)
			}
			phase := PhaseHash
			if !enforce {
				phase = PhaseMetadata
			}
			b.refused(t, target("P", addrP), phase)
		})
	}
}

func TestBadTargets(t *testing.T) {
	b := newBed(t, nil)
	defer b.table.Close()
	good := Target{Engine: "P", Host: "p", Port: 5600, TP: 2, PP: 1, Ranks: []kv.Rank{{TP: 1}}}
	for name, change := range map[string]func(*Target){
		"no engine":     func(t *Target) { t.Engine = "" },
		"ourselves":     func(t *Target) { t.Engine = "self" },
		"no host":       func(t *Target) { t.Host = "" },
		"long host":     func(t *Target) { t.Host = strings.Repeat("h", 1000) },
		"port 0":        func(t *Target) { t.Port = 0 },
		"port too big":  func(t *Target) { t.Port = 65536 },
		"no ranks":      func(t *Target) { t.Ranks = nil },
		"rank twice":    func(t *Target) { t.Ranks = []kv.Rank{{TP: 1}, {TP: 1}} },
		"rank of no TP": func(t *Target) { t.Ranks = []kv.Rank{{TP: 2}} },
		"negative rank": func(t *Target) { t.Ranks = []kv.Rank{{PP: -1}} },
		"rank of no PP": func(t *Target) { t.PP = 0; t.Ranks = []kv.Rank{{PP: 1}} },
		"many ranks":    func(t *Target) { t.Ranks = make([]kv.Rank, maxRanks+1) },
	} {
		bad := good
		change(&bad)
		t.Run(name, func(t *testing.T) { b.refused(t, bad, PhaseTarget) })
	}
	if n := len(recorded[event.HandshakeStarted](b.events)); n != 0 {
		t.Errorf("%d handshakes were started", n)
	}
}

// Literal IPv6 hosts may come with brackets or without, with a zone or without.
func TestIPv6Hosts(t *testing.T) {
	for host, want := range map[string]string{"::1": "[::1]:7", "[::1]": "[::1]:7", "fe80::1%eth0": "[fe80::1%eth0]:7", "h": "h:7"} {
		tg := Target{Host: host, Port: 7}
		if got := tg.address().String(); got != want {
			t.Errorf("%q is dialled as %q, not %q", host, got, want)
		}
	}
}

// An address by which every host means itself may be why a handshake fails, and then the refusal says so.
func TestOwnHosts(t *testing.T) {
	const says = "is this host itself: if that engine runs on another host, start it with --side-channel HOST:PORT or --advertise-host HOST"
	for addr, own := range map[string]bool{"127.0.0.1:5600": true, "[::1]:5600": true, "localhost:5600": true, "10.0.0.5:5600": false, "p:5600": false} {
		for name, served := range map[string]bool{"nobody": false, "another": true, "ourselves": true} {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, nil)
				defer b.table.Close()
				phase := PhaseDial
				if served {
					id := kv.EngineID("other")
					if name == "ourselves" {
						id = "self"
					}
					l := b.serve(t, addr, id, "i", 1)
					defer l.Close()
					phase = PhaseIdentity
				}
				e := b.refused(t, target("P", addr), phase)
				want := own && name != "ourselves" // which says the same in other words
				if strings.Contains(e.Error(), says) != want {
					t.Errorf("%s at %s: %v", name, addr, e)
				}
				var o *OwnHostError
				if errors.As(e, &o) != want {
					t.Errorf("%s at %s: %T", name, addr, e.Err)
				}
			})
		}
	}
}

// A lost agent takes the whole generation with it; the next request shakes hands anew.
func TestLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		l := b.serve(t, addrP, "P", "i1", 2)
		first := b.connect(t, target("P", addrP, 0, 1))
		b.table.Pin("P", first.Gen)
		b.table.Lost(agent.PeerID{Name: "stranger", Gen: 1}, errors.New("x"))
		b.table.Lost(agent.PeerID{Name: first.Ranks[0].Agent.ID.Name, Gen: 999}, errors.New("x"))
		if b.table.Lookup("P") == nil {
			t.Fatal("a stranger's loss was taken for the peer's")
		}
		b.table.Lost(first.Ranks[1].Agent.ID, errors.New("cut"))
		if b.table.Lookup("P") != nil {
			t.Fatal("still connected")
		}
		b.wantSizes(t, 0, 0)
		b.table.Unpin("P", first.Gen)
		if b.table.Pin("P", first.Gen) {
			t.Error("a generation that is gone was pinned")
		}
		l.Close()
		defer b.serve(t, addrP, "P", "i2", 2).Close() // restarted under the same id
		second := b.connect(t, target("P", addrP, 0, 1))
		if second.Gen == first.Gen {
			t.Error("the engine came back under the same generation")
		}
		b.table.Unpin("P", first.Gen) // of the old one: must not count for the new one
		gone := recorded[event.PeerGone](b.events)
		if len(gone) != 1 || gone[0].Gen != first.Gen || !strings.Contains(gone[0].Reason, "cut") {
			t.Errorf("events %+v", gone)
		}
	})
}

// An agent that is lost before its handshake has ended fails the handshake.
func TestLostDuringHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *bed
		b = newBed(t, func(_ *Config, a *fakeAgent) {
			a.onAdd = func(_ context.Context, _ agent.Name, id agent.PeerID) error {
				if id.Gen == 1 {
					b.table.Lost(id, errors.New("cut"))
				}
				return nil
			}
		})
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 2).Close()
		e := b.refused(t, target("P", addrP, 0, 1), PhaseLost)
		if !strings.Contains(e.Error(), "cut") {
			t.Error(e)
		}
		b.wantSizes(t, 0, 0)
		b.connect(t, target("P", addrP, 0, 1))
	})
}

// When more losses come during a handshake than are remembered, it cannot be trusted.
func TestManyLossesDuringHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *bed
		losses := maxEarlyLosses + 1
		b = newBed(t, func(_ *Config, a *fakeAgent) {
			a.onAdd = func(context.Context, agent.Name, agent.PeerID) error {
				for i := range losses {
					b.table.Lost(agent.PeerID{Name: "stranger", Gen: kv.Generation(i)}, errors.New("cut"))
				}
				return nil
			}
		})
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		b.refused(t, target("P", addrP), PhaseLost)
		b.wantSizes(t, 0, 0)
		losses--
		b.connect(t, target("P", addrP))
	})
}

func TestTooManyWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		b.set(addrP, blackHole)
		ended := 0
		for range maxWaiters {
			b.table.Ensure(target("P", addrP), func(*Connected, error) { ended++ })
		}
		b.refused(t, target("P", addrP), PhaseTarget)
		time.Sleep(DefaultQueryTimeout)
		synctest.Wait()
		if ended != maxWaiters {
			t.Errorf("%d waiters of %d were released", ended, maxWaiters)
		}
	})
}

// An agent that admits a peer although the table was closed meanwhile: the peer is removed again.
func TestAdmittedAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		b := newBed(t, func(_ *Config, a *fakeAgent) {
			a.onAdd = func(context.Context, agent.Name, agent.PeerID) error { <-goOn; return nil }
		})
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		asked := b.ask(target("P", addrP))
		synctest.Wait()
		closed := make(chan struct{})
		go func() { b.table.Close(); close(closed) }()
		synctest.Wait()
		close(goOn)
		<-closed
		if r := <-asked; !errors.Is(r.err, ErrClosed) {
			t.Errorf("got %+v", r)
		}
		b.wantSizes(t, 0, 0)
	})
}

func TestDrop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		c := b.connect(t, target("P", addrP))
		b.table.Drop("P", c.Gen+1, "other")
		if b.table.Lookup("P") != c {
			t.Fatal("another generation's drop was obeyed")
		}
		b.table.Drop("P", c.Gen, "layout differs")
		b.wantSizes(t, 0, 0)
	})
}

// Close ends what is in every state: waiting for a slot, dialling, asking, admitting.
func TestCloseDuringHandshakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(c *Config, a *fakeAgent) {
			a.onAdd = func(ctx context.Context, name agent.Name, _ agent.PeerID) error {
				if strings.HasPrefix(string(name), "P/") {
					<-ctx.Done()
					return ctx.Err()
				}
				return nil
			}
			c.MaxParallel = 3
		})
		end := make(chan struct{})
		defer close(end)
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		defer b.serve(t, addrQ, "Q", "i1", 1).Close()
		b.set("mute:5600", mute(end))
		b.set("hole:5600", blackHole)
		b.connect(t, target("Q", addrQ))
		var all []<-chan result
		for _, host := range []string{"p", "mute", "hole", "hole2", "hole3"} {
			tg := target("P", host+":5600")
			all = append(all, b.ask(tg), b.ask(tg))
		}
		synctest.Wait()
		b.table.Close()
		for _, ch := range all {
			select {
			case r := <-ch:
				if !errors.Is(r.err, ErrClosed) && !strings.Contains(r.err.Error(), "refused") {
					t.Errorf("ended with %v", r.err)
				}
			default:
				t.Error("a waiter is still waiting after Close")
			}
		}
		started := len(recorded[event.HandshakeStarted](b.events))
		if r := <-b.ask(target("P", addrP)); !errors.Is(r.err, ErrClosed) || len(recorded[event.HandshakeStarted](b.events)) != started {
			t.Errorf("after Close: %v", r.err)
		}
		b.wantSizes(t, 0, 0)
		b.table.Close()
	})
}

// An agent that does not admit in parallel is asked for one peer at a time.
func TestSerialAdmission(t *testing.T) {
	for _, parallel := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, func(_ *Config, a *fakeAgent) {
				a.caps.ParallelAdmission = parallel
				a.onAdd = func(context.Context, agent.Name, agent.PeerID) error { time.Sleep(time.Millisecond); return nil }
			})
			defer b.table.Close()
			var all []<-chan result
			for i := range 5 {
				engine := kv.EngineID(fmt.Sprint("E", i))
				addr := fmt.Sprintf("e%d:5600", i)
				defer b.serve(t, addr, engine, "i", 1).Close()
				all = append(all, b.ask(target(engine, addr)))
			}
			for _, ch := range all {
				if r := <-ch; r.err != nil {
					t.Fatal(r.err)
				}
			}
			if most := b.agent.most(); (most > 1) != parallel {
				t.Errorf("parallel admission %v, but %d at once", parallel, most)
			}
		})
	}
}

func TestConfigValidate(t *testing.T) {
	good := Config{Agent: newFakeAgent(), Hash: testHash}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"no agent":         func(c *Config) { c.Agent = nil },
		"no hash":          func(c *Config) { c.Hash = "" },
		"upper case":       func(c *Config) { c.Hash = strings.ToUpper(testHash) },
		"negative timeout": func(c *Config) { c.QueryTimeout = -1 },
		"negative total":   func(c *Config) { c.HandshakeTimeout = -1 },
		"negative slots":   func(c *Config) { c.MaxParallel = -1 },
		"negative peers":   func(c *Config) { c.MaxPeers = -1 },
	} {
		bad := good
		change(&bad)
		if _, err := NewTable(bad); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
