package store

import (
	"bytes"
	"context"
	"encoding/binary"
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
	"github.com/kvferry/kvferry/tier/p2p"
	"github.com/kvferry/kvferry/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	blockLen = 4096
	patience = 20 * time.Second
)

// rack is a network with a store on it.
type rack struct {
	t      *testing.T
	fabric *local.Fabric
	store  *Store
	name   string
	agents int

	mu struct {
		sync.Mutex
		notes []Note
	}
}

func newRack(t *testing.T) *rack {
	return &rack{t: t, fabric: local.New(local.Config{})}
}

// open starts the store anew.
func (r *rack) open(change func(*Config)) {
	r.t.Helper()
	if err := r.tryOpen(change); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(r.close)
}

func (r *rack) tryOpen(change func(*Config)) error {
	r.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.name = ln.Addr().String()
	cfg := Config{
		Listener: ln, Name: r.name, Size: 64 * blockLen, Instance: "store-" + r.name,
		Agent: func(n int) (agent.Agent, error) {
			r.mu.Lock()
			r.agents++
			name := fmt.Sprintf("store-%d-%d", n, r.agents)
			r.mu.Unlock()
			return r.fabric.Agent(agent.Name(name))
		},
		OnNote: func(n Note) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.mu.notes = append(r.mu.notes, n)
		},
	}
	if change != nil {
		change(&cfg)
	}
	s, err := New(cfg)
	if err == nil {
		r.store = s
	}
	return err
}

func (r *rack) close() {
	if err := r.store.Close(); err != nil {
		r.t.Error(err)
	}
}

// noted is the notes of one kind.
func (r *rack) noted(what string) (out []Note) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.mu.notes {
		if n.What == what {
			out = append(out, n)
		}
	}
	return out
}

// await waits for something that no event of this test's tells.
func (r *rack) await(what string, done func() bool) {
	r.t.Helper()
	deadline := time.Now().Add(patience)
	for !done() {
		if time.Now().After(deadline) {
			r.t.Fatalf("no %s: %+v", what, r.store.Stats())
		}
		time.Sleep(time.Millisecond)
	}
}

// engine is a CPU tier with a store.
type engine struct {
	r       *rack
	peers   *p2p.Tier
	m       *tier.Manager
	agent   agent.Agent
	changed chan struct{}
	closed  bool
}

func (r *rack) engine(facts string) *engine {
	r.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	e := &engine{r: r, changed: make(chan struct{}, 1)}
	if e.agent, err = r.fabric.Agent(agent.Name(ln.Addr().String())); err != nil {
		r.t.Fatal(err)
	}
	const slots = 128
	mem, err := e.agent.Alloc(slots * blockLen)
	if err != nil {
		r.t.Fatal(err)
	}
	e.peers, err = p2p.New(p2p.Config{
		Listener: ln, Name: ln.Addr().String(), Agent: e.agent, Base: mem.Addr(), Blocks: slots, BlockLen: blockLen,
		Fingerprint: facts, HashSeed: p2p.StockHashSeed, Instance: "i" + ln.Addr().String(), Store: r.name,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	e.m, err = tier.New(tier.Config{Memory: mem.Bytes(), BlockLen: blockLen, Secondaries: []tier.Secondary{e.peers},
		OnChange: func() {
			select {
			case e.changed <- struct{}{}:
			default:
			}
		}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(e.close)
	return e
}

// connected waits until the store can be asked.
func (e *engine) connected() *engine {
	e.r.t.Helper()
	e.r.await("session with the store", func() bool {
		if !e.peers.StoreUp() { // a request makes it dial again
			_ = e.m.Begin(tier.Request{ID: "knock"})
			e.m.Finish("knock")
		}
		return e.peers.StoreUp()
	})
	return e
}

func (e *engine) close() {
	if e.closed {
		return
	}
	e.closed = true
	if err := e.m.Close(); err != nil {
		e.r.t.Error(err)
	}
	if err := e.agent.Close(); err != nil {
		e.r.t.Error(err)
	}
}

func key(i int) core.Key {
	b := bytes.Repeat([]byte{7}, 36)
	binary.BigEndian.PutUint64(b, uint64(i))
	return core.Key(b)
}

func keys(from, to int) (out []core.Key) {
	for i := from; i < to; i++ {
		out = append(out, key(i))
	}
	return out
}

func content(k core.Key) []byte {
	var seed [32]byte
	copy(seed[:], k)
	b := make([]byte, blockLen)
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

func (e *engine) compute(ks []core.Key) {
	e.r.t.Helper()
	if err := e.m.Begin(tier.Request{ID: "compute"}); err != nil {
		e.r.t.Fatal(err)
	}
	res, ok := e.m.Reserve("compute", ks)
	if !ok {
		e.r.t.Fatal("no room")
	}
	for i, at := range res.Index {
		copy(e.m.Block(res.Slots[i]), content(ks[at]))
	}
	e.m.Commit(res.ID, true)
	e.m.Finish("compute")
}

// expect looks up, compares the verdicts, and reads what is there.
func (e *engine) expect(req string, ks []core.Key, want string) {
	t := e.r.t
	t.Helper()
	id := kv.RequestID(req)
	if err := e.m.Begin(tier.Request{ID: id}); err != nil {
		t.Fatal(err)
	}
	defer e.m.Finish(id)
	deadline := time.After(patience)
	for {
		got := ""
		for _, v := range e.m.Lookup(id, ks) {
			got += map[core.Verdict]string{core.Hit: "+", core.Miss: "-", core.Pending: "?"}[v]
		}
		if !strings.Contains(got, "?") {
			if got != want {
				t.Fatalf("%s: %s, want %s", req, got, want)
			}
			break
		}
		select {
		case <-e.changed:
		case <-deadline:
			t.Fatalf("%s: still %s", req, got)
		}
	}
	for i, k := range ks {
		if want[i] != '+' {
			continue
		}
		lease, slots, ok := e.m.Use([]core.Key{k})
		if !ok || !bytes.Equal(e.m.Block(slots[0]), content(k)) {
			t.Fatalf("%s: block %d is not what was computed", req, i)
		}
		e.m.EndUse(lease)
	}
}

// has waits until the store's only namespace holds n blocks, with nothing under way.
func (r *rack) has(n int) {
	r.t.Helper()
	r.await(fmt.Sprintf("%d blocks in the store", n), func() bool {
		s := r.store.Stats().Namespaces
		if len(s) != 1 || s[0].Ready != n || s[0].Loads+s[0].Stores+s[0].Intake.Waiting+s[0].Intake.Batches > 0 {
			return false
		}
		return s[0].Files == nil || s[0].Files.Blocks >= n
	})
}

// files is how many blocks the namespace of a model has in files; -1 while there is none.
func (r *rack) files(fingerprint string) int {
	for _, n := range r.store.Stats().Namespaces {
		if n.Facts.Fingerprint == fingerprint && n.Files != nil {
			return n.Files.Blocks
		}
	}
	return -1
}

func (r *rack) drain() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r.store.Drain(ctx)
	if ctx.Err() != nil {
		r.t.Fatalf("the drain does not end: %+v", r.store.Stats())
	}
}

// What one engine has computed another gets, when the first is gone; with files also when the store
// has been started anew, and what memory has no room for.
func TestRack(t *testing.T) {
	r := newRack(t)
	dir := filepath.Join(t.TempDir(), "blocks")
	files := func(c *Config) { c.Folder, c.FolderSize = dir, 1<<20 }
	r.open(files)
	a := r.engine("m").connected()
	a.compute(keys(0, 40))
	r.has(40)
	a.compute(keys(40, 80)) // memory has 64
	r.has(64)
	r.await("files", func() bool { return r.files("m") == 80 })
	a.close()
	b := r.engine("m").connected()
	b.expect("r", keys(0, 30), strings.Repeat("+", 30))
	b.close()
	r.drain()
	r.close()
	r.open(files)
	if s := r.store.Stats().Namespaces; len(s) != 1 || !s[0].Open || s[0].Files.Blocks != 80 {
		t.Fatalf("after a restart: %+v", s)
	}
	c := r.engine("m").connected()
	c.expect("r", keys(60, 82), strings.Repeat("+", 20)+"--")
}

// A damaged file is told and becomes a miss.
func TestDamagedFile(t *testing.T) {
	r := newRack(t)
	dir := t.TempDir()
	files := func(c *Config) { c.Folder, c.FolderSize = dir, 1<<20 }
	r.open(files)
	r.engine("m").connected().compute(keys(0, 2))
	r.has(2)
	r.drain()
	r.close()
	var all []string
	_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error {
		if strings.HasSuffix(path, ".kvb") {
			all = append(all, path)
		}
		return nil
	})
	if len(all) != 2 {
		t.Fatalf("files: %v", all)
	}
	b, err := os.ReadFile(all[0])
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := os.WriteFile(all[0], b, 0o600); err != nil {
		t.Fatal(err)
	}
	r.open(files)
	e := r.engine("m").connected()
	e.expect("r", keys(0, 2), map[bool]string{true: "-+", false: "+-"}[strings.Contains(all[0], fmt.Sprintf("%x", string(key(0))))])
	if n := r.noted("block_dropped"); len(n) != 1 || !strings.Contains(n[0].Text, filepath.Base(all[0])) || !n[0].Bad {
		t.Errorf("told: %+v", n)
	}
}

// Engines of another model have a namespace of their own as long as there is a place.
func TestNamespaces(t *testing.T) {
	r := newRack(t)
	dir := t.TempDir()
	change := func(c *Config) { c.Namespaces, c.Folder, c.FolderSize, c.Unused = 2, dir, 1<<20, 50*time.Millisecond }
	r.open(change)
	one, two := r.engine("one").connected(), r.engine("two").connected()
	one.compute(keys(0, 3))
	two.compute(keys(3, 6))
	r.await("blocks", func() bool {
		return r.files("one") == 3 && r.files("two") == 3
	})
	again := r.engine("one").connected()
	again.expect("r", keys(0, 6), "+++---") // nothing of the other's
	third := r.engine("three")
	r.await("refusal", func() bool { return len(r.noted("peer_refused")) > 0 })
	if third.peers.StoreUp() {
		t.Fatal("a third has a place")
	}
	two.close()
	third.close()
	one.close()
	again.close()
	last := r.engine("one").connected()
	last.compute(keys(6, 7))
	r.await("blocks", func() bool { return r.files("one") == 4 })
	last.close()
	r.drain()
	r.close()
	// With too few places it does not start, names all that is there, and deletes nothing.
	fewer := func(c *Config) { change(c); c.Namespaces = 1 }
	err := r.tryOpen(fewer)
	if err == nil {
		t.Fatal("it starts with fewer namespaces than the folder has")
	}
	facts := func(name string) Facts {
		return Facts{Fingerprint: name, HashSeed: p2p.StockHashSeed, BlockLen: blockLen}
	}
	said, one1, two1 := err.Error(), filepath.Join(dir, facts("one").ID()), filepath.Join(dir, facts("two").ID())
	for _, want := range []string{"of 2 models", "--namespaces", facts("one").String(), facts("two").String(), one1, two1} {
		if !strings.Contains(said, want) {
			t.Errorf("it says %q, without %q", said, want)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("folders: %v", entries)
	}
	if err := os.RemoveAll(two1); err != nil {
		t.Fatal(err)
	}
	r.open(fewer)
	if s := r.store.Stats().Namespaces; len(s) != 1 || s[0].Files.Blocks != 4 {
		t.Errorf("after a restart: %+v", s)
	}
}

// A newcomer with other facts is refused as long as there is a block, in memory or only in files, however long
// nobody has used them. The refusal names both facts and what to do.
func TestNewcomerCostsNoBlock(t *testing.T) {
	for _, folder := range []string{"", t.TempDir()} {
		r := newRack(t)
		change := func(c *Config) { c.Folder, c.FolderSize, c.Unused = folder, 1<<20, time.Nanosecond }
		r.open(change)
		a := r.engine("mine").connected()
		a.compute(keys(0, 3))
		r.has(3)
		a.close()
		if folder != "" { // its memory is empty, and nobody has come yet
			r.drain()
			r.close()
			r.open(change)
		}
		r.await("no peer", func() bool { return r.store.Stats().Namespaces[0].Peers == 0 })
		before := len(r.noted("peer_refused")) // the last words of the first one may have met a store that ended
		b := r.engine("other")
		r.await("refusal", func() bool { return len(r.noted("peer_refused")) > before })
		told := r.noted("peer_refused")[before]
		mine := Facts{Fingerprint: "mine", HashSeed: p2p.StockHashSeed, BlockLen: blockLen}
		other := Facts{Fingerprint: "other", HashSeed: p2p.StockHashSeed, BlockLen: blockLen}
		for _, want := range []string{mine.String(), other.String(), mine.ID(), "it holds blocks", "--namespaces", folder} {
			if !strings.Contains(told.Text, want) {
				t.Errorf("told %q, without %q", told.Text, want)
			}
		}
		if b.peers.StoreUp() || !told.Bad {
			t.Errorf("the newcomer is taken: %+v", told)
		}
		if n := len(r.noted("namespace_replaced")) + len(r.noted("namespace_removed")); n > 0 {
			t.Errorf("told: %+v", r.mu.notes)
		}
		b.close()
		r.engine("mine").connected().expect("r", keys(0, 4), "+++-")
		r.close()
	}
}

// A namespace that never held a block, as that of an engine that was set up wrongly, gives way to the right one.
func TestEmptyNamespaceGivesWay(t *testing.T) {
	r := newRack(t)
	dir := t.TempDir()
	r.open(func(c *Config) { c.Folder, c.FolderSize, c.Unused = dir, 1<<20, time.Nanosecond })
	wrong := r.engine("wrong").connected()
	right := r.engine("right")
	r.await("refusal", func() bool { return len(r.noted("peer_refused")) > 0 })
	if n := r.noted("peer_refused")[0]; !strings.Contains(n.Text, "(in use)") {
		t.Errorf("told: %+v", n)
	}
	wrong.close()
	right.connected().compute(keys(0, 2))
	r.has(2)
	if len(r.noted("namespace_replaced")) != 1 || r.files("right") != 2 {
		t.Errorf("told: %+v", r.mu.notes)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("folders: %v", entries)
	}
}

// Who is no kvferry engine, or cannot be told from others, gets no namespace.
func TestFactsOf(t *testing.T) {
	ext := &wire.Extension{Version: 1, Instance: "i"}
	for want, c := range map[string]wire.P2PConnect{
		"":                {Fingerprint: "f", HashSeed: "s", BlockLen: 10, Extension: ext},
		"no kvferry node": {Fingerprint: "f", HashSeed: "s", BlockLen: 10},
		"no fingerprint":  {HashSeed: "s", BlockLen: 10, Extension: ext},
		"its blocks have": {Fingerprint: "f", HashSeed: "s", BlockLen: 1 << 40, Extension: ext},
	} {
		f, why := factsOf(&c)
		if (why == "") != (want == "") || !strings.Contains(why, want) {
			t.Errorf("%q: %+v %q", want, f, why)
		}
	}
	seen := map[string]Facts{}
	for _, f := range []Facts{{"a", "b", 1}, {"a", "b", 2}, {"a", "c", 1}, {"b", "b", 1}, {`a" "b`, "", 1}, {"a", `" "b`, 1}} {
		if other, ok := seen[f.ID()]; ok {
			t.Errorf("%v and %v have one name", f, other)
		}
		seen[f.ID()] = f
	}
}

// A block that is larger than a namespace is refused; so is a folder that another store has.
func TestTooLittle(t *testing.T) {
	r := newRack(t)
	dir := t.TempDir()
	r.open(func(c *Config) { c.Size, c.Folder, c.FolderSize = blockLen-1, dir, 1<<20 })
	r.engine("m")
	r.await("refusal", func() bool { return len(r.noted("peer_refused")) > 0 })
	if n := r.noted("peer_refused")[0]; !strings.Contains(n.Text, "have 4096 bytes each, a namespace of the store 4095 bytes") || !strings.Contains(n.Text, "--size") || !strings.Contains(n.Text, "--namespaces") {
		t.Errorf("told: %+v", n)
	}
	for _, c := range []Config{
		{}, {Listener: nopListener{}, Name: "a:1", Instance: "i", Agent: func(int) (agent.Agent, error) { return nil, nil }},
	} {
		if c.Validate() == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}

type nopListener struct{ net.Listener }

// After a drain nothing that was on its way is missing, and nothing more is taken.
func TestDrain(t *testing.T) {
	r := newRack(t)
	r.open(func(c *Config) { c.Folder, c.FolderSize = t.TempDir(), 1<<20 })
	a := r.engine("m").connected()
	a.compute(keys(0, 30))
	r.await("a fetch", func() bool {
		s := r.store.Stats().Namespaces[0].Intake
		return s.Offered == 30 && s.Waiting == 0
	})
	r.drain()
	if s := r.store.Stats().Namespaces[0]; s.Ready != 30 || s.Files.Blocks != 30 {
		t.Errorf("after the drain: %+v", s)
	}
	a.compute(keys(30, 35))
	r.await("offers", func() bool { return r.store.Stats().Namespaces[0].Intake.Dropped == 5 })
}

// A removal that a crash has interrupted is finished at the next start.
func TestRemovalIsFinished(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, Facts{"m", "s", 1}.ID()+removedSuffix)
	if err := os.MkdirAll(filepath.Join(left, "0123456789abcdef", "00"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "mine"+removedSuffix), 0o700); err != nil {
		t.Fatal(err)
	}
	r := newRack(t)
	r.open(func(c *Config) { c.Folder, c.FolderSize = dir, 1<<20 })
	if entries, _ := os.ReadDir(dir); len(entries) != 1 || entries[0].Name() != "mine"+removedSuffix {
		t.Errorf("left: %v", entries)
	}
	if n := r.noted("folder_foreign"); len(n) != 1 {
		t.Errorf("told: %+v", n)
	}
}

// Folders that are no namespace are told and left alone.
func TestForeignFolders(t *testing.T) {
	dir := t.TempDir()
	for name, record := range map[string]string{"x": "", "y": "{", "z": `{"fingerprint":"f","hash_seed":"s","block_len":5}`} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if record != "" {
			if err := os.WriteFile(filepath.Join(dir, name, recordName), []byte(record), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "note.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRack(t)
	r.open(func(c *Config) { c.Folder, c.FolderSize = dir, 1<<20 })
	if n := r.noted("folder_foreign"); len(n) != 4 {
		t.Errorf("told: %+v", n)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 4 {
		t.Errorf("left: %v", entries)
	}
}
