package tier_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/fs"
	"github.com/kvferry/kvferry/tier/p2p"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	blockLen = 4096
	patience = 20 * time.Second
)

// engine uses a Manager as an engine does.
type engine struct {
	t       *testing.T
	m       *tier.Manager
	changed chan struct{}
}

func newEngine(t *testing.T, memory []byte, secondaries ...tier.Secondary) *engine {
	t.Helper()
	return newEngineWith(t, memory, func(*tier.Config) {}, secondaries...)
}

func newEngineWith(t *testing.T, memory []byte, change func(*tier.Config), secondaries ...tier.Secondary) *engine {
	t.Helper()
	e := &engine{t: t, changed: make(chan struct{}, 1)}
	var err error
	cfg := tier.Config{Memory: memory, BlockLen: blockLen, Secondaries: secondaries, OnChange: func() {
		select {
		case e.changed <- struct{}{}:
		default:
		}
	}}
	change(&cfg)
	e.m, err = tier.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.close)
	return e
}

func (e *engine) close() {
	if err := e.m.Close(); err != nil {
		e.t.Error(err)
	}
}

func files(t *testing.T, dir string) *fs.Tier {
	t.Helper()
	f, err := fs.New(fs.Config{Root: dir, Facts: "model", BlockLen: blockLen, Budget: 1 << 24})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func key(i int) core.Key {
	b := bytes.Repeat([]byte{9}, 36)
	binary.BigEndian.PutUint64(b, uint64(i))
	return core.Key(b)
}

func content(k core.Key) []byte {
	var seed [32]byte
	copy(seed[:], k)
	b := make([]byte, blockLen)
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

// compute writes blocks; it reports whether there was room.
func (e *engine) compute(req kv.RequestID, ks ...core.Key) bool {
	e.t.Helper()
	res, ok := e.m.Reserve(req, ks)
	if !ok {
		return false
	}
	for i, at := range res.Index {
		copy(e.m.Block(res.Slots[i]), content(ks[at]))
	}
	if res.ID != 0 {
		e.m.Commit(res.ID, true)
	}
	return true
}

// mustCompute waits for stores to give room.
func (e *engine) mustCompute(req kv.RequestID, ks ...core.Key) {
	e.t.Helper()
	for deadline := time.After(patience); !e.compute(req, ks...); {
		select {
		case <-e.changed:
		case <-deadline:
			e.t.Fatalf("no room: %+v", e.m.Stats())
		}
	}
}

// settle waits until no job is under way.
func (e *engine) settle() {
	e.t.Helper()
	for deadline := time.After(patience); ; {
		if s := e.m.Stats(); s.Loads+s.Stores == 0 {
			return
		}
		select {
		case <-e.changed:
		case <-deadline:
			e.t.Fatalf("jobs do not end: %+v", e.m.Stats())
		}
	}
}

// find looks one key up until it is decided, and checks what is there.
func (e *engine) find(req kv.RequestID, k core.Key) core.Verdict {
	e.t.Helper()
	for deadline := time.After(patience); ; {
		v := e.m.Lookup(req, []core.Key{k})[0]
		if v == core.Hit {
			lease, slots, ok := e.m.Use([]core.Key{k})
			if !ok {
				continue // evicted in between
			}
			if !bytes.Equal(e.m.Block(slots[0]), content(k)) {
				e.t.Fatalf("block %x has other content", string(k))
			}
			e.m.EndUse(lease)
		}
		if v != core.Pending {
			return v
		}
		select {
		case <-e.changed:
		case <-deadline:
			e.t.Fatalf("still pending: %+v", e.m.Stats())
		}
	}
}

func (e *engine) begin(r tier.Request) {
	e.t.Helper()
	if err := e.m.Begin(r); err != nil {
		e.t.Fatal(err)
	}
}

// What memory evicts comes back from the files, also in another process's life.
func TestFilesBehindMemory(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t, make([]byte, 4*blockLen), files(t, dir))
	e.begin(tier.Request{ID: "w"})
	for i := range 20 {
		e.mustCompute("w", key(i))
	}
	e.settle()
	for i := range 20 {
		if v := e.find("w", key(i)); v != core.Hit {
			t.Errorf("block %d: %v", i, v)
		}
	}
	if s := e.m.Stats(); s.Promotions < 16 || s.Evicted < 16 || s.Strays != 0 {
		t.Errorf("%+v", s)
	}
	e.m.Finish("w")
	e.close()
	e = newEngine(t, make([]byte, 2*blockLen), files(t, dir))
	e.begin(tier.Request{ID: "r"})
	if e.find("r", key(7)) != core.Hit || e.find("r", key(99)) != core.Miss {
		t.Error("not found after a restart")
	}
	// A request may not want the files.
	e.begin(tier.Request{ID: "memory only", LoadOnlyFrom: []string{}})
	if e.find("memory only", key(8)) != core.Miss || e.find("memory only", key(7)) != core.Hit {
		t.Error("the filter does not hold")
	}
}

// A mutant of the stored bytes is a miss, never a block.
func TestMutantOfAFileIsAMiss(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t, make([]byte, 2*blockLen), files(t, dir))
	e.begin(tier.Request{ID: "w"})
	e.mustCompute("w", key(1))
	e.settle()
	all, err := filepath.Glob(filepath.Join(dir, "*", "*", "*.kvb"))
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	b, err := os.ReadFile(all[0])
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(all[0], b, 0o600); err != nil {
		t.Fatal(err)
	}
	e.m.Reset()
	if v := e.find("w", key(1)); v != core.Miss {
		t.Errorf("%v", v)
	}
	// The request computes it, and it is kept anew.
	e.mustCompute("w", key(1))
	e.settle()
	e.m.Reset()
	e.begin(tier.Request{ID: "again"})
	if v := e.find("again", key(1)); v != core.Hit {
		t.Errorf("%v", v)
	}
}

type peered struct {
	*engine
	addr *net.TCPAddr
}

// newPeer is an engine with files and peers.
func newPeer(t *testing.T, f *local.Fabric, slots int) *peered {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ag, err := f.Agent(kvName(ln))
	if err != nil {
		t.Fatal(err)
	}
	mem, err := ag.Alloc(slots * blockLen)
	if err != nil {
		t.Fatal(err)
	}
	peers, err := p2p.New(p2p.Config{
		Listener: ln, Name: ln.Addr().String(), Agent: ag, Base: mem.Addr(), Blocks: slots, BlockLen: blockLen,
		HashSeed: p2p.StockHashSeed, Instance: ln.Addr().String(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ag.Close() }) // after the engine
	return &peered{engine: newEngine(t, mem.Bytes(), peers, files(t, t.TempDir())), addr: ln.Addr().(*net.TCPAddr)}
}

func (p *peered) source(id string) *tier.Source {
	return &tier.Source{Host: p.addr.IP.String(), Port: p.addr.Port, KVRequestID: id}
}

// A peer's lookup finds what is on the source's disk only; H11: what it has found already stays pinned
// while memory that is full makes room for the next.
func TestHazardP2P_H11_PeerFindsBlocksOnDisk(t *testing.T) {
	f := local.New(local.Config{})
	a, b := newPeer(t, f, 16), newPeer(t, f, 16) // a peer may hold 4
	a.begin(tier.Request{ID: "w"})
	for i := range 32 { // the first half is on disk only
		a.mustCompute("w", key(i))
	}
	a.settle()
	a.m.Finish("w")
	b.begin(tier.Request{ID: "r", Source: a.source("q")})
	// The oldest in memory first, then one from disk.
	for _, k := range []core.Key{key(16), key(0)} {
		if v := b.find("r", k); v != core.Hit {
			t.Errorf("%x: %v", string(k[:8]), v)
		}
	}
	asked := []core.Key{key(17), key(1), key(18), key(77)}
	got := b.m.Lookup("r", asked)
	for deadline := time.After(patience); ; {
		pending := false
		for _, v := range got {
			pending = pending || v == core.Pending
		}
		if !pending {
			break
		}
		select {
		case <-b.changed:
		case <-deadline:
			t.Fatalf("still %v", got)
		}
		got = b.m.Lookup("r", asked)
	}
	if fmt.Sprint(got) != "[hit hit hit miss]" {
		t.Errorf("%v", got)
	}
	b.m.Finish("r")
	// What came from a peer is a block like any other: it goes to the files when computed anew, and is
	// served to others.
	a.begin(tier.Request{ID: "back", Source: b.source("q")})
	if v := a.find("back", key(0)); v != core.Hit {
		t.Errorf("%v", v)
	}
}

func kvName(ln net.Listener) agent.Name { return agent.Name(ln.Addr().String()) }

// Engines that look up, compute and finish at once, with files and peers behind: contents hold, and
// everything ends.
func TestManyAtOnce(t *testing.T) {
	f := local.New(local.Config{})
	a, b := newPeer(t, f, 32), newPeer(t, f, 32)
	var wg sync.WaitGroup
	for i, pair := range [][2]*peered{{a, b}, {b, a}, {a, b}, {b, a}} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			me, other := pair[0], pair[1]
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for n := range 30 {
				id := kv.RequestID(fmt.Sprint("r", i, "-", n))
				if err := me.m.Begin(tier.Request{ID: id, Source: other.source(string(id))}); err != nil {
					t.Error(err)
					return
				}
				for range 3 {
					k := key(rng.IntN(40))
					if v := me.wait(id, k); v == core.Miss {
						me.compute(id, k)
					}
				}
				me.m.Finish(id)
			}
		}()
	}
	wg.Wait()
	for _, e := range []*peered{a, b} {
		e.settle()
		if s := e.m.Stats(); s.Strays != 0 || s.Requests != 0 || s.Quarantined != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// wait is find for several goroutines: a change may wake another, so it asks again by itself.
func (e *engine) wait(req kv.RequestID, k core.Key) core.Verdict {
	for end := time.Now().Add(patience); time.Now().Before(end); {
		v := e.m.Lookup(req, []core.Key{k})[0]
		if v != core.Pending {
			if lease, slots, ok := e.m.Use([]core.Key{k}); ok {
				if !bytes.Equal(e.m.Block(slots[0]), content(k)) {
					e.t.Errorf("block %x has other content", string(k))
				}
				e.m.EndUse(lease)
			}
			return v
		}
		select {
		case <-e.changed:
		case <-time.After(5 * time.Millisecond):
		}
	}
	e.t.Errorf("%s: still pending", req)
	return core.Miss
}

// countedTier counts the requests that it is told of.
type countedTier struct {
	*fs.Tier
	begun int
}

func (c *countedTier) Begin(r tier.Request) tier.Interest {
	c.begun++
	return c.Tier.Begin(r)
}

// A request that is refused is told to no tier, as none will hear of its end.
func TestRefusedRequestIsNotBegun(t *testing.T) {
	behind := &countedTier{Tier: files(t, t.TempDir())}
	e := newEngine(t, make([]byte, blockLen), behind)
	e.begin(tier.Request{ID: "r"})
	if err := e.m.Begin(tier.Request{ID: "r"}); err == nil || behind.begun != 1 {
		t.Errorf("a second r: %v; its tier was told of %d", err, behind.begun)
	}
}

type brokenTier struct{ *fs.Tier }

func (brokenTier) Name() string          { return "broken" }
func (brokenTier) Start(tier.Host) error { return errors.New("does not start") }

func TestNewClosesWhatItStarted(t *testing.T) {
	dir := t.TempDir()
	_, err := tier.New(tier.Config{Memory: make([]byte, blockLen), BlockLen: blockLen,
		Secondaries: []tier.Secondary{files(t, dir), brokenTier{files(t, dir)}}})
	if err == nil || !strings.Contains(err.Error(), "start tier broken: does not start") {
		t.Fatal(err)
	}
	newEngine(t, make([]byte, blockLen), files(t, dir)) // the folder is free again
}

func TestAfterClose(t *testing.T) {
	e := newEngine(t, make([]byte, blockLen), files(t, t.TempDir()))
	e.begin(tier.Request{ID: "r"})
	e.close()
	e.close()
	if err := e.m.Begin(tier.Request{ID: "s"}); !errors.Is(err, tier.ErrClosed) {
		t.Error(err)
	}
	if v := e.m.Lookup("r", []core.Key{key(1)}); v[0] != core.Miss {
		t.Error(v)
	}
	if _, ok := e.m.Reserve("r", []core.Key{key(1)}); ok {
		t.Error("reserved")
	}
}

func TestConfigRefused(t *testing.T) {
	for name, c := range map[string]tier.Config{
		"no memory": {BlockLen: blockLen},
		"no length": {Memory: make([]byte, 10)},
		"two of one name": {Memory: make([]byte, blockLen), BlockLen: blockLen,
			Secondaries: []tier.Secondary{files(t, "a"), files(t, "b")}},
	} {
		if _, err := tier.New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
