package scheduler

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// Config is what a Half must know of its engine. Zero durations and a nil Events mean the default.
type Config struct {
	Engine kv.EngineID // this engine
	Host   string      // of its side channel, as peers reach it
	Port   int         // of its side channel
	TP     int         // tensor-parallel ranks; default 1
	PP     int         // pipeline stages; default 1
	Role   connector.Role
	Mode   kv.TransferMode // who moves the bytes; default kv.Push

	BlockSize int // tokens per logical block

	// Lease is how long P keeps a finished request's blocks without a sign of life of D. Default
	// connector.DefaultLease.
	Lease time.Duration
	// RegistrationTimeout is how long D waits for a registered request's KV without progress of its
	// prefill engine. Default connector.DefaultRegistrationTimeout.
	RegistrationTimeout time.Duration

	// Bidirectional lets D keep a finished request's blocks for the next turn of its conversation, and P
	// read them back then. Pull only.
	Bidirectional bool
	// DecoderBlocksTTL is how long D keeps them. Default connector.DefaultDecoderBlocksTTL.
	DecoderBlocksTTL time.Duration
	// Clock tells what the clock of this engine's side channel shows at a moment, in seconds: peers
	// learn its offset from theirs in the handshake. Needed with Bidirectional.
	Clock func(time.Time) float64
	// RecomputeThreshold is the number of tokens below which they are computed here instead of
	// brought by a peer, whoever moves the bytes; 0 = off.
	RecomputeThreshold int

	// Events takes what happens; default event.Discard.
	Events event.Sink
}

// withDefaults fills what was left out.
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
	if c.DecoderBlocksTTL == 0 {
		c.DecoderBlocksTTL = connector.DefaultDecoderBlocksTTL
	}
	if c.Events == nil {
		c.Events = event.Discard
	}
	return c
}

// Validate reports a configuration with which no Half can work. Every error names its field.
func (c Config) Validate() error {
	switch {
	case c.Engine == "":
		return errors.New("scheduler: Engine is empty; every engine needs an id")
	case c.Host == "":
		return errors.New("scheduler: Host is empty; peers need the side channel's host")
	case c.Port < 1 || c.Port > 65535:
		return fmt.Errorf("scheduler: Port is %d, want 1 to 65535", c.Port)
	case c.TP < 1 || c.PP < 1 || c.TP > maxRanks || c.PP > maxRanks || c.TP*c.PP > maxRanks:
		return fmt.Errorf("scheduler: TP %d x PP %d, want at least 1 each and at most %d ranks", c.TP, c.PP, maxRanks)
	case c.Role != connector.Producer && c.Role != connector.Consumer && c.Role != connector.Both:
		return fmt.Errorf("scheduler: Role is %q, want %q, %q or %q", c.Role, connector.Producer, connector.Consumer, connector.Both)
	case !c.Mode.Valid():
		return fmt.Errorf("scheduler: Mode is %q, want %q or %q", c.Mode, kv.Push, kv.Pull)
	case c.BlockSize < 1:
		return fmt.Errorf("scheduler: BlockSize is %d, want at least 1 token", c.BlockSize)
	case c.Lease <= 0:
		return fmt.Errorf("scheduler: Lease is %v, want a positive duration", c.Lease)
	case c.RegistrationTimeout <= 0:
		return fmt.Errorf("scheduler: RegistrationTimeout is %v, want a positive duration", c.RegistrationTimeout)
	case c.Bidirectional && c.Mode != kv.Pull:
		return fmt.Errorf("scheduler: Bidirectional is set and Mode is %q; only a pull engine can read back what a decode engine kept: choose %q, or leave it off",
			c.Mode, kv.Pull)
	case c.Bidirectional && c.Clock == nil:
		return errors.New("scheduler: Clock is nil; Bidirectional needs the side channel's clock")
	case c.DecoderBlocksTTL <= 0:
		return fmt.Errorf("scheduler: DecoderBlocksTTL is %v, want a positive duration", c.DecoderBlocksTTL)
	case c.RecomputeThreshold < 0:
		return fmt.Errorf("scheduler: RecomputeThreshold is %d, want 0 or more tokens", c.RecomputeThreshold)
	}
	return nil
}
