package fs

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
)

// Config of a Tier.
type Config struct {
	// Root is the folder; it is made if it is not there.
	Root string
	// Facts describe all that makes blocks of one model unreadable for another: model, layout, dtype,
	// hash seed. Another text never sees these blocks. Required.
	Facts string
	// BlockLen is the length of a block, bytes: the Manager's.
	BlockLen int
	// Budget bounds the files of these facts together, bytes, rounded up to 4 KiB each.
	Budget int64
	// Workers do the reading and writing. 0: 4.
	Workers int
	// OnDropped is told of each file that turned out unusable when it was to be loaded, from a
	// worker's goroutine. It must not block. nil: nobody is told.
	OnDropped func(Dropped)
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Root == "":
		return errors.New("file tier: no folder")
	case c.Facts == "":
		return errors.New("file tier: no model facts; without them blocks of one model could be read as another's")
	case c.BlockLen < 1:
		return fmt.Errorf("file tier: blocks of %d bytes", c.BlockLen)
	case c.Budget < fileSize("", c.BlockLen):
		return fmt.Errorf("file tier: a budget of %d bytes does not hold one block of %d", c.Budget, c.BlockLen)
	case c.Workers < 0 || c.Workers > maxWorkers:
		return fmt.Errorf("file tier: %d workers, 1 to %d are possible", c.Workers, maxWorkers)
	}
	return nil
}

// Stats are counts for people.
type Stats struct {
	Blocks                  int    // that can be read; not those being written
	Bytes                   int64  // of the budget, with those being written
	Loads, Stores           uint64 // blocks
	FailedLoads, NotStored  uint64 // blocks
	Dropped, Evicted        uint64 // files
	Damaged                 uint64 // blocks that were not stored, because they were damaged in memory
	QueuedLoads, QueuedJobs int
}

// Tier is a tier of files.
type Tier struct {
	cfg   Config
	facts facts
	dir   string
	lock  *os.File
	host  tier.Host
	run   sync.WaitGroup
	wake  *sync.Cond // on mu

	mu struct {
		sync.Mutex
		index    *index
		loads    []core.Job
		stores   []core.Job
		refused  []func() // ends of jobs that found their queue full
		lastTmp  uint64
		closed   bool
		stats    Stats
		recovery Recovery
	}
}

var _ tier.Secondary = (*Tier)(nil)

// New makes a tier; Start opens its folder.
func New(cfg Config) (*Tier, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Workers == 0 {
		cfg.Workers = defaultWorkers
	}
	t := &Tier{cfg: cfg, facts: sha256.Sum256([]byte(cfg.Facts))}
	t.dir = filepath.Join(cfg.Root, hex.EncodeToString(t.facts[:8]))
	t.wake = sync.NewCond(&t.mu)
	return t, nil
}

// Name is "fs".
func (t *Tier) Name() string { return "fs" }

// Start takes the folder's lock, reads what is there, and starts the workers.
func (t *Tier) Start(h tier.Host) error {
	if err := os.MkdirAll(filepath.Join(t.dir, tmpDir), 0o700); err != nil {
		return fmt.Errorf("its folder cannot be used (--fs): %w", err)
	}
	if err := t.takeLock(); err != nil {
		return err
	}
	var rec Recovery
	files, err := t.scan(&rec)
	if err != nil {
		return errors.Join(fmt.Errorf("read %s: %w", t.dir, err), t.lock.Close())
	}
	x := newIndex(t.cfg.Budget)
	for _, f := range files {
		victims, _ := x.room(f.size)
		for _, k := range victims {
			if err := os.Remove(t.path(k)); err != nil {
				return errors.Join(err, t.lock.Close())
			}
			rec.drop(t.path(k), fmt.Errorf("beyond the budget of %d bytes", t.cfg.Budget))
		}
		x.left(victims)
		x.add(f.key, f.size)
	}
	rec.Blocks, rec.Bytes = len(x.files), x.used
	t.host = h
	t.mu.index, t.mu.recovery = x, rec
	for range t.cfg.Workers {
		t.run.Add(1)
		go t.work()
	}
	return nil
}

func (t *Tier) takeLock() error {
	f, err := os.OpenFile(filepath.Join(t.dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return errors.Join(fmt.Errorf("lock %s: %w (is another process using this folder?)", f.Name(), err), f.Close())
	}
	t.lock = f
	return nil
}

// Recovery is what Start found.
func (t *Tier) Recovery() Recovery {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.recovery
}

// Stats counts.
func (t *Tier) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.mu.stats
	s.Blocks, s.Bytes = t.mu.index.order.Len(), t.mu.index.used
	s.QueuedLoads, s.QueuedJobs = len(t.mu.loads), len(t.mu.loads)+len(t.mu.stores)
	return s
}

// Begin is Secondary.Begin: every request may load and store.
func (t *Tier) Begin(tier.Request) tier.Interest { return tier.Interest{Load: true, Store: true} }

// End, Unwanted, Flush and Changed are of no interest to files.
func (t *Tier) End(kv.RequestID)                  {}
func (t *Tier) Unwanted(kv.RequestID, []core.Key) {}
func (t *Tier) Flush(kv.RequestID)                {}
func (t *Tier) Changed()                          {}

// Probe is Secondary.Probe: it asks the index, not the disk.
func (t *Tier) Probe(_ kv.RequestID, k core.Key) core.Verdict {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.index.has(k) {
		return core.Hit
	}
	return core.Miss
}

// Load is Secondary.Load.
func (t *Tier) Load(j core.Job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.loads) < queuedLoads {
		t.mu.loads = append(t.mu.loads, j)
	} else {
		t.mu.stats.FailedLoads += uint64(len(j.Keys))
		t.mu.refused = append(t.mu.refused, func() { t.host.LoadEnded(j.ID, nil, true) })
	}
	t.wake.Signal()
}

// Store is Secondary.Store.
func (t *Tier) Store(j core.Job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.stores) < queuedStores {
		t.mu.stores = append(t.mu.stores, j)
	} else {
		t.mu.stats.NotStored += uint64(len(j.Keys))
		t.mu.refused = append(t.mu.refused, func() { t.host.StoreEnded(j.ID, false) })
	}
	t.wake.Signal()
}

// Close ends the jobs that wait as failed, lets those at work finish, and frees the folder.
func (t *Tier) Close() error {
	t.mu.Lock()
	loads, stores := t.mu.loads, t.mu.stores
	t.mu.loads, t.mu.stores = nil, nil
	first := !t.mu.closed
	t.mu.closed = true
	t.wake.Broadcast()
	t.mu.Unlock()
	if !first {
		return nil
	}
	for _, j := range loads {
		t.host.LoadEnded(j.ID, nil, true)
	}
	for _, j := range stores {
		t.host.StoreEnded(j.ID, false)
	}
	t.run.Wait()
	return t.lock.Close()
}

func (t *Tier) path(k core.Key) string {
	name := hex.EncodeToString([]byte(k))
	sub := "00"
	if len(name) >= 2 {
		sub = name[:2]
	}
	return filepath.Join(t.dir, sub, name+suffix)
}

// touch lets the order of use survive a restart; that it fails costs nothing else.
func (t *Tier) touch(path string) {
	now := time.Now()
	_ = os.Chtimes(path, now, now)
}
