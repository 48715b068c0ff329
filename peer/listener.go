package peer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Listen opens a side channel's port: host:port, of which an empty host means loopback (127.0.0.1),
// not every interface. A port in use is an error of one line that names the address.
func Listen(addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("side channel address %q: %w", addr, err)
	}
	if host == "" {
		addr = net.JoinHostPort("127.0.0.1", port)
	}
	ln, err := net.Listen("tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("side channel: %s is in use by another program; choose another port: %w", addr, syscall.EADDRINUSE)
	case err != nil:
		return nil, fmt.Errorf("side channel: %w", err)
	}
	return ln, nil
}

// ListenerConfig is what a Listener needs beside its port. The zero value is usable.
type ListenerConfig struct {
	// Clock is our monotonic clock in seconds, told in each reply. nil: Now.
	Clock func() float64
	// Events takes BadRequest. nil: event.Discard.
	Events event.Sink
	// Asked is called for every request that is answered, by whomever it is; it must not block. nil: nobody
	// wants to know.
	Asked func()
}

// Listener is the side channel of one engine: it answers for every rank (nixl-connector.md, section
// 2). Methods may be called from any goroutine.
//
// What it answers, stock listeners answer too, a wrong magic included. A request that would end a
// stock listener (malformed, other parts than one, unknown rank) ends the connection that it came
// on: the protocol has no reply that says no, and a client that is not told must wait for its
// timeout. Other clients notice nothing.
type Listener struct {
	router *zmtp.Router
	clock  func() float64
	events event.Sink
	asked  func()
	done   chan struct{} // closed when serve has ended

	mu struct {
		sync.Mutex
		ranks   map[kv.Rank]served
		reasons map[zmtp.Peer]string // why we end a connection, until its end is told
		warn    limiter
	}
}

// served is the frozen answer of one rank.
type served struct {
	gen     kv.Generation
	payload []byte
}

// NewListener serves on ln, which it owns from then on. Ranks that are not Set are unknown.
func NewListener(ln net.Listener, cfg ListenerConfig) (*Listener, error) {
	l := &Listener{clock: cfg.Clock, events: cfg.Events, done: make(chan struct{})}
	if l.clock == nil {
		l.clock = Now
	}
	if l.events == nil {
		l.events = event.Discard
	}
	if l.asked = cfg.Asked; l.asked == nil {
		l.asked = func() {}
	}
	l.mu.ranks = make(map[kv.Rank]served)
	l.mu.reasons = make(map[zmtp.Peer]string)
	var err error
	l.router, err = zmtp.Listen(context.Background(), ln, zmtp.Options{
		Limits: zmtp.Limits{MaxFrameBytes: maxRequest, MaxMessageBytes: maxRequest, MaxFrames: maxRequestFrames, SendMessages: maxWaitingReplies},
		OnEnd:  l.ended,
	})
	if err != nil {
		return nil, fmt.Errorf("side channel: %w", err)
	}
	go l.serve()
	return l, nil
}

// Set gives the encoded wire.HandshakePayload of a rank, which is copied. It replaces what was given
// before only if gen is greater than then; equal bytes under the same gen are accepted silently.
func (l *Listener) Set(rank kv.Rank, gen kv.Generation, payload []byte) error {
	if _, err := wire.DecodeHandshakePayload(payload); err != nil {
		return fmt.Errorf("side channel: rank pp %d tp %d: %w", rank.PP, rank.TP, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	old, known := l.mu.ranks[rank]
	switch {
	case known && gen == old.gen && bytes.Equal(payload, old.payload):
		return nil
	case gen <= old.gen:
		return fmt.Errorf("side channel: rank pp %d tp %d is served under generation %d; other metadata needs a greater one, not %d",
			rank.PP, rank.TP, old.gen, gen)
	case !known && len(l.mu.ranks) >= maxServedRanks:
		return fmt.Errorf("side channel: more than %d ranks", maxServedRanks)
	}
	l.mu.ranks[rank] = served{gen: gen, payload: bytes.Clone(payload)}
	return nil
}

// Addr is where the listener is bound.
func (l *Listener) Addr() net.Addr { return l.router.Addr() }

// Close ends all connections and returns when no goroutine of the listener is left. It may be called
// again.
func (l *Listener) Close() error {
	err := l.router.Close()
	<-l.done
	return err
}

// serve is the goroutine that answers.
func (l *Listener) serve() {
	defer close(l.done)
	for {
		m, err := l.router.Recv(context.Background())
		if err != nil {
			return // closed
		}
		l.answer(m)
	}
}

// answer serves one request. Sending never blocks: a client that does not read its answers loses its
// connection.
func (l *Listener) answer(m zmtp.Message) {
	payload, odd, err := l.find(m.Frames)
	if err != nil {
		l.end(m.Peer, err.Error())
		return
	}
	l.asked()
	if odd {
		l.warn(BadRequest{From: fmt.Sprintf("client %q", m.Identity), Answered: true, Reason: "the request does not begin with get_meta_msg; it may be meant for something else"})
	}
	_ = l.router.Send(m.Peer, []byte{}, payload, wire.AppendClock(nil, l.clock())) // an error means that the client is gone
}

// find returns what a request asks for. odd tells of a wrong magic. Frames are what follows the
// client's identity; the delimiter may hold anything, as for stock.
func (l *Listener) find(frames [][]byte) (payload []byte, odd bool, err error) {
	if len(frames) != 2 {
		return nil, false, fmt.Errorf("a request of %d frames instead of an empty one and one more", len(frames))
	}
	q, magicOK, err := wire.DecodeHandshakeRequest(frames[1])
	if err != nil {
		return nil, false, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s, ok := l.mu.ranks[kv.Rank{PP: q.PP, TP: q.TP}]
	if !ok {
		return nil, false, fmt.Errorf("asked for rank pp %d tp %d, which this engine does not have; the client's tp_size or pp_size may be wrong", q.PP, q.TP)
	}
	return s.payload, !magicOK, nil
}

// end closes a client's connection; ended tells why.
func (l *Listener) end(p zmtp.Peer, reason string) {
	l.mu.Lock()
	l.mu.reasons[p] = reason
	l.mu.Unlock()
	if !l.router.Drop(p) {
		l.mu.Lock()
		delete(l.mu.reasons, p) // it had left by itself
		l.mu.Unlock()
	}
}

// ended is called when a connection is over.
func (l *Listener) ended(p zmtp.Peer, addr string, err error) {
	l.mu.Lock()
	reason, ours := l.mu.reasons[p]
	delete(l.mu.reasons, p)
	l.mu.Unlock()
	switch {
	case ours:
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, zmtp.ErrClosed), errors.Is(err, syscall.ECONNRESET):
		return // it has simply gone, or we have
	default:
		reason = bare(err).Error()
	}
	l.warn(BadRequest{From: addr, Reason: reason})
}

// warn emits a warning unless there were many just now.
func (l *Listener) warn(w BadRequest) {
	l.mu.Lock()
	suppressed, ok := l.mu.warn.allow(time.Now())
	l.mu.Unlock()
	if ok {
		w.Suppressed = suppressed
		l.events.Emit(w)
	}
}

// BadRequest tells that a client of the side channel sent something that is not a good request.
// Warnings are limited in rate; Suppressed counts those left out since the last one.
type BadRequest struct {
	From       string // the client's address; its ZMTP identity if it was answered
	Answered   bool   // as stock does for a request with a wrong magic; else its connection is closed
	Reason     string
	Suppressed int
}

// Kind is the event's name.
func (BadRequest) Kind() string { return "side_channel_bad_request" }

// limiter lets warnBurst warnings pass at once and then one per warnEvery. The zero value is ready.
type limiter struct {
	spent      int       // of the burst
	since      time.Time // of the oldest one not yet earned back
	suppressed int
}

func (l *limiter) allow(now time.Time) (suppressed int, ok bool) {
	if l.spent > 0 {
		earned := min(int(now.Sub(l.since)/warnEvery), l.spent)
		l.spent -= earned
		l.since = l.since.Add(time.Duration(earned) * warnEvery)
	}
	if l.spent >= warnBurst {
		l.suppressed++
		return 0, false
	}
	if l.spent == 0 {
		l.since = now
	}
	l.spent++
	suppressed, l.suppressed = l.suppressed, 0
	return suppressed, true
}
