package fs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tier/core"
)

// work is one worker's goroutine.
func (t *Tier) work() {
	defer t.run.Done()
	for {
		t.mu.Lock()
		for len(t.mu.refused) == 0 && len(t.mu.loads) == 0 && len(t.mu.stores) == 0 && !t.mu.closed {
			t.wake.Wait()
		}
		var load, store *core.Job
		refused := t.mu.refused
		t.mu.refused = nil
		switch {
		case len(refused) > 0:
		case len(t.mu.loads) > 0:
			load, t.mu.loads = &t.mu.loads[0], t.mu.loads[1:]
		case len(t.mu.stores) > 0:
			store, t.mu.stores = &t.mu.stores[0], t.mu.stores[1:]
		}
		t.mu.Unlock()
		switch {
		case refused != nil:
			for _, end := range refused {
				end()
			}
		case load != nil:
			good, sums := t.load(load)
			t.host.LoadSummed(load.ID, good, sums, true)
		case store != nil:
			t.host.StoreEnded(store.ID, t.store(store))
		default:
			return // closed
		}
	}
}

// load fills the job's slots, each for itself.
func (t *Tier) load(j *core.Job) (good []bool, sums []core.Sum) {
	good, sums = make([]bool, len(j.Keys)), make([]core.Sum, len(j.Keys))
	for i, k := range j.Keys {
		t.mu.Lock()
		there := t.mu.index.read(k)
		if !there {
			t.mu.stats.FailedLoads++
		}
		t.mu.Unlock()
		if there {
			sums[i], good[i] = t.loadOne(k, t.host.Block(j.Slots[i]))
		}
	}
	return good, sums
}

func (t *Tier) loadOne(k core.Key, dst []byte) (core.Sum, bool) {
	path := t.path(k)
	sum, err := readBlock(path, t.facts, k, dst)
	if err == nil {
		t.touch(path)
	}
	t.mu.Lock()
	broken := err != nil && !ours(err)
	remove := t.mu.index.done(k, broken)
	switch {
	case err == nil:
		t.mu.stats.Loads++
	case broken:
		t.mu.stats.Dropped++
		fallthrough
	default:
		t.mu.stats.FailedLoads++
	}
	t.mu.Unlock()
	if remove {
		t.remove([]core.Key{k})
	}
	if broken && t.cfg.OnDropped != nil {
		t.cfg.OnDropped(Dropped{path, err})
	}
	return sum, err == nil
}

// ours reports an error that says nothing of the file: this process has no room to open it now.
func ours(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// store writes the job's blocks. It is well when all of them are there, by this job or an earlier one.
func (t *Tier) store(j *core.Job) bool {
	all := true
	for i, k := range j.Keys {
		var sum core.Sum
		if i < len(j.Sums) {
			sum = j.Sums[i]
		}
		if err := t.storeOne(k, t.host.Block(j.Slots[i]), sum); err != nil {
			all = false
			t.mu.Lock()
			t.mu.stats.NotStored++
			t.mu.Unlock()
		}
	}
	return all
}

func (t *Tier) storeOne(k core.Key, payload []byte, sum core.Sum) error {
	if len(k) == 0 || len(k) > maxKey {
		return fmt.Errorf("a key of %d bytes", len(k))
	}
	if sum.Known && core.SumOf(payload) != sum {
		t.mu.Lock()
		t.mu.stats.Damaged++
		t.mu.Unlock()
		return fmt.Errorf("in memory: %w", ErrSum)
	}
	path := t.path(k)
	t.mu.Lock()
	if t.mu.index.files[k] != nil {
		t.mu.Unlock()
		return nil
	}
	victims, ok := t.mu.index.begin(k, fileSize(k, len(payload)))
	t.mu.stats.Evicted += uint64(len(victims))
	t.mu.lastTmp++
	tmp := filepath.Join(t.dir, tmpDir, strconv.FormatUint(t.mu.lastTmp, 10)+tmpSuffix)
	t.mu.Unlock()
	if !ok {
		return fmt.Errorf("no room for %d bytes", len(payload))
	}
	t.remove(victims)
	dir := filepath.Dir(path)
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = writeBlock(tmp, path, dir, t.facts, k, payload)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.index.wrote(k, err == nil)
	if err == nil {
		t.mu.stats.Stores++
	}
	return err
}

// remove takes files off the disk that the index has taken out of use. One that cannot be removed is
// found again at the next start.
func (t *Tier) remove(keys []core.Key) {
	for _, k := range keys {
		_ = os.Remove(t.path(k))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.index.left(keys)
}
