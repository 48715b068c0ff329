package peer

import (
	"net"

	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// Listen opens a side channel's port: host:port, of which an empty host means loopback (127.0.0.1),
// not every interface. A port in use is an error of one line that names the address.
func Listen(addr string) (net.Listener, error) { panic("peer: not written yet") }

// ListenerConfig is what a Listener needs beside its port. The zero value is usable.
type ListenerConfig struct {
	// Clock is our monotonic clock in seconds, told in each reply. nil: Now.
	Clock func() float64
	// Events takes BadRequest. nil: event.Discard.
	Events event.Sink
}

// Listener is the side channel of one engine: it answers for every rank (nixl-connector.md, section
// 2). Methods may be called from any goroutine.
type Listener struct{}

// NewListener serves on ln, which it owns from then on. Ranks that are not Set are unknown.
func NewListener(ln net.Listener, cfg ListenerConfig) *Listener { panic("peer: not written yet") }

// Set gives the encoded wire.HandshakePayload of a rank, which is copied. It replaces what was given
// before only if gen is greater than then; equal bytes under the same gen are accepted silently.
func (l *Listener) Set(rank kv.Rank, gen kv.Generation, payload []byte) error {
	panic("peer: not written yet")
}

// Addr is where the listener is bound.
func (l *Listener) Addr() net.Addr { panic("peer: not written yet") }

// Close ends all connections and returns when no goroutine of the listener is left.
func (l *Listener) Close() error { panic("peer: not written yet") }

// BadRequest tells that a client of the side channel sent something that is not a good request.
// Warnings are limited in rate; Suppressed counts those left out since the last one.
type BadRequest struct {
	From       string // the client's address
	Answered   bool   // as stock does for a request with a wrong magic; else its connection is closed
	Reason     string
	Suppressed int
}

// Kind is the event's name.
func (BadRequest) Kind() string { return "side_channel_bad_request" }
