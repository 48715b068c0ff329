package engine

import (
	"sync"
	"time"

	tiercore "github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/fs"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// TierStats is a snapshot of the CPU tier.
type TierStats struct {
	Memory    tiercore.Stats
	BlockLen  int              // bytes
	Tiers     []SecondaryStats // behind the memory, in the order in which they are asked
	NotStored uint64           // blocks that found no room in the memory

	// LookupSync is the time of single lookups; LookupAsync is from a lookup that could not be decided at
	// once until it was.
	LookupSync, LookupAsync Delays

	Peers     *session.Stats // of TierP2P; nil: there is none
	Files     *fs.Stats      // of TierFS; nil: there is none
	Recovered *fs.Recovery   // what TierFS found in its folder
}

// Delays is a histogram: Counts[i] is how many were at most DelayBounds[i] seconds, not cumulated; the
// last is of all others.
type Delays struct {
	Counts [len(DelayBounds) + 1]uint64
	Sum    float64 // seconds
}

// DelayBounds are the upper bounds of Delays, seconds.
var DelayBounds = [...]float64{.00001, .0001, .001, .01, .05, .1, .5, 1, 5, 10, 30, 60}

// delays collects Delays. Its methods may be called from any goroutine.
type delays struct {
	mu struct {
		sync.Mutex
		Delays
	}
}

func (d *delays) observe(took time.Duration) {
	s := took.Seconds()
	i := 0
	for i < len(DelayBounds) && s > DelayBounds[i] {
		i++
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.Counts[i]++
	d.mu.Sum += s
}

func (d *delays) read() Delays {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.Delays
}

// TierStats is a snapshot; ok is false if the engine has no CPU tier. It waits for the tier's lock, and
// not for the loop.
func (e *Engine) TierStats() (s TierStats, ok bool) {
	t := e.parts.tier
	if t == nil {
		return s, false
	}
	s = TierStats{
		Memory: t.m.Stats(), BlockLen: t.blockLen, NotStored: t.notStored.Load(),
		LookupSync: t.sync.read(), LookupAsync: t.async.read(),
	}
	for _, w := range t.tiers {
		s.Tiers = append(s.Tiers, w.stats())
	}
	if t.peers != nil {
		peers := t.peers.Stats()
		s.Peers = &peers
	}
	if t.files != nil {
		files, found := t.files.Stats(), t.files.Recovery()
		s.Files, s.Recovered = &files, &found
	}
	return s, true
}
