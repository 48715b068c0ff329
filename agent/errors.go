package agent

import (
	"errors"
	"fmt"
)

// ErrClosed is returned by every method of a closed agent.
var ErrClosed = errors.New("the agent is closed")

// ErrBusy is returned by Post when as many transfers are in flight as the agent takes. The caller
// tries again after a Stopped.
var ErrBusy = errors.New("too many transfers in flight")

// PeerError is a failure to reach, admit or notify a peer.
type PeerError struct {
	Peer  Name   // as far as it is known
	Addr  string // as far as it is known
	Phase string // "offer", "dial", "hello", "notify", …
	Err   error
}

func (e *PeerError) Error() string {
	who := string(e.Peer)
	if e.Addr != "" {
		who += " at " + e.Addr
	}
	return fmt.Sprintf("peer agent %s: %s: %v", who, e.Phase, e.Err)
}

func (e *PeerError) Unwrap() error { return e.Err }

// PostError is a transfer that was refused before any byte moved.
type PostError struct {
	Op     Op
	Reason string
}

func (e *PostError) Error() string { return "transfer refused: " + e.Reason }

// LimitError is a request beyond a limit of this agent.
type LimitError struct {
	What  string
	Got   int
	Limit int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%s: %d is beyond the limit of %d", e.What, e.Got, e.Limit)
}
