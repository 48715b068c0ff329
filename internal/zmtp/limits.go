package zmtp

import (
	"errors"
	"fmt"
	"time"
)

// Defaults of Limits and Timeouts, with their reasons.
const (
	// DefaultMaxFrameBytes and DefaultMaxMessageBytes: the largest message of any kvferry protocol is agent
	// metadata or a lookup of some ten thousand keys, both around 1 MiB; 16 MiB leaves room.
	DefaultMaxFrameBytes   = 16 << 20
	DefaultMaxMessageBytes = 16 << 20
	// DefaultMaxFrames: the longest known message has 4 frames.
	DefaultMaxFrames = 64
	// DefaultMaxConnections: some hundred peers with one connection per rank.
	DefaultMaxConnections = 1024
	// DefaultInboxMessages and DefaultInboxBytes: what one connection may have waiting for Recv before it is
	// no longer read. Its sender then feels TCP's back-pressure; others feel nothing.
	DefaultInboxMessages = 256
	DefaultInboxBytes    = 4 << 20
	// DefaultBufferedBytes: what all connections of a ROUTER may hold together, in inboxes and in messages
	// that are not yet complete. Beyond it the greediest connection of the greediest host is dropped.
	DefaultBufferedBytes = 256 << 20
	// DefaultSendMessages and DefaultSendBytes: what may wait for a peer that reads slowly.
	DefaultSendMessages = 256
	DefaultSendBytes    = 32 << 20

	// DefaultHandshakeTimeout: two round trips and a busy peer.
	DefaultHandshakeTimeout = 10 * time.Second
	// DefaultStallTimeout: a stopped peer comes back within this, or is treated as gone.
	DefaultStallTimeout = 30 * time.Second
)

// Fixed bounds of the protocol and of this implementation.
const (
	maxIdentityBytes  = 255                    // ZMTP 3.1: identity is at most 255 octets
	maxPingContext    = 16                     // ZMTP 3.1: ping-context = 0*16OCTET
	maxErrorReason    = 255                    // ZMTP 3.1: one length octet
	maxCommandBytes   = 8 << 10                // the largest real command is READY, under 400 bytes
	maxReadyProps     = 32                     // libzmq sends 2
	readBufferBytes   = 4 << 10                // per connection, for headers and small frames
	growStep          = 64 << 10               // first step of a large frame's buffer; also the progress asked per StallTimeout
	coalesceBytes     = 16 << 10               // small frames are joined up to this before a write
	copyBelow         = 4 << 10                // frames below this are copied into the joined write
	writeChunkBytes   = 64 << 10               // a large frame is written in pieces of this, each with its own deadline
	frameOverhead     = 32                     // what a queued frame costs beside its bytes: an empty frame is not free
	messageOverhead   = 64                     // the same per message
	duplicateGrace    = 500 * time.Millisecond // how long a duplicate identity waits for the old connection's end
	refuseLinger      = time.Second            // how long a refused peer may take to read the ERROR
	refuseDrainBytes  = 64 << 10               // what is read and thrown away meanwhile, to avoid a reset
	acceptBackoffMin  = 5 * time.Millisecond   // after an Accept error such as "too many open files"
	acceptBackoffMax  = time.Second
	maxHeartbeatTTL   = 6553500 * time.Millisecond // uint16 of tenths of a second
	heartbeatTTLGrain = 100 * time.Millisecond
)

// Limits bounds what one socket holds for strangers. The zero value of a field means its default.
// Sizes are payload bytes.
type Limits struct {
	MaxFrameBytes   int // one frame, received
	MaxFrames       int // frames of one message, received
	MaxMessageBytes int // all frames of one message together, received
	MaxConnections  int // ROUTER: connections at once, counting ended ones whose messages wait for Recv
	InboxMessages   int // messages of one connection that wait for Recv; when reached the connection is not read
	InboxBytes      int // the same in bytes; one message may exceed it
	BufferedBytes   int // ROUTER: bytes of all connections, waiting or incomplete; beyond it one is dropped
	SendMessages    int // messages that wait to be written to one peer
	SendBytes       int // the same in bytes; a message into an empty queue may exceed it
}

// Timeouts bounds every wait for a peer that owes something. A peer that owes nothing may be silent for ever.
// The zero value of a field means its default.
type Timeouts struct {
	Handshake time.Duration // from connection to READY, in all
	Stall     time.Duration // a message begun must finish, or advance by 64 KiB, within this; both directions
}

// Heartbeat makes this end send PINGs. The zero value sends none (and still answers those of the peer and
// honours their TTL). With Every set, a peer from which nothing comes for Every+Timeout is dropped.
type Heartbeat struct {
	Every   time.Duration
	Timeout time.Duration // default: Every
	TTL     time.Duration // told to the peer, which drops us after that silence; tenths of a second, 0 for none
}

// withDefaults fills the fields left zero.
func (l Limits) withDefaults() Limits {
	set := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	set(&l.MaxFrameBytes, DefaultMaxFrameBytes)
	set(&l.MaxFrames, DefaultMaxFrames)
	set(&l.MaxMessageBytes, DefaultMaxMessageBytes)
	set(&l.MaxConnections, DefaultMaxConnections)
	set(&l.InboxMessages, DefaultInboxMessages)
	set(&l.InboxBytes, DefaultInboxBytes)
	set(&l.BufferedBytes, DefaultBufferedBytes)
	set(&l.SendMessages, DefaultSendMessages)
	set(&l.SendBytes, DefaultSendBytes)
	return l
}

func (l Limits) validate() error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"MaxFrameBytes", l.MaxFrameBytes}, {"MaxFrames", l.MaxFrames}, {"MaxMessageBytes", l.MaxMessageBytes},
		{"MaxConnections", l.MaxConnections}, {"InboxMessages", l.InboxMessages}, {"InboxBytes", l.InboxBytes},
		{"BufferedBytes", l.BufferedBytes}, {"SendMessages", l.SendMessages}, {"SendBytes", l.SendBytes},
	} {
		if f.value < 0 {
			return fmt.Errorf("limit %s is %d: it must be positive, or 0 for its default", f.name, f.value)
		}
	}
	return nil
}

func (t Timeouts) withDefaults() Timeouts {
	if t.Handshake == 0 {
		t.Handshake = DefaultHandshakeTimeout
	}
	if t.Stall == 0 {
		t.Stall = DefaultStallTimeout
	}
	return t
}

func (t Timeouts) validate() error {
	if t.Handshake < 0 || t.Stall < 0 {
		return fmt.Errorf("timeouts are %v (handshake) and %v (stall): they must be positive, or 0 for the default", t.Handshake, t.Stall)
	}
	return nil
}

func (h Heartbeat) withDefaults() Heartbeat {
	if h.Timeout == 0 {
		h.Timeout = h.Every
	}
	return h
}

func (h Heartbeat) validate() error {
	switch {
	case h.Every < 0 || h.Timeout < 0 || h.TTL < 0:
		return errors.New("heartbeat times must not be negative")
	case h.Every == 0 && (h.Timeout != 0 || h.TTL != 0):
		return errors.New("heartbeat timeout or TTL without an interval (Every)")
	case h.TTL > maxHeartbeatTTL:
		return fmt.Errorf("heartbeat TTL %v is over %v, the most that a PING can say", h.TTL, maxHeartbeatTTL)
	}
	return nil
}
