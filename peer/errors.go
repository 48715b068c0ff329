package peer

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/kv"
)

// ErrClosed ends the waiters of a table that is closed.
var ErrClosed = errors.New("the peer table is closed")

// Phase is where a handshake failed.
type Phase string

const (
	PhaseTarget   Phase = "target"        // what to connect makes no sense, or a limit is reached
	PhaseQueue    Phase = "queue"         // no slot came free in time
	PhaseDial     Phase = "dial"          // connecting, ZMTP handshake included
	PhaseQuery    Phase = "query"         // asking and waiting for the answer
	PhaseReply    Phase = "reply"         // the answer's frames, outer map, clock
	PhaseHash     Phase = "compatibility" // *HashMismatchError
	PhaseMetadata Phase = "metadata"      // the inner map
	PhaseIdentity Phase = "identity"      // *WrongEngineError
	PhaseRanks    Phase = "ranks"         // *RankMismatchError
	PhaseOffers   Phase = "transports"    // *NoTransportError
	PhaseAdmit    Phase = "admission"     // agent.AddPeer
	PhaseLost     Phase = "loss"          // an agent lost the peer before the handshake ended
)

// HandshakeError is a handshake that failed. Nothing of it is left, and the next Ensure tries anew.
type HandshakeError struct {
	Engine  kv.EngineID
	Addr    string
	Phase   Phase
	Rank    kv.Rank // whom it was about; meaningful in the phases that ask or admit a rank
	Waiters int     // requests that waited for this handshake and are failed with it
	Err     error
}

func (e *HandshakeError) Error() string {
	s := fmt.Sprintf("handshake with engine %q at %s failed in %s", e.Engine, e.Addr, e.Phase)
	return fmt.Sprintf("%s: %v", s, e.Err)
}

func (e *HandshakeError) Unwrap() error { return e.Err }
