package event

import (
	"time"

	"github.com/kvferry/kvferry/kv"
)

// Event is one thing that happened, as plain data. Every type in this package is one.
type Event interface {
	// Kind is a stable snake_case name, used as log message, metric label and trace name.
	Kind() string
}

// Sink takes events. Emit may be called from any goroutine, must not block and must not call back
// into the emitter.
type Sink interface{ Emit(Event) }

// SinkFunc makes a Sink of a function.
type SinkFunc func(Event)

// Emit calls f.
func (f SinkFunc) Emit(e Event) { f(e) }

// Discard takes events and does nothing.
var Discard Sink = SinkFunc(func(Event) {})

// Tee gives every event to all sinks, in order.
func Tee(sinks ...Sink) Sink {
	return SinkFunc(func(e Event) {
		for _, s := range sinks {
			s.Emit(e)
		}
	})
}

// Handshakes.
type (
	// HandshakeStarted: a handshake with a peer engine was begun; only one is in flight per engine.
	HandshakeStarted struct {
		Engine kv.EngineID
		Addr   string
	}
	// HandshakeFinished: it ended. Err is nil when the peer is connected under Gen.
	HandshakeFinished struct {
		Engine    kv.EngineID
		Addr      string
		Gen       kv.Generation
		Transport string // of the first rank; empty on failure
		Why       string // why that transport
		Took      time.Duration
		Waiters   int // requests released together
		Err       error
	}
	// PeerGone: a connected peer engine was removed (lost, replaced, evicted).
	PeerGone struct {
		Engine kv.EngineID
		Gen    kv.Generation
		Reason string
	}
)

// Registrations.
type (
	// RegistrationSent: D told a P agent where to write.
	RegistrationSent struct {
		Request kv.RequestID
		Peer    kv.EngineID
		Blocks  int
	}
	// RegistrationReceived: P has a registration of D's request.
	RegistrationReceived struct {
		Request kv.RequestID // D's id
		Peer    kv.EngineID  // D
		Blocks  int
	}
	// RegistrationMatched: P paired finished blocks with a registration.
	RegistrationMatched struct {
		Request kv.RequestID // P's id
		Remote  kv.RequestID // D's id
		Peer    kv.EngineID  // D
		By      string       // "transfer_id", "id", "base_id"
	}
	// RegistrationDropped: a registration ended without a match (expired, malformed, duplicate,
	// overflow, refused).
	RegistrationDropped struct {
		Request kv.RequestID
		Peer    kv.EngineID
		Reason  string
	}
)

// Op is what a transfer does.
type Op string

const (
	Read  Op = "read"  // D's: from P's memory into its own
	Write Op = "write" // P's: from its own memory into D's
)

// Transfers. Request is the poster's id: D's of a READ, P's of a WRITE.
type (
	// TransferPosted: one READ or WRITE was started.
	TransferPosted struct {
		Request kv.RequestID
		Op      Op
		Peer    kv.EngineID
		Rank    kv.Rank
		Descs   int
		Bytes   int64
	}
	// TransferDone: all its bytes arrived.
	TransferDone struct {
		Request kv.RequestID
		Op      Op
		Peer    kv.EngineID
		Rank    kv.Rank
		Descs   int
		Bytes   int64
		Post    time.Duration
		Took    time.Duration
	}
	// TransferFailed: it could not be posted or did not end well. Phase is "post" or
	// "transfer", or "handshake" of one that there never was, because its peer cannot be reached.
	TransferFailed struct {
		Request kv.RequestID
		Op      Op
		Peer    kv.EngineID
		Rank    kv.Rank
		Phase   string
		GivenUp bool // it was cancelled, because nobody wants it any more
		Err     error
	}
	// TransferStopped: no byte of it moves any more.
	TransferStopped struct {
		Request kv.RequestID
		Op      Op
		Peer    kv.EngineID
		Rank    kv.Rank
	}
	// NotificationFailed: a notification could not be sent.
	NotificationFailed struct {
		Peer kv.EngineID
		What string
		Err  error
	}
	// NotificationDropped: one came in that nobody waits for, or that cannot be read.
	NotificationDropped struct {
		From   string
		What   string
		Reason string
	}
)

// Claims, by which D asks P for the permission to read in pull, and what either tells the other when
// it wants no more. Each is emitted once, whatever copies of its message there are.
type (
	// ClaimSent: D asks P for its blocks.
	ClaimSent struct {
		Request kv.RequestID // D's id
		Remote  kv.RequestID // P's id
		Peer    kv.EngineID  // P
		Blocks  int
	}
	// ClaimReceived: a D asks for a hold's blocks. GrantIssued or ClaimRefused follows.
	ClaimReceived struct {
		Request kv.RequestID // P's id, as D names it
		Peer    kv.EngineID  // D
		Readers int          // D's requests that will read the same
	}
	// ClaimRefused: P does not let a D read.
	ClaimRefused struct {
		Request kv.RequestID // P's id, as D names it
		Peer    kv.EngineID  // D
		Phase   string
		Reason  string
	}
	// ClaimEnded: one of D's requests is done with a hold's blocks. LeaseEnded follows the last one. How
	// is "read", "cancelled" by D, or "unread": it needed none.
	ClaimEnded struct {
		Request kv.RequestID // P's id
		Peer    kv.EngineID  // D, if it is known
		How     string
	}
	// CancelSent: D tells P that it does not want a request's KV any more.
	CancelSent struct {
		Request kv.RequestID // D's id
		Peer    kv.EngineID  // P
		Reason  string
	}
	// CancelReceived: P is told so.
	CancelReceived struct {
		Request kv.RequestID // as D names it: in push by D's id, in pull by P's
		Peer    kv.EngineID  // D
		Reason  string
	}
)

// Receives, leases, grants.
type (
	// ReceiveFinished: all of a request's KV is in place on this rank.
	ReceiveFinished struct {
		Request   kv.RequestID
		Peer      kv.EngineID
		Blocks    int
		Bytes     int64         // 0 when the backend cannot tell
		Took      time.Duration // first byte to last; 0 when the backend cannot tell
		Waited    time.Duration // registration to completion
		Transport string
		Why       string
	}
	// ReceiveFailed: a request's KV will not come; its blocks may be reused.
	// Expired: it was not begun, because the peer gives the blocks back too soon. Told: an event before has
	// said what went wrong: a handshake, a transfer or a notification of ours.
	ReceiveFailed struct {
		Request kv.RequestID
		Peer    kv.EngineID
		Phase   string
		Expired bool
		Told    bool
		Err     error
	}
	// ReceiveTimedOut: D's ledger gives a receive up of which nothing was heard for so long. ReceiveFailed
	// of its ranks follows, as cancelled.
	ReceiveTimedOut struct {
		Request kv.RequestID
		Peer    kv.EngineID
		After   time.Duration
	}
	// LeaseTaken: P keeps a finished request's blocks. LeaseEnded follows.
	LeaseTaken struct {
		Request kv.RequestID
		Until   time.Duration // from now
		Blocks  int
	}
	// LeaseRefused: P does not keep them; no lease was taken, and none ends. Reason says why: D has
	// cancelled the request before, there are too many, or the blocks cannot be handed over.
	LeaseRefused struct {
		Request kv.RequestID
		Phase   string
		Reason  string
	}
	// LeaseExtended: a heartbeat named the request.
	LeaseExtended struct {
		Request kv.RequestID
		Until   time.Duration
	}
	// LeaseEnded: the blocks of a lease that was taken are given back. Reason is "sent", "expired",
	// "failed", "cancelled" (by D), "released" (D needed nothing, or this engine was told that nobody
	// will ask).
	LeaseEnded struct {
		Request kv.RequestID
		Reason  string
	}
	// GrantIssued: a peer may write a request's blocks, or read them in pull.
	GrantIssued struct {
		Request kv.RequestID
		Peer    kv.EngineID
		Blocks  int
	}
	// GrantRevoked: it may not any more.
	GrantRevoked struct {
		Request kv.RequestID
		Reason  string
	}
	// BlocksQuarantined: a receive has failed, but its peer may still write the blocks, which wait.
	BlocksQuarantined struct {
		Request kv.RequestID
		Peer    kv.EngineID
		Blocks  int
		Reason  string
	}
	// QuarantineEnded: the peer cannot write them any more.
	QuarantineEnded struct {
		Request kv.RequestID
		Peer    kv.EngineID
		Blocks  int
		Reason  string
	}
)

func (HandshakeStarted) Kind() string     { return "handshake_started" }
func (HandshakeFinished) Kind() string    { return "handshake_finished" }
func (PeerGone) Kind() string             { return "peer_gone" }
func (RegistrationSent) Kind() string     { return "registration_sent" }
func (RegistrationReceived) Kind() string { return "registration_received" }
func (RegistrationMatched) Kind() string  { return "registration_matched" }
func (RegistrationDropped) Kind() string  { return "registration_dropped" }
func (TransferPosted) Kind() string       { return "transfer_posted" }
func (TransferDone) Kind() string         { return "transfer_done" }
func (TransferFailed) Kind() string       { return "transfer_failed" }
func (TransferStopped) Kind() string      { return "transfer_stopped" }
func (NotificationFailed) Kind() string   { return "notification_failed" }
func (NotificationDropped) Kind() string  { return "notification_dropped" }
func (ClaimSent) Kind() string            { return "claim_sent" }
func (ClaimReceived) Kind() string        { return "claim_received" }
func (ClaimRefused) Kind() string         { return "claim_refused" }
func (ClaimEnded) Kind() string           { return "claim_ended" }
func (CancelSent) Kind() string           { return "cancel_sent" }
func (CancelReceived) Kind() string       { return "cancel_received" }
func (ReceiveFinished) Kind() string      { return "receive_finished" }
func (ReceiveFailed) Kind() string        { return "receive_failed" }
func (ReceiveTimedOut) Kind() string      { return "receive_timed_out" }
func (LeaseTaken) Kind() string           { return "lease_taken" }
func (LeaseRefused) Kind() string         { return "lease_refused" }
func (LeaseExtended) Kind() string        { return "lease_extended" }
func (LeaseEnded) Kind() string           { return "lease_ended" }
func (GrantIssued) Kind() string          { return "grant_issued" }
func (GrantRevoked) Kind() string         { return "grant_revoked" }
func (BlocksQuarantined) Kind() string    { return "blocks_quarantined" }
func (QuarantineEnded) Kind() string      { return "quarantine_ended" }
