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
)

// PushFailCapability is the capability by which a rank announces, in its kvferry extension, that it
// understands PUSH_FAIL. It is sent to no other peer.
const PushFailCapability = "push_fail"

// Capabilities are the capabilities that a rank with this worker announces.
func Capabilities() []string { return []string{PushFailCapability} }

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
	TP, PP int // our engine's sizes; default 1

	// Agent moves the bytes. The worker is the only reader of its events and closes it. It must be
	// able to revoke exactly.
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
	// TransferSilence bounds the time without progress of one WRITE. Default 30 s.
	TransferSilence time.Duration

	// Events takes what happens; default event.Discard.
	Events event.Sink
}

// DefaultTransferSilence is how long a WRITE may make no progress. A living peer is silent for
// milliseconds; half a minute is a dead one, or one that is as good as dead.
const DefaultTransferSilence = 30 * time.Second

func (c Config) withDefaults() Config {
	if c.TP == 0 {
		c.TP = 1
	}
	if c.PP == 0 {
		c.PP = 1
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
	case !c.Agent.Capabilities().Revocable:
		return errors.New("worker: the agent cannot revoke grants exactly, so that blocks could be written after they were given back")
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
	case c.Lease <= 0:
		return fmt.Errorf("worker: Lease is %v, want a positive duration", c.Lease)
	case c.RegistrationTimeout <= 0:
		return fmt.Errorf("worker: RegistrationTimeout is %v, want a positive duration", c.RegistrationTimeout)
	case c.TransferSilence <= 0:
		return fmt.Errorf("worker: TransferSilence is %v, want a positive duration", c.TransferSilence)
	}
	if err := c.Layout.Validate(); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	return nil
}
