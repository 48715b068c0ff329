package worker

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

// PushFailCapability is the capability by which a rank announces, in its kvferry extension, that it
// understands PUSH_FAIL. It is sent to no other peer.
const PushFailCapability = "push_fail"

// Capabilities are the capabilities that a rank with this worker announces.
func Capabilities() []string {
	return []string{PushFailCapability, wire.ControlCapability, wire.ClaimCapability}
}

// Peers is what a worker needs of a peer.Table, which has the documentation of each method.
type Peers interface {
	Ensure(target peer.Target, done func(*peer.Connected, error)) *peer.Connected
	Pin(engine kv.EngineID, gen kv.Generation) bool
	Unpin(engine kv.EngineID, gen kv.Generation)
	Lost(id agent.PeerID, err error)
	Close()
}

// Config is what a Worker needs. Zero durations and a nil Events mean the default.
type Config struct {
	Engine kv.EngineID // our engine
	Host   string      // of its side channel, as peers reach it
	Port   int
	Rank   kv.Rank
	TP, PP int             // our engine's sizes; default 1
	Mode   kv.TransferMode // who moves the bytes; default kv.Push

	// Agent moves the bytes. The worker is the only reader of its events and closes it. If it cannot
	// revoke exactly, blocks of failed receives stay in quarantine until P confirms that it does not
	// write them, or its connection is gone.
	Agent agent.Agent
	// Peers finds other engines for this rank's agent. The worker closes it.
	Peers Peers
	// Layout is this rank's memory, all of which is registered with the agent.
	Layout geometry.Layout

	// Lease fixes the heartbeat interval and what a heartbeat guarantees, see
	// connector.HeartbeatInterval. Default connector.DefaultLease.
	Lease time.Duration
	// RegistrationTimeout is how long a registration waits for P's blocks, and how long P remembers
	// a request that ended without KV. Default connector.DefaultRegistrationTimeout.
	RegistrationTimeout time.Duration
	// TransferSilence bounds the time without progress of one WRITE or READ. Default 30 s.
	TransferSilence time.Duration

	// SilentBeats is after how many heartbeat intervals in which nothing is heard of a prefill engine
	// what waits for it fails. Only of engines that answer beats. Default 3.
	SilentBeats int
	// QueryTimeout and HandshakeTimeout are how long one step and the whole of a handshake may take that a
	// prefill engine must make with us before we can hear of it: until its first word it has a heartbeat more
	// than a step, and as long as our side channel is asked, up to a heartbeat more than the whole. Defaults
	// peer.DefaultQueryTimeout, peer.DefaultHandshakeTimeout.
	QueryTimeout, HandshakeTimeout time.Duration
	// QuarantineBlocks bounds the blocks in quarantine: beyond it new registrations are refused.
	// Default a quarter of the rank's blocks.
	QuarantineBlocks int

	// Clock tells what the clock of our side channel shows at a moment, in seconds: peers' offsets are
	// from it. Default peer.At.
	Clock func(time.Time) float64

	// Events takes what happens; default event.Discard.
	Events event.Sink
}

// DefaultTransferSilence is how long a WRITE may make no progress. A living peer is silent for
// milliseconds; half a minute is a dead one, or one that is as good as dead.
const DefaultTransferSilence = 30 * time.Second

// DefaultSilentBeats lets one beat or answer be lost without harm.
const DefaultSilentBeats = 3

func (c Config) withDefaults() Config {
	if c.TP == 0 {
		c.TP = 1
	}
	if c.PP == 0 {
		c.PP = 1
	}
	if c.Mode == "" {
		c.Mode = kv.Push
	}
	if c.Lease == 0 {
		c.Lease = connector.DefaultLease
	}
	if c.RegistrationTimeout == 0 {
		c.RegistrationTimeout = connector.DefaultRegistrationTimeout
	}
	if c.TransferSilence == 0 {
		c.TransferSilence = DefaultTransferSilence
	}
	if c.SilentBeats == 0 {
		c.SilentBeats = DefaultSilentBeats
	}
	if c.QueryTimeout == 0 {
		c.QueryTimeout = peer.DefaultQueryTimeout
	}
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = peer.DefaultHandshakeTimeout
	}
	if c.QuarantineBlocks == 0 {
		c.QuarantineBlocks = 1
		if len(c.Layout.Regions) > 0 {
			c.QuarantineBlocks = max(1, c.Layout.Regions[0].NumBlocks/max(c.Layout.Ratio, 1)/4)
		}
	}
	if c.Clock == nil {
		c.Clock = peer.At
	}
	if c.Events == nil {
		c.Events = event.Discard
	}
	return c
}

// Validate reports a configuration with which no Worker can work. Every error names its field.
func (c Config) Validate() error {
	switch {
	case c.Agent == nil:
		return errors.New("worker: Agent is nil")
	case c.Peers == nil:
		return errors.New("worker: Peers is nil")
	}
	return c.validateFacts()
}

// validateFacts checks what needs no agent.
func (c Config) validateFacts() error {
	switch {
	case c.Engine == "":
		return errors.New("worker: Engine is empty; every engine needs an id")
	case c.Host == "":
		return errors.New("worker: Host is empty; peers need the side channel's host")
	case c.Port < 1 || c.Port > 65535:
		return fmt.Errorf("worker: Port is %d, want 1 to 65535", c.Port)
	case c.TP < 1 || c.PP < 1 || c.TP > maxRanks || c.PP > maxRanks || c.TP*c.PP > maxRanks:
		return fmt.Errorf("worker: TP %d x PP %d, want at least 1 each and at most %d ranks", c.TP, c.PP, maxRanks)
	case c.Rank.TP < 0 || c.Rank.TP >= c.TP || c.Rank.PP < 0 || c.Rank.PP >= c.PP:
		return fmt.Errorf("worker: Rank is PP %d, TP %d in an engine of PP %d x TP %d", c.Rank.PP, c.Rank.TP, c.PP, c.TP)
	case c.Layout.TP != c.TP || c.Layout.PP != c.PP:
		return fmt.Errorf("worker: Layout is of TP %d x PP %d in an engine of TP %d x PP %d", c.Layout.TP, c.Layout.PP, c.TP, c.PP)
	case !c.Mode.Valid():
		return fmt.Errorf("worker: Mode is %q, want %q or %q", c.Mode, kv.Push, kv.Pull)
	case c.Lease <= 0:
		return fmt.Errorf("worker: Lease is %v, want a positive duration", c.Lease)
	case c.RegistrationTimeout <= 0:
		return fmt.Errorf("worker: RegistrationTimeout is %v, want a positive duration", c.RegistrationTimeout)
	case c.TransferSilence <= 0:
		return fmt.Errorf("worker: TransferSilence is %v, want a positive duration", c.TransferSilence)
	case c.SilentBeats < 2:
		return fmt.Errorf("worker: SilentBeats is %d, want at least 2: one beat may be lost", c.SilentBeats)
	case c.QueryTimeout < 0 || c.HandshakeTimeout < 0:
		return fmt.Errorf("worker: QueryTimeout is %v, HandshakeTimeout %v, want positive durations", c.QueryTimeout, c.HandshakeTimeout)
	case c.QuarantineBlocks < 1:
		return fmt.Errorf("worker: QuarantineBlocks is %d, want at least 1", c.QuarantineBlocks)
	}
	if err := c.Layout.Validate(); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	return nil
}
