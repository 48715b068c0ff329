package session

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/wire"
)

// Config of a Hub. Zero durations and counts mean the defaults.
type Config struct {
	// Local is what this node says of itself: its name, memory, facts and agents. The extension's instance is a
	// secret, of which each peer is told something else.
	Local wire.P2PConnect
	// Store is a peer to offer what this node computes, and to ask when a request names no source; "": none.
	Store PeerID
	// Revocable: the agent refuses writes without a grant, and a revoked grant is exact.
	Revocable bool

	MaxPeers int
	// PeerPins bounds the blocks that one peer holds by its lookups. UnboundSlots bounds the blocks
	// kept for peers that have not asked for them yet. 0: a quarter, and half, of Local.NumBlocks.
	PeerPins, UnboundSlots int
	// Portion is how many keys of a peer's lookup one Serve has at most. 0: DefaultPortion.
	Portion int

	HandshakeTimeout time.Duration
	IdleTimeout      time.Duration // a peer's session may be ended for another's when idle so long; below 0: never
	LookupTimeout    time.Duration // ask to answer
	LoadTimeout      time.Duration // fetch to its end, and a second more for each LoadRate bytes
	LoadRate         int64
	PinTimeout       time.Duration // answer to fetch: how long a peer's hits are kept for it
	PendingTimeout   time.Duration // how long a peer's lookup waits for blocks being written
	DemandTimeout    time.Duration // how long a peer's fetch waits for the next supply
	UnboundTimeout   time.Duration // how long a supply waits for a fetch
	RememberFor      time.Duration // how long a finished or reaped id is known, to answer late fetches
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	if _, err := ParsePeer(c.Local.PeerID); err != nil {
		return fmt.Errorf("p2p tier: our own name: %w", err)
	}
	if err := checkMemory(&c.Local); err != nil {
		return fmt.Errorf("p2p tier: our own memory: %w", err)
	}
	if c.Store != "" {
		if _, err := ParsePeer(string(c.Store)); err != nil {
			return fmt.Errorf("p2p tier: the store: %w", err)
		}
		if string(c.Store) == c.Local.PeerID {
			return fmt.Errorf("p2p tier: the store %s is this node itself", c.Store)
		}
	}
	if c.Local.HashSeed == "" {
		return errors.New("p2p tier: no hash seed; peers with another one would have other keys for the same content")
	}
	for _, d := range []time.Duration{c.HandshakeTimeout, c.LookupTimeout, c.LoadTimeout, c.PinTimeout,
		c.PendingTimeout, c.DemandTimeout, c.UnboundTimeout, c.RememberFor} {
		if d < 0 {
			return fmt.Errorf("p2p tier: a timeout is negative (%v)", d)
		}
	}
	if c.MaxPeers < 0 || c.PeerPins < 0 || c.UnboundSlots < 0 || c.Portion < 0 || c.LoadRate < 0 {
		return errors.New("p2p tier: a bound is negative")
	}
	return nil
}

func (c Config) withDefaults() Config {
	setDefault(&c.MaxPeers, DefaultMaxPeers)
	setDefault(&c.PeerPins, max(1, c.Local.NumBlocks/4))
	setDefault(&c.UnboundSlots, max(1, c.Local.NumBlocks/2))
	setDefault(&c.Portion, DefaultPortion)
	setDefault(&c.HandshakeTimeout, DefaultHandshakeTimeout)
	setDefault(&c.IdleTimeout, DefaultIdleTimeout)
	setDefault(&c.LookupTimeout, DefaultLookupTimeout)
	setDefault(&c.LoadTimeout, DefaultLoadTimeout)
	setDefault(&c.LoadRate, DefaultLoadRate)
	setDefault(&c.PinTimeout, DefaultPinTimeout)
	setDefault(&c.PendingTimeout, DefaultPendingTimeout)
	setDefault(&c.DemandTimeout, DefaultDemandTimeout)
	setDefault(&c.UnboundTimeout, DefaultUnboundTimeout)
	setDefault(&c.RememberFor, DefaultRememberFor)
	return c
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}
