package agent

import (
	"fmt"
	"time"
)

// Event is what an agent delivers: Result, Stopped, Notification, PeerLost.
type Event interface{ agentEvent() }

// Outcome is how a transfer ended.
type Outcome uint8

const (
	OutcomeDone      Outcome = iota // every byte is in place and, for a WRITE, known to be whole
	OutcomeFailed                   // the peer or the transport refused or broke it
	OutcomePeerLost                 // the peer was removed or its connection is gone
	OutcomeDeadline                 // no progress for Transfer.Silence
	OutcomeCancelled                // Cancel
	OutcomeClosed                   // the agent was closed
)

var outcomeNames = [...]string{"done", "failed", "peer lost", "deadline", "cancelled", "closed"}

func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome %d", uint8(o))
}

// Result tells how a transfer ended; it comes exactly once for each posted transfer. Bytes may
// still move until Stopped unless the outcome is OutcomeDone.
type Result struct {
	Transfer TransferID
	Peer     PeerID
	Outcome  Outcome
	Err      error         // nil for OutcomeDone; names peer and cause otherwise
	Bytes    int64         // bytes of the whole transfer when done
	Descs    int           // descriptor pairs
	Post     time.Duration // from the call of Post to the first byte handed to the transport
	Took     time.Duration // from the call of Post to the result
}

// Stopped tells that no byte of the transfer moves any more: local memory may be reused, and (for a
// WRITE to a peer that can refuse) nothing more of it reaches the peer's memory. It comes exactly
// once, after the Result.
type Stopped struct {
	Transfer TransferID
	Peer     PeerID
}

// Arrival is what the receiver saw of the WRITE that a notification was attached to.
type Arrival struct {
	Bytes int64
	Took  time.Duration // from its first byte to its last
}

// Notification is a byte string from a peer, in the order that the peer sent.
type Notification struct {
	From    PeerID   // a peer that connected to us has an id of its own kind, see Name
	Msg     []byte   // owned by the reader
	Arrival *Arrival // set when it was attached to a WRITE and the backend can tell
}

// PeerLost tells that a connection with a peer agent is gone: one that AddPeer gave, or one by
// which the peer had reached us (Inbound). It comes at most once per PeerID and after all of its
// notifications.
type PeerLost struct {
	Peer    PeerID
	Inbound bool
	Err     error
}

func (Result) agentEvent()       {}
func (Stopped) agentEvent()      {}
func (Notification) agentEvent() {}
func (PeerLost) agentEvent()     {}
