package engine

import (
	"context"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/p2p"
	"github.com/kvferry/kvferry/wire"
)

// withTier gives an engine a CPU tier of 64 blocks.
func withTier(secondaries ...string) func(*Config) {
	return func(c *Config) {
		c.Tier.Memory = 64 * int64(model.CacheBytes(tiny().Config(), 16, 1))
		c.Tier.Secondaries = secondaries
	}
}

// source names an engine to a request.
func source(t testing.TB, e *Engine, id string) *wire.P2PRemote {
	t.Helper()
	host, port, err := net.SplitHostPort(e.Coordinates().P2PAddress)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return &wire.P2PRemote{ID: id, Host: host, Port: n}
}

// tierSettled waits until nothing of the CPU tier is under way, and checks that it holds nothing.
func tierSettled(t testing.TB, e *Engine) {
	t.Helper()
	settle(t, e)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		s, ok := e.TierStats()
		if !ok {
			t.Fatal("no tier")
		}
		m := s.Memory
		if m.Loads+m.Stores+m.Leases+m.Requests+m.Pinned+m.Writing+m.Quarantined+m.PeerPins == 0 && e.Stats().TierCopies == 0 {
			if m.Free+m.Ready != m.Slots || m.Strays != 0 {
				t.Fatalf("not all slots are accounted for: %+v", m)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it stays so: %+v", m)
		}
	}
}

// run generates and compares with the model alone.
func (x tierCheck) run(t testing.TB, e *Engine) answer {
	t.Helper()
	a := generate(t, e, Request{ID: kv.RequestID(x.id), Prompt: x.prompt, MaxTokens: x.max, Tier: x.tier, CacheSalt: x.salt})
	checkAnswer(t, x.id, a, expect(t, x.prompt, x.max, model.Sampling{}))
	return a
}

type tierCheck struct {
	id     string
	prompt []kv.Token
	max    int
	tier   wire.P2PParams
	salt   string
}

// What the KV cache has evicted comes back out of the CPU's memory.
func TestTierAfterEviction(t *testing.T) {
	e := newEngine(t, func(c *Config) { withTier()(c); c.NumBlocks = 12 })
	p := prompt(100, 1)
	tierCheck{id: "first", prompt: p, max: 4}.run(t, e)
	tierSettled(t, e)
	for i := range 3 {
		tierCheck{id: "other" + strconv.Itoa(i), prompt: prompt(90, 10+i), max: 2}.run(t, e)
		tierSettled(t, e)
	}
	a := tierCheck{id: "again", prompt: p, max: 4}.run(t, e)
	if u := a.Usage; u.Tier == 0 || u.Tier+u.Cached != 96 || u.ComputedPrompt != 4 || a.TierTokens["cpu"] != u.Tier {
		t.Errorf("%+v from %v", u, a.TierTokens)
	}
	tierSettled(t, e)
}

// The second engine answers a prompt that the first has seen and computes the tail only.
func TestTierFromPeer(t *testing.T) {
	x, y := newEngine(t, withTier(TierP2P)), newEngine(t, withTier(TierP2P))
	p := prompt(100, 1)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	tierSettled(t, x)
	a := tierCheck{id: "b", prompt: p, max: 4, tier: wire.P2PParams{Source: source(t, x, "tx")}}.run(t, y)
	if u := a.Usage; u.Tier != 96 || u.ComputedPrompt != 4 || a.TierTokens["p2p"] != 96 {
		t.Errorf("%+v from %v", u, a.TierTokens)
	}
	tierSettled(t, x)
	tierSettled(t, y)
}

// A new engine finds what an earlier one has left in files.
func TestTierFilesOutliveEngine(t *testing.T) {
	dir := t.TempDir()
	with := func(c *Config) { withTier(TierFS)(c); c.Tier.FSDir = dir }
	p := prompt(100, 1)
	x := newEngine(t, with)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	if err := x.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	y := newEngine(t, with)
	a := tierCheck{id: "b", prompt: p, max: 4}.run(t, y)
	if u := a.Usage; u.Tier != 96 || u.ComputedPrompt != 4 || a.TierTokens["fs"] != 96 {
		t.Errorf("%+v from %v", u, a.TierTokens)
	}
	tierSettled(t, y)
}

// A decoder fetches what a prefiller is just computing, whichever is asked first.
func TestTierPrefillerAndDecoder(t *testing.T) {
	x, y := newEngine(t, withTier(TierP2P)), newEngine(t, withTier(TierP2P))
	for i, warm := range []bool{false, true} {
		p, id := prompt(100, 20+i), "pd"+strconv.Itoa(i)
		if warm { // the prefiller has the blocks already, in the KV cache and in the tier
			tierCheck{id: "warm", prompt: p, max: 4}.run(t, x)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			tierCheck{id: id + "-p", prompt: p, max: 1, tier: wire.P2PParams{Decoder: id}}.run(t, x)
		})
		wg.Go(func() {
			a := tierCheck{id: id + "-d", prompt: p, max: 4, tier: wire.P2PParams{Prefiller: source(t, x, id)}}.run(t, y)
			if u := a.Usage; u.Tier != 96 || u.ComputedPrompt != 4 {
				t.Errorf("%s: %+v", id, u)
			}
		})
		wg.Wait()
	}
	tierSettled(t, x)
	tierSettled(t, y)
}

// tripwire lets something happen when an engine writes to its peers for the nth time.
type tripwire struct {
	left atomic.Int64
	do   func()
}

func (w *tripwire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &trippedConn{c, w}, nil
}

type trippedConn struct {
	net.Conn
	w *tripwire
}

func (c *trippedConn) Write(b []byte) (int, error) {
	if c.w.left.Add(-1) == 0 {
		c.w.do()
	}
	return c.Conn.Write(b)
}

// writesOfFetch is more writes than a consumer makes for its greeting, connect, ack, lookup and fetch.
const writesOfFetch = 6

// A source that dies in any phase costs a computation, and nothing else.
func TestTierSourceDies(t *testing.T) {
	p := prompt(36, 30)
	for n := 1; n <= writesOfFetch; n++ {
		x := newEngine(t, withTier(TierP2P))
		tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
		w := &tripwire{do: func() { closeNow(t, x) }}
		w.left.Store(int64(n))
		y := newEngine(t, func(c *Config) {
			withTier(TierP2P)(c)
			c.Tier.p2p = func(c *p2p.Config) {
				c.Dial = w.dial
				c.Session.HandshakeTimeout, c.Session.LookupTimeout, c.Session.LoadTimeout = 2*time.Second, 2*time.Second, 2*time.Second
			}
		})
		a := tierCheck{id: "b", prompt: p, max: 4, tier: wire.P2PParams{Source: source(t, x, "tx")}}.run(t, y)
		if u := a.Usage; u.Tier+u.ComputedPrompt != 36 || u.Tier != 0 && u.Tier != 32 {
			t.Errorf("write %d: %+v", n, u)
		}
		tierSettled(t, y)
	}
}

// A client that leaves in any phase leaves nothing behind.
func TestTierClientLeaves(t *testing.T) {
	p := prompt(36, 30)
	x := newEngine(t, withTier(TierP2P))
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	for n := 1; n <= writesOfFetch; n++ {
		ctx, cancel := context.WithCancel(t.Context())
		w := &tripwire{do: cancel}
		w.left.Store(int64(n))
		y := newEngine(t, func(c *Config) {
			withTier(TierP2P)(c)
			c.Tier.p2p = func(c *p2p.Config) { c.Dial = w.dial }
		})
		id := "tx" + strconv.Itoa(n)
		s, err := y.Submit(ctx, Request{ID: "b", Prompt: p, MaxTokens: 4, Tier: wire.P2PParams{Source: source(t, x, id)}})
		if err != nil {
			t.Fatal(err)
		}
		read(t, s)
		cancel()
		tierSettled(t, y)
		tierCheck{id: "c", prompt: p, max: 4, tier: wire.P2PParams{Source: source(t, x, id+"again")}}.run(t, y)
		tierSettled(t, y)
		tierSettled(t, x)
	}
}

// Engines whose blocks are not alike exchange none, and find that out when they connect.
func TestTierOtherFacts(t *testing.T) {
	x := newEngine(t, withTier(TierP2P))
	p := prompt(100, 1)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	for name, change := range map[string]func(*Config){
		"hash seed":    func(c *Config) { c.Tier.HashSeed = "other" },
		"model name":   func(c *Config) { c.ServedName = "other" },
		"block size":   func(c *Config) { c.BlockSize = 8 },
		"block layout": func(c *Config) { c.Layout = model.LBNHC },
		"form of keys": func(c *Config) { c.Keys = model.RotatedKeys },
	} {
		t.Run(name, func(t *testing.T) {
			y := newEngine(t, func(c *Config) { withTier(TierP2P)(c); change(c) })
			a := tierCheck{id: "b", prompt: p, max: 4, tier: wire.P2PParams{Source: source(t, x, name)}}.run(t, y)
			if u := a.Usage; u.Tier != 0 || u.ComputedPrompt != 100 {
				t.Errorf("%+v", u)
			}
			if s := y.Stats(); s.TierTimeouts != 0 {
				t.Error("it was not refused, but timed out")
			}
			tierSettled(t, y)
		})
	}
	tierSettled(t, x)
}

// A source that accepts and says nothing delays its request by the bound of the engine, no other, and
// not the step loop.
func TestTierMuteSource(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	mute := &wire.P2PRemote{ID: "x", Host: "127.0.0.1", Port: ln.Addr().(*net.TCPAddr).Port}
	e := newEngine(t, func(c *Config) { withTier(TierP2P)(c); c.Tier.Timeout = time.Second })
	s := submit1(t, e, Request{ID: "late", Prompt: prompt(100, 33), MaxTokens: 3, Tier: wire.P2PParams{Source: mute}})
	eventually(t, e, func(s Stats) bool { return s.TierLooking == 1 })
	for i := range 3 {
		tierCheck{id: "other" + strconv.Itoa(i), prompt: prompt(40, 40+i), max: 4}.run(t, e)
	}
	checkAnswer(t, "late", read(t, s), expect(t, prompt(100, 33), 3, model.Sampling{}))
	if s := e.Stats(); s.TierTimeouts != 1 || s.TierLooking != 0 {
		t.Errorf("%+v", s)
	}
	tierSettled(t, e)
}

// The bounds that a request names, and salts, are kept.
func TestTierBounds(t *testing.T) {
	dir := t.TempDir()
	files := func(c *Config) { withTier(TierFS)(c); c.Tier.FSDir = dir; c.NoPrefixCache = true }
	p := prompt(100, 1)
	x := newEngine(t, files)
	most := 70
	tierCheck{id: "store", prompt: p, max: 4, tier: wire.P2PParams{MaxOffload: &most}}.run(t, x)
	tierSettled(t, x)
	few, none := 33, 0
	for name, c := range map[string]struct {
		tier wire.P2PParams
		salt string
		want int
	}{
		"no bound":    {want: 64},
		"max load":    {tier: wire.P2PParams{MaxLoad: &few}, want: 32},
		"no load":     {tier: wire.P2PParams{MaxLoad: &none}},
		"other salt":  {salt: "s"},
		"only memory": {tier: wire.P2PParams{LoadTiers: []wire.TierMatch{}}, want: 64},
	} {
		c.tier.MaxOffload = &none
		a := tierCheck{id: name, prompt: p, max: 4, tier: c.tier, salt: c.salt}.run(t, x)
		if a.Usage.Tier != c.want {
			t.Errorf("%s: %+v", name, a.Usage)
		}
	}
	if err := x.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	y := newEngine(t, files)
	for _, c := range []struct {
		id    string
		tiers []wire.TierMatch
		want  int
	}{
		{"no tier", []wire.TierMatch{}, 0}, {"remote storage", []wire.TierMatch{{Locality: "REMOTE"}}, 0},
		{"cpu", []wire.TierMatch{{Medium: "CPU"}}, 0}, {"local", []wire.TierMatch{{Locality: "LOCAL"}}, 64},
	} {
		a := tierCheck{id: c.id, prompt: p, max: 4, tier: wire.P2PParams{LoadTiers: c.tiers, MaxOffload: &none}}.run(t, y)
		if a.Usage.Tier != c.want {
			t.Errorf("%s: %+v", c.id, a.Usage)
		}
	}
	tierSettled(t, y)
}

// A reset of the prefix cache forgets the CPU's memory, too.
func TestTierReset(t *testing.T) {
	e := newEngine(t, withTier())
	p := prompt(100, 1)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, e)
	if _, err := e.ResetPrefixCache(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	a := tierCheck{id: "b", prompt: p, max: 4}.run(t, e)
	if a.Usage.Tier != 0 || a.Usage.ComputedPrompt != 100 {
		t.Errorf("%+v", a.Usage)
	}
	tierSettled(t, e)
}

// A damaged file is a miss.
func TestTierDamagedFile(t *testing.T) {
	dir := t.TempDir()
	with := func(c *Config) { withTier(TierFS)(c); c.Tier.FSDir = dir }
	p := prompt(100, 1)
	x := newEngine(t, with)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	if err := x.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	damaged := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".kvb" {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		b[len(b)-1] ^= 1
		damaged++
		return os.WriteFile(path, b, 0o600)
	})
	if err != nil || damaged != 6 {
		t.Fatalf("%d files, %v", damaged, err)
	}
	y := newEngine(t, with)
	a := tierCheck{id: "b", prompt: p, max: 4}.run(t, y)
	if a.Usage.Tier != 0 || a.Usage.ComputedPrompt != 100 {
		t.Errorf("%+v", a.Usage)
	}
	tierSettled(t, y)
	if s, _ := y.TierStats(); s.Files.Dropped != 6 || s.Recovered.Blocks != 6 {
		t.Errorf("%+v, found %+v", s.Files, s.Recovered)
	}
}

// Many requests that share prefixes, and have room for few, get the tokens that each would have alone.
func TestTierCrowd(t *testing.T) {
	e := newEngine(t, func(c *Config) {
		withTier(TierFS)(c)
		c.Tier.FSDir, c.Tier.Memory, c.NumBlocks, c.MaxRunning = t.TempDir(), c.Tier.Memory/4, 12, 3
	})
	var wg sync.WaitGroup
	for worker := range 3 {
		wg.Go(func() {
			for i := range 5 {
				p := prompt(60, 50+(2*worker+i)%5)
				tierCheck{id: strconv.Itoa(worker) + "-" + strconv.Itoa(i), prompt: p, max: 3}.run(t, e)
			}
		})
	}
	wg.Wait()
	tierSettled(t, e)
	for i := range 5 { // more than the prefix cache keeps
		tierCheck{id: "again-" + strconv.Itoa(i), prompt: prompt(60, 50+i), max: 3}.run(t, e)
	}
	tierSettled(t, e)
	if s := e.Stats(); s.TierTokens == 0 {
		t.Errorf("nothing came from the tier: %+v", s)
	}
}

// Damaged blocks are found by their checksums, in the CPU's memory and at a peer, and computed anew.
func TestTierDamagedBlocks(t *testing.T) {
	damage := func(c *Config) {
		withTier(TierP2P)(c)
		c.NoPrefixCache = true
		c.Tier.InjectFault = tier.Faults
	}
	x, y := newEngine(t, damage), newEngine(t, withTier(TierP2P))
	p := prompt(100, 1)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	tierSettled(t, x)
	far := tierCheck{id: "b", prompt: p, max: 4, tier: wire.P2PParams{Source: source(t, x, "tx")}}.run(t, y)
	near := tierCheck{id: "c", prompt: p, max: 4}.run(t, x)
	if far.Usage.Tier != 0 || near.Usage.Tier != 0 || near.Usage.ComputedPrompt != 100 {
		t.Errorf("at a peer %+v, here %+v", far.Usage, near.Usage)
	}
	if s, _ := y.TierStats(); s.Peers.Total.BlocksDamaged == 0 {
		t.Errorf("nobody has found them: %+v", s.Peers.Total)
	}
	tierSettled(t, x)
	tierSettled(t, y)
}

// A source serves a peer that it has never seen, and then the same again, while its model is in a step that does not end.
func TestTierSourceInAStep(t *testing.T) {
	entered, hold, held := make(chan struct{}), make(chan struct{}), new(atomic.Bool)
	x := newEngine(t, func(c *Config) {
		withTier(TierP2P)(c)
		c.onStep = func() {
			if held.CompareAndSwap(true, false) {
				close(entered)
				<-hold
			}
		}
	})
	y := newEngine(t, withTier(TierP2P))
	p := prompt(200, 1)
	tierCheck{id: "seen", prompt: p, max: 1}.run(t, x)
	tierSettled(t, x)

	held.Store(true)
	long := submit1(t, x, Request{ID: "long", Prompt: prompt(50, 2), MaxTokens: 1})
	<-entered
	for _, id := range []string{"cold", "warm"} {
		if _, err := y.ResetPrefixCache(t.Context(), true); err != nil {
			t.Error(err)
		}
		a := tierCheck{id: id, prompt: p, max: 1, tier: wire.P2PParams{Source: source(t, x, id)}}.run(t, y)
		if a.Usage.Tier != 192 {
			t.Errorf("%s: %d tokens came, want 192", id, a.Usage.Tier)
		}
		tierSettled(t, y)
	}
	close(hold)
	if a := read(t, long); a.Err != nil {
		t.Error(a.Err)
	}
	tierSettled(t, x)
}

// An engine whose tier has nothing to do sleeps.
func TestTierIdle(t *testing.T) {
	x, y := newEngine(t, withTier(TierP2P)), newEngine(t, withTier(TierP2P))
	p := prompt(100, 1)
	tierCheck{id: "a", prompt: p, max: 4}.run(t, x)
	tierCheck{id: "b", prompt: p, max: 1, tier: wire.P2PParams{Source: source(t, x, "tx")}}.run(t, y)
	tierSettled(t, x)
	tierSettled(t, y)
	before := y.Stats().Wakeups
	time.Sleep(300 * time.Millisecond)
	if n := y.Stats().Wakeups - before; n > 2 { // the two questions
		t.Errorf("the loop woke %d times for nothing", n)
	}
}
