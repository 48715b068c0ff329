package connector

import (
	"fmt"
	"time"
)

// Defaults of the reference connector (nixl-connector.md, section 9).
const (
	DefaultLease               = 30 * time.Second
	DefaultRegistrationTimeout = 480 * time.Second
	DefaultDecoderBlocksTTL    = 480 * time.Second
	DefaultEngineTTL           = 3600 * time.Second
	DefaultRecomputeThreshold  = 64
	DefaultNumThreads          = 4
)

// Config holds the knobs that P and D share with the reference connector. DefaultConfig gives
// every default; ParseExtra reads the same from vLLM's kv_connector_extra_config.
type Config struct {
	// Backends are the NIXL plugins to load, first wish first. Default ["UCX"].
	Backends []string
	// NumThreads is UCX's thread count. Default 4.
	NumThreads int
	// Lease is how long P keeps a finished request's blocks without a sign of life of D; whole
	// seconds. It fixes HeartbeatInterval and LeaseExtension too. Default 30 s.
	Lease time.Duration
	// DecoderBlocksTTL is how long D keeps blocks for the next turn of a conversation. Default 480 s.
	DecoderBlocksTTL time.Duration
	// RegistrationTimeout is how long D waits for a registered request's KV before it gives up.
	// Default: DecoderBlocksTTL.
	RegistrationTimeout time.Duration
	// EngineTTL is after how long without activity an idle peer is forgotten; 0 or less means
	// never. Default 3600 s.
	EngineTTL time.Duration
	// EnforceCompat refuses peers whose compatibility hash differs. Default true.
	EnforceCompat bool
	// Bidirectional lets P read back what D kept of an earlier turn (pull only). Default false.
	Bidirectional bool
	// RecomputeThreshold is the number of tokens below which an engine computes them instead of having
	// them brought by a peer; 0 = off. Default 64. The reference connector heeds it where P reads back from D only,
	// so that without Bidirectional its default means 0.
	RecomputeThreshold int
}

// DefaultConfig is the configuration of an engine whose operator said nothing.
func DefaultConfig() Config {
	return Config{
		Backends:            []string{"UCX"},
		NumThreads:          DefaultNumThreads,
		Lease:               DefaultLease,
		DecoderBlocksTTL:    DefaultDecoderBlocksTTL,
		RegistrationTimeout: DefaultRegistrationTimeout,
		EngineTTL:           DefaultEngineTTL,
		EnforceCompat:       true,
		RecomputeThreshold:  DefaultRecomputeThreshold,
	}
}

// HeartbeatInterval is the time between two heartbeats of D: a sixth of the lease in whole
// seconds, as both stock sides compute it (nixl-connector.md, section 6.1), but at least a sixth
// of a lease that is shorter than 6 s.
func HeartbeatInterval(lease time.Duration) time.Duration {
	if s := lease / time.Second / 6; s > 0 {
		return s * time.Second
	}
	return lease / 6
}

// LeaseExtension is what one heartbeat guarantees from its arrival on: two thirds of the lease in
// whole seconds, but at least two thirds of a lease that is shorter than 2 s.
func LeaseExtension(lease time.Duration) time.Duration {
	if s := lease / time.Second * 2 / 3; s > 0 {
		return s * time.Second
	}
	return lease * 2 / 3
}

// Validate reports the first knob with which no connector can work, by its name in
// kv_connector_extra_config.
func (c Config) Validate() error {
	switch {
	case len(c.Backends) == 0:
		return fmt.Errorf("backends is empty; name at least one NIXL plugin, for example UCX")
	case c.NumThreads < 1 || c.NumThreads > maxNumThreads:
		return fmt.Errorf("num_threads is %d, want 1 to %d", c.NumThreads, maxNumThreads)
	case c.Lease <= 0 || c.Lease > maxTimeout:
		return fmt.Errorf("kv_lease_duration is %v, want more than 0 and at most %v", c.Lease, maxTimeout)
	case c.DecoderBlocksTTL <= 0 || c.DecoderBlocksTTL > maxTimeout:
		return fmt.Errorf("decoder_kv_blocks_ttl is %v, want more than 0 and at most %v", c.DecoderBlocksTTL, maxTimeout)
	case c.RegistrationTimeout <= 0 || c.RegistrationTimeout > maxTimeout:
		return fmt.Errorf("push_registration_timeout is %v, want more than 0 and at most %v", c.RegistrationTimeout, maxTimeout)
	case c.RecomputeThreshold < 0:
		return fmt.Errorf("kv_recompute_threshold is %d, want 0 or more", c.RecomputeThreshold)
	}
	for i, b := range c.Backends {
		if b == "" {
			return fmt.Errorf("backends[%d] is empty", i)
		}
	}
	return nil
}
