package peer

import (
	"context"
	"net"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// Config is what a Table needs. The zero value of every field but Agent and Hash has a meaning.
type Config struct {
	// Agent admits the peers. The Table owns the peers that it adds, not the agent. Required.
	Agent agent.Agent
	// Self is our own engine id: a handshake with it is refused, and a peer address that leads
	// back to us is named as such. Empty: unknown.
	Self kv.EngineID
	// Hash is our compatibility hash, 64 lower-case hexadecimal digits. Required.
	Hash string
	// EnforceHash refuses peers with another hash (enforce_handshake_compat of stock, which has it
	// on by default). The zero value does not.
	EnforceHash bool
	// LocalFactors describes what went into Hash, for people: it is quoted in a refusal.
	LocalFactors string
	// Dial opens the side channel's connection. nil: net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// QueryTimeout bounds the dial, each question and each admission. 0: DefaultQueryTimeout.
	QueryTimeout time.Duration
	// HandshakeTimeout bounds a handshake as a whole. 0: DefaultHandshakeTimeout.
	HandshakeTimeout time.Duration
	// TTL is how long a peer without use stays. 0: DefaultTTL; below 0: for ever. (engine_ttl of
	// stock says "for ever" with 0 too; who reads that setting translates.)
	TTL time.Duration
	// MaxParallel bounds active handshakes, MaxPeers the table. 0: the defaults.
	MaxParallel int
	MaxPeers    int
	// Clock is our monotonic clock in seconds, for ClockSample. nil: Now.
	Clock func() float64
	// Events takes HandshakeStarted, HandshakeFinished and PeerGone. nil: event.Discard.
	Events event.Sink
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error { panic("peer: not written yet") }

// Table holds the connected peers of one rank and runs the handshakes that connect them. Its
// methods may be called from any goroutine and do not block, except Close.
type Table struct{}

// NewTable makes an empty table.
func NewTable(cfg Config) (*Table, error) { panic("peer: not written yet") }

// Ensure returns the target's engine if it is connected at the target's address with all of the
// target's ranks; done is never called then. Otherwise it returns nil, and done is called exactly
// once, from another goroutine, when the handshake ends that this caller started or joined: with
// the peer, or with an error (*HandshakeError, or ErrClosed). done must not block, and must not
// call Close; it may call every other method.
//
// Ensure counts as use of the peer.
func (t *Table) Ensure(target Target, done func(*Connected, error)) *Connected {
	panic("peer: not written yet")
}

// Lookup returns a connected engine or nil. It starts nothing and does not count as use.
func (t *Table) Lookup(engine kv.EngineID) *Connected { panic("peer: not written yet") }

// Pin says that work is in flight with this generation of the engine: it will not be evicted until
// as many Unpins. It reports false, and pins nothing, when that generation is gone.
func (t *Table) Pin(engine kv.EngineID, gen kv.Generation) bool { panic("peer: not written yet") }

// Unpin ends one Pin that reported true, and counts as use. When the generation is gone by now, it
// does nothing.
func (t *Table) Unpin(engine kv.EngineID, gen kv.Generation) { panic("peer: not written yet") }

// Lost says that an agent reported agent.PeerLost for a peer that was not inbound. The generation
// of the engine that it belongs to is gone, with the agents of all its ranks, whatever is pinned;
// the next Ensure shakes hands anew. An id that the table does not know is ignored. A handshake
// that has just added this peer fails.
func (t *Table) Lost(id agent.PeerID, err error) { panic("peer: not written yet") }

// Drop removes a generation of an engine for a reason of the caller's, e.g. a geometry that does not
// fit. A generation that is gone is ignored.
func (t *Table) Drop(engine kv.EngineID, gen kv.Generation, reason string) {
	panic("peer: not written yet")
}

// Close cancels every handshake, ends their waiters with ErrClosed, removes all peers from the agent
// and returns when no goroutine of the table is left. It may be called again.
func (t *Table) Close() { panic("peer: not written yet") }
