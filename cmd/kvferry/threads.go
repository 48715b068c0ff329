package main

import (
	"os"
	"runtime"
	"slices"

	"github.com/kvferry/kvferry/engine"
)

const (
	// spareProcs is how many goroutines may run besides those that compute: one that waits for the
	// network, one that answers. Without them a process that computes on every processor reads from the
	// network about every 10 ms only.
	spareProcs = 2

	// niceWithPeers lowers the priority of computing threads enough that a thread with an answer for a
	// peer mostly gets a processor at once (docs/benchmarks.md).
	niceWithPeers = 5
)

// computing says how an engine's model computes: on threads of its own.
func (f *engineFlags) computing(cfg *engine.Config) {
	if cfg.Threads == 0 {
		cfg.Threads = runtime.GOMAXPROCS(0)
	}
	cfg.Dedicated, cfg.Nice = true, f.nice
	if f.nice < 0 {
		cfg.Nice = 0
		if slices.Contains(cfg.Tier.Secondaries, engine.TierP2P) {
			cfg.Nice = niceWithPeers
		}
	}
}

// makeRoom lets more goroutines run at a time than compute, unless the environment says how many.
func makeRoom(threads int) {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), threads+spareProcs))
	}
}
