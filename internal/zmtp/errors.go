package zmtp

import (
	"errors"
	"fmt"
)

// What can go wrong, for errors.Is. All come wrapped in an [Error].
var (
	// ErrClosed: the socket was closed at this end, or its context ended.
	ErrClosed = errors.New("socket closed")
	// ErrProtocol: the peer sent bytes that ZMTP 3 with NULL does not allow.
	ErrProtocol = errors.New("protocol violation")
	// ErrLimit: the peer sent, or announced, more than Limits allows.
	ErrLimit = errors.New("limit exceeded")
	// ErrTimeout: the peer owed something and did not send it within Timeouts, its own TTL or the heartbeat.
	ErrTimeout = errors.New("peer too slow")
	// ErrRejected: the peer refused us with an ERROR command.
	ErrRejected = errors.New("rejected by the peer")
	// ErrIdentityInUse: a ROUTER of ours refused a second connection with the identity of a live one.
	ErrIdentityInUse = errors.New("identity in use by another connection")
	// ErrUnknownPeer: no live connection has that identity (and generation).
	ErrUnknownPeer = errors.New("no such peer is connected")
	// ErrQueueFull: the peer reads more slowly than it is written to. A ROUTER has dropped it.
	ErrQueueFull = errors.New("send queue full")
	// ErrTooManyConnections: a ROUTER of ours is at MaxConnections.
	ErrTooManyConnections = errors.New("too many connections")
	// ErrEvicted: a ROUTER of ours dropped this connection to make room, as its host held the most.
	ErrEvicted = errors.New("dropped to make room for another host")
	// ErrNoFrames: a message needs at least one frame.
	ErrNoFrames = errors.New("message without frames")
	// ErrAbandoned: a Req was closed because a request was given up before its reply came.
	ErrAbandoned = errors.New("an earlier request was given up before its reply came")
)

// Error says what happened, in which phase, with whom.
type Error struct {
	Phase string // "dial", "handshake", "receive", "send", "request", "listen"
	Peer  string // remote address, with the identity once known; empty when no peer is concerned
	Err   error
}

func (e *Error) Error() string {
	if e.Peer == "" {
		return fmt.Sprintf("zmtp %s: %v", e.Phase, e.Err)
	}
	return fmt.Sprintf("zmtp %s with %s: %v", e.Phase, e.Peer, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// protocolf and limitf make the reasons that the codecs report.
func protocolf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

func limitf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrLimit, fmt.Sprintf(format, args...))
}
