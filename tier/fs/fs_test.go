package fs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tier/core"
)

const blockLen = 4096 + 17

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		childWrites(dir)
	}
	goleak.VerifyTestMain(m)
}

// fakeHost is memory and what was reported.
type fakeHost struct {
	mem   [][]byte
	mu    sync.Mutex
	loads map[core.JobID][]bool
	saved map[core.JobID]bool
	ended chan core.JobID
}

func newHost(slots int) *fakeHost {
	h := &fakeHost{loads: map[core.JobID][]bool{}, saved: map[core.JobID]bool{}, ended: make(chan core.JobID, 4096)}
	for range slots {
		h.mem = append(h.mem, make([]byte, blockLen))
	}
	return h
}

func (h *fakeHost) Block(s core.Slot) []byte { return h.mem[s] }

func (h *fakeHost) LoadEnded(id core.JobID, good []bool, stopped bool) {
	h.mu.Lock()
	if _, twice := h.loads[id]; twice || !stopped {
		panic("a load ended twice, or did not stop")
	}
	h.loads[id] = good
	h.mu.Unlock()
	h.ended <- id
}

func (h *fakeHost) LoadSummed(id core.JobID, good []bool, sums []core.Sum, stopped bool) {
	for i, ok := range good {
		if ok != sums[i].Known {
			panic("a block that is whole has its sum, and no other")
		}
	}
	h.LoadEnded(id, good, stopped)
}

func (h *fakeHost) StoreEnded(id core.JobID, ok bool) {
	h.mu.Lock()
	if _, twice := h.saved[id]; twice {
		panic("a store ended twice")
	}
	h.saved[id] = ok
	h.mu.Unlock()
	h.ended <- id
}

func (h *fakeHost) LoadStopped(core.JobID)              { panic("not for files") }
func (h *fakeHost) Recent(int) []core.Key               { panic("not for files") }
func (h *fakeHost) Serve([]core.Key, int) []core.Served { panic("not for files") }
func (h *fakeHost) Unpin([]core.PinID)                  { panic("not for files") }
func (h *fakeHost) Wake()                               {}

type fixture struct {
	t    *testing.T
	tier *Tier
	host *fakeHost
	id   core.JobID
}

func open(t *testing.T, dir string, change func(*Config)) *fixture {
	t.Helper()
	cfg := Config{Root: dir, Facts: "a model", BlockLen: blockLen, Budget: 1 << 30}
	if change != nil {
		change(&cfg)
	}
	f := &fixture{t: t, host: newHost(8)}
	var err error
	if f.tier, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	if err := f.tier.Start(f.host); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.close)
	return f
}

func (f *fixture) close() {
	if err := f.tier.Close(); err != nil {
		f.t.Error(err)
	}
}

func (f *fixture) wait(id core.JobID) {
	f.t.Helper()
	select {
	case got := <-f.host.ended:
		if got != id {
			f.t.Fatalf("job %d ended, want %d", got, id)
		}
	case <-time.After(20 * time.Second):
		f.t.Fatal("the job does not end")
	}
}

// store keeps content n under key n.
func (f *fixture) store(n int) bool {
	f.t.Helper()
	f.id++
	fill(f.host.mem[0], n)
	f.tier.Store(core.Job{ID: f.id, Keys: []core.Key{key(n)}, Slots: []core.Slot{0}})
	f.wait(f.id)
	return f.host.saved[f.id]
}

// load reports whether key n could be read; its content must then be right.
func (f *fixture) load(n int) bool {
	f.t.Helper()
	f.id++
	f.tier.Load(core.Job{ID: f.id, Keys: []core.Key{key(n)}, Slots: []core.Slot{1}})
	f.wait(f.id)
	good := f.host.loads[f.id]
	if len(good) == 0 || !good[0] {
		return false
	}
	want := make([]byte, blockLen)
	fill(want, n)
	if !bytes.Equal(f.host.mem[1], want) {
		f.t.Fatalf("block %d was loaded with other content", n)
	}
	return true
}

func (f *fixture) has(n int) bool { return f.tier.Probe("", key(n)) == core.Hit }

func key(n int) core.Key {
	b := bytes.Repeat([]byte{0xab}, 36)
	binary.BigEndian.PutUint32(b, uint32(n))
	return core.Key(b)
}

func fill(b []byte, n int) {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(n))
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
}

func TestBlocksSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	f := open(t, dir, nil)
	if f.has(1) || f.load(1) {
		t.Error("an empty store has a block")
	}
	for n := range 5 {
		if !f.store(n) {
			t.Fatalf("block %d was not stored", n)
		}
	}
	f.close()
	f = open(t, dir, nil)
	if r := f.tier.Recovery(); r.Blocks != 5 || r.DroppedAll != 0 || r.ForeignAll != 0 || r.Bytes != 5*fileSize(key(0), blockLen) {
		t.Errorf("recovered %+v", r)
	}
	for n := range 5 {
		if !f.has(n) || !f.load(n) {
			t.Errorf("block %d is gone", n)
		}
	}
}

func TestStoringAgainKeepsTheFile(t *testing.T) {
	f := open(t, t.TempDir(), nil)
	f.store(1)
	if !f.store(1) || f.tier.Stats().Stores != 1 {
		t.Errorf("%+v", f.tier.Stats())
	}
}

func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	open(t, dir, nil)
	second, _ := New(Config{Root: dir, Facts: "a model", BlockLen: blockLen, Budget: 1 << 30})
	if err := second.Start(newHost(1)); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a second one started: %v", err)
	}
}

func TestOtherModelsSeeNothing(t *testing.T) {
	dir := t.TempDir()
	f := open(t, dir, nil)
	f.store(1)
	g := open(t, dir, func(c *Config) { c.Facts = "another model" })
	if g.has(1) {
		t.Error("a block of another model")
	}
	// Nor when somebody copies the file there.
	b, err := os.ReadFile(f.tier.path(key(1)))
	if err != nil {
		t.Fatal(err)
	}
	g.close()
	to := g.tier.path(key(1))
	if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o700), os.WriteFile(to, b, 0o600)); err != nil {
		t.Fatal(err)
	}
	g = open(t, dir, func(c *Config) { c.Facts = "another model" })
	if r := g.tier.Recovery(); g.has(1) || r.DroppedAll != 1 || !errors.Is(r.Dropped[0].Reason, ErrForeign) {
		t.Errorf("recovered %+v", r)
	}
}

// Every byte of a file counts: whichever is flipped, cut off or added, the block is a miss, the file
// is removed, and the store says so.
func TestMutantsAreMisses(t *testing.T) {
	size := headLen(key(1)) + blockLen
	places := []int{0, 8, 39, 40, 43, 44, 51, 52, 55, 56, 60, 91, 92, 95, 96, 1000, size - 1}
	for _, at := range places {
		mutate(t, fmt.Sprintf("byte %d", at), func(b []byte) []byte { b[at] ^= 0x10; return b })
	}
	for _, n := range []int{0, 1, 55, 95, 96, 97, size - 1} {
		mutate(t, fmt.Sprintf("cut to %d", n), func(b []byte) []byte { return b[:n] })
	}
	mutate(t, "longer", func(b []byte) []byte { return append(b, 0) })
}

func mutate(t *testing.T, what string, change func([]byte) []byte) {
	for _, restart := range []bool{false, true} {
		dir := t.TempDir()
		var told []Dropped
		f := open(t, dir, func(c *Config) { c.OnDropped = func(d Dropped) { told = append(told, d) } })
		f.store(1)
		path := f.tier.path(key(1))
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, change(b), 0o600); err != nil {
			t.Fatal(err)
		}
		dropped := 0
		if restart {
			f.close()
			f = open(t, dir, func(c *Config) { c.OnDropped = func(d Dropped) { told = append(told, d) } })
			if dropped = f.tier.Recovery().DroppedAll; dropped == 0 && len(change(bytes.Clone(b))) != len(b) {
				t.Errorf("%s: its length is not seen at the start", what)
			}
		}
		if f.load(1) {
			t.Errorf("%s (restart %v): loaded", what, restart)
		}
		if _, err := os.Stat(path); f.has(1) || !os.IsNotExist(err) {
			t.Errorf("%s (restart %v): the file stays: %v", what, restart, err)
		}
		if len(told)+dropped != 1 {
			t.Errorf("%s (restart %v): told of %v and %d at start", what, restart, told, dropped)
		}
		if !f.store(1) || !f.load(1) {
			t.Errorf("%s (restart %v): cannot be stored anew", what, restart)
		}
		f.close()
	}
}

// A process that can open no more files has a miss, and its files stay.
func TestNoDescriptorsLeft(t *testing.T) {
	f := open(t, t.TempDir(), nil)
	f.store(1)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	got := f.load(1)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if s := f.tier.Stats(); got || s.Dropped != 0 || s.FailedLoads != 1 {
		t.Errorf("without descriptors: loaded %v, %+v", got, s)
	}
	if !f.has(1) || !f.load(1) {
		t.Error("the block is gone")
	}
}

func TestBudgetDropsLeastRecentlyUsed(t *testing.T) {
	dir, budget := t.TempDir(), 3*fileSize(key(0), blockLen)
	small := func(c *Config) { c.Budget = budget }
	f := open(t, dir, small)
	for n := range 3 {
		f.store(n)
	}
	f.load(0)
	f.store(3)
	if f.has(1) || !f.has(0) || !f.has(2) || !f.has(3) {
		t.Error("the wrong block was dropped")
	}
	if s := f.tier.Stats(); s.Bytes > budget || s.Evicted != 1 {
		t.Errorf("%+v", s)
	}
	f.close()
	// The order of use survives, and a smaller budget is kept at once.
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(f.tier.path(key(3)), old, old); err != nil {
		t.Fatal(err)
	}
	f = open(t, dir, func(c *Config) { c.Budget = 2 * fileSize(key(0), blockLen) })
	if r := f.tier.Recovery(); r.Blocks != 2 || r.DroppedAll != 1 || f.has(3) {
		t.Errorf("recovered %+v", r)
	}
	if n := countFiles(t, dir); n != 2 {
		t.Errorf("%d files are left", n)
	}
}

func countFiles(t *testing.T, dir string) int {
	all, err := filepath.Glob(filepath.Join(dir, "*", "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func TestForeignFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	f := open(t, dir, nil)
	f.close()
	mine := []string{"notes.txt", "ab/abcd.kvb", "tmp/notes"}
	for _, name := range mine {
		p := filepath.Join(f.tier.dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o700), os.WriteFile(p, []byte("precious"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	unfinished := filepath.Join(f.tier.dir, tmpDir, "7.tmp")
	if err := os.WriteFile(unfinished, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := open(t, dir, nil).tier.Recovery()
	// ab/abcd.kvb bears a name of ours and holds no block.
	if r.ForeignAll != 2 || r.DroppedAll != 2 || r.Blocks != 0 {
		t.Errorf("recovered %+v", r)
	}
	if _, err := os.Stat(unfinished); !os.IsNotExist(err) {
		t.Error("the unfinished file stays")
	}
	if _, err := os.Stat(filepath.Join(f.tier.dir, mine[0])); err != nil {
		t.Error(err)
	}
}

// Jobs beyond the queue, and those that wait at Close, end too: each once.
func TestEveryJobEndsOnce(t *testing.T) {
	f := open(t, t.TempDir(), func(c *Config) { c.Workers = 1 })
	const jobs = queuedLoads + queuedStores + 500
	for i := range jobs {
		j := core.Job{ID: core.JobID(i + 1), Keys: []core.Key{key(i % 3)}, Slots: []core.Slot{core.Slot(2 + i%3)}}
		if i%2 == 0 {
			f.tier.Store(j)
		} else {
			f.tier.Load(j)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range jobs {
			<-f.host.ended
		}
	}()
	f.close()
	<-done
	if n := len(f.host.loads) + len(f.host.saved); n != jobs {
		t.Errorf("%d of %d jobs ended", n, jobs)
	}
}

func TestUnusableFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tr, err := New(Config{Root: file, Facts: "f", BlockLen: 1, Budget: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.Start(newHost(1)); err == nil {
		t.Error("started on a file")
	}
	for name, c := range map[string]Config{
		"root":   {Facts: "f", BlockLen: 1, Budget: 1 << 20},
		"facts":  {Root: "r", BlockLen: 1, Budget: 1 << 20},
		"len":    {Root: "r", Facts: "f", Budget: 1 << 20},
		"budget": {Root: "r", Facts: "f", BlockLen: 1, Budget: 10},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func FuzzReadHead(f *testing.F) {
	var id facts
	f.Add(appendHead(nil, id, key(1), []byte("payload")))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := readHead(bytes.NewReader(b), id)
		if err == nil && !bytes.HasPrefix(b, []byte(magic)) {
			t.Fatalf("accepted %x as %+v", b, h)
		}
	})
}
