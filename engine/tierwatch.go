package engine

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	tiercore "github.com/kvferry/kvferry/tier/core"
)

// watchedTier is a Secondary and counts what it is asked and what it does. It remembers which blocks it
// was to bring for a request, until that ends.
type watchedTier struct {
	tier.Secondary
	label    string
	blockLen int

	mu struct {
		sync.Mutex
		stats   SecondaryStats
		brought map[kv.RequestID]map[tiercore.Key]struct{}
		jobs    map[tiercore.JobID]watchedJob
	}
}

type watchedJob struct {
	load   bool
	blocks int
	since  time.Time
}

// SecondaryStats are counts of one tier behind the CPU's.
type SecondaryStats struct {
	Name  string // "fs", "p2p"
	Label string // its place and name, as stock metrics say it: "1:p2p"

	Queries, Hits               uint64 // blocks asked for, and found
	ActiveLoads, ActiveStores   int    // jobs
	FailedLoads, FailedStores   uint64 // jobs that did not end whole
	ReadBytes, WrittenBytes     uint64 // of blocks that were brought, and kept
	ReadSeconds, WrittenSeconds float64
}

// watchTiers wraps tiers in the order in which they are asked. 0 is the CPU's memory.
func watchTiers(tiers []tier.Secondary, blockLen int) []*watchedTier {
	var out []*watchedTier
	for i, s := range tiers {
		w := &watchedTier{Secondary: s, label: fmt.Sprintf("%d:%s", i+1, s.Name()), blockLen: blockLen}
		w.mu.stats = SecondaryStats{Name: s.Name(), Label: w.label}
		w.mu.brought = map[kv.RequestID]map[tiercore.Key]struct{}{}
		w.mu.jobs = map[tiercore.JobID]watchedJob{}
		out = append(out, w)
	}
	return out
}

// Start is Secondary.Start.
func (w *watchedTier) Start(h tier.Host) error { return w.Secondary.Start(&watchedHost{h, w}) }

// Probe is Secondary.Probe.
func (w *watchedTier) Probe(req kv.RequestID, key tiercore.Key) tiercore.Verdict {
	v := w.Secondary.Probe(req, key)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch v {
	case tiercore.Hit:
		w.mu.stats.Hits++
		w.mu.stats.Queries++
	case tiercore.Miss:
		w.mu.stats.Queries++
	}
	return v
}

// Load is Secondary.Load.
func (w *watchedTier) Load(j tiercore.Job) {
	w.mu.Lock()
	w.mu.stats.ActiveLoads++
	w.mu.jobs[j.ID] = watchedJob{load: true, blocks: len(j.Keys), since: time.Now()}
	if j.Req != "" {
		if w.mu.brought[j.Req] == nil {
			w.mu.brought[j.Req] = map[tiercore.Key]struct{}{}
		}
		for _, k := range j.Keys {
			w.mu.brought[j.Req][k] = struct{}{}
		}
	}
	w.mu.Unlock()
	w.Secondary.Load(j)
}

// Store is Secondary.Store.
func (w *watchedTier) Store(j tiercore.Job) {
	w.mu.Lock()
	w.mu.stats.ActiveStores++
	w.mu.jobs[j.ID] = watchedJob{blocks: len(j.Keys), since: time.Now()}
	w.mu.Unlock()
	w.Secondary.Store(j)
}

// End is Secondary.End.
func (w *watchedTier) End(req kv.RequestID) {
	w.mu.Lock()
	delete(w.mu.brought, req)
	w.mu.Unlock()
	w.Secondary.End(req)
}

// broughtFor tells how many of a request's blocks this tier was to bring.
func (w *watchedTier) broughtFor(req kv.RequestID, keys []tiercore.Key) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range keys {
		if _, ok := w.mu.brought[req][k]; ok {
			n++
		}
	}
	return n
}

func (w *watchedTier) stats() SecondaryStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.stats
}

// ended books the end of a job; whole says how many of its blocks are.
func (w *watchedTier) ended(id tiercore.JobID, whole func(blocks int) int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	j, ok := w.mu.jobs[id]
	if !ok {
		return
	}
	delete(w.mu.jobs, id)
	s, n, took := &w.mu.stats, whole(j.blocks), time.Since(j.since).Seconds()
	active, failed, bytes, seconds := &s.ActiveStores, &s.FailedStores, &s.WrittenBytes, &s.WrittenSeconds
	if j.load {
		active, failed, bytes, seconds = &s.ActiveLoads, &s.FailedLoads, &s.ReadBytes, &s.ReadSeconds
	}
	*active--
	*bytes += uint64(n * w.blockLen)
	*seconds += took
	if n < j.blocks {
		*failed++
	}
}

// watchedHost hears of the ends of jobs.
type watchedHost struct {
	tier.Host
	w *watchedTier
}

func (h *watchedHost) LoadEnded(id tiercore.JobID, good []bool, stopped bool) {
	h.w.loadEnded(id, good)
	h.Host.LoadEnded(id, good, stopped)
}

func (h *watchedHost) LoadSummed(id tiercore.JobID, good []bool, sums []tiercore.Sum, stopped bool) {
	h.w.loadEnded(id, good)
	h.Host.LoadSummed(id, good, sums, stopped)
}

func (w *watchedTier) loadEnded(id tiercore.JobID, good []bool) {
	w.ended(id, func(int) (n int) {
		for _, ok := range good {
			if ok {
				n++
			}
		}
		return n
	})
}

func (h *watchedHost) StoreEnded(id tiercore.JobID, ok bool) {
	h.w.ended(id, func(blocks int) int {
		if ok {
			return blocks
		}
		return 0
	})
	h.Host.StoreEnded(id, ok)
}
