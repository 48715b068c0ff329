package zmtp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// link is one connection, from either end. Its reader goroutine (run) owns it; the writer goroutine owns the
// sending half. kill ends both, from anywhere; ended is closed when both are gone and the end was reported.
type link struct {
	conn net.Conn
	kind socketType
	opts *Options
	rd   *reader
	out  *sendQueue
	addr string

	peer    Peer // set before up is closed, constant afterwards
	minor   byte // the peer's ZMTP 3 minor version, likewise
	greeted bool // the peer speaks ZMTP 3; the reader goroutine's

	up    chan struct{} // closed when the handshake is done
	done  chan struct{} // closed by kill
	wrote chan struct{} // closed when the writer goroutine is gone
	ended chan struct{} // closed last

	writeErr error       // why the writer gave up, if it did; set before wrote is closed
	patience *time.Timer // kills the link some time after that; likewise

	death struct {
		sync.Once
		err error // set before done is closed
	}

	// accept decides over a peer whose READY came, and sets peer. A ROUTER's queues its own READY; others sent
	// it before.
	accept func(r ready, ourReady []byte) error
	// deliver takes a message; it may wait until there is room for the next one.
	deliver func(frames [][]byte) error
	// onEnd is told of the end, as the last act of the reader goroutine.
	onEnd func(err error)
}

func newLink(conn net.Conn, kind socketType, opts *Options) *link {
	l := &link{
		conn: conn, kind: kind, opts: opts,
		rd:   newReader(conn, &opts.Limits, opts.Timeouts.Stall),
		out:  newSendQueue(&opts.Limits),
		addr: "unknown address",
		up:   make(chan struct{}), done: make(chan struct{}),
		wrote: make(chan struct{}), ended: make(chan struct{}),
		onEnd: func(error) {},
	}
	l.accept = func(r ready, _ []byte) error {
		l.peer.Identity = r.identity
		return nil
	}
	if a := conn.RemoteAddr(); a != nil {
		l.addr = a.String()
	}
	return l
}

// start runs the link's two goroutines.
func (l *link) start() {
	go l.write()
	go l.run()
}

// run is the reader goroutine: the link's whole life.
func (l *link) run() {
	phase := "handshake"
	err := l.handshake()
	if err == nil {
		close(l.up)
		phase = "receive"
		err = l.receive()
	}
	l.refuse(err)
	l.kill(phase, err)
	<-l.wrote
	if l.patience != nil {
		l.patience.Stop()
	}
	l.onEnd(l.death.err)
	close(l.ended)
}

// kill ends the link; the first reason counts. It does not block.
func (l *link) kill(phase string, err error) {
	l.death.Do(func() {
		l.death.err = l.errorf(phase, err)
		close(l.done)
		l.out.seal()
		_ = l.conn.Close() // its error could change nothing
	})
}

// err is why the link was killed. Call after done is closed.
func (l *link) err() error {
	<-l.done
	return l.death.err
}

// errorf wraps an error with who the peer is, as far as that is known.
func (l *link) errorf(phase string, err error) error {
	name := l.addr
	select {
	case <-l.up:
		if l.peer.Identity != "" {
			name = fmt.Sprintf("%s (%q)", l.addr, l.peer.Identity)
		}
	default:
	}
	return &Error{Phase: phase, Peer: name, Err: err}
}

// handshake exchanges greeting and READY, all within Timeouts.Handshake.
func (l *link) handshake() error {
	l.rd.due = time.Now().Add(l.opts.Timeouts.Handshake)
	l.out.pushRaw(appendGreeting(nil, l.opts.Identity))
	g, err := l.rd.greeting()
	if err != nil {
		return err
	}
	l.greeted = true
	if l.minor = g.minor; g.major > versionMajor {
		l.minor = versionMinor // a later peer speaks our version with us
	}
	ourReady := appendReady(nil, ready{l.kind, l.opts.Identity})
	if l.kind != typeRouter {
		l.out.pushRaw(ourReady)
	}
	c, err := l.rd.handshakeCommand()
	if err != nil {
		return err
	}
	if c.name == commandError {
		return rejected(c)
	}
	if c.name != commandReady {
		return protocolf("command %.20q where READY was due", c.name)
	}
	theirs, err := parseReady(c.data)
	if err != nil {
		return err
	}
	if err := checkMate(l.kind, theirs.socketType); err != nil {
		return err
	}
	if err := l.accept(theirs, ourReady); err != nil {
		return err
	}
	if h := l.opts.Heartbeat; l.sendsPings() {
		l.rd.silence = h.Every + h.Timeout
	}
	return nil
}

// receive reads messages until something ends the link.
func (l *link) receive() error {
	for {
		frames, err := l.rd.message(l.onCommand)
		if err != nil {
			return err
		}
		if err := l.deliver(frames); err != nil {
			return err
		}
	}
}

// onCommand handles a command after the handshake.
func (l *link) onCommand(c command) error {
	switch c.name {
	case commandPing:
		ttl, context, err := parsePing(c.data)
		if err != nil {
			return err
		}
		l.out.setPong(appendCommand(nil, commandPong, context))
		l.honour(ttl)
	case commandPong:
		if l.opts.OnPong != nil {
			l.opts.OnPong()
		}
	case commandError:
		return rejected(c)
	case commandReady:
		return protocolf("a second READY")
	}
	return nil
}

// honour sets the bound of silence that the latest PING and our own heartbeat leave together.
func (l *link) honour(ttl time.Duration) {
	var own time.Duration
	if h := l.opts.Heartbeat; l.sendsPings() {
		own = h.Every + h.Timeout
	}
	switch {
	case ttl == 0:
		l.rd.silence = own
	case own == 0:
		l.rd.silence = ttl
	default:
		l.rd.silence = min(own, ttl)
	}
}

func (l *link) sendsPings() bool { return l.opts.Heartbeat.Every > 0 && l.knowsPing() }

// knowsPing: ZMTP 3.0 has no PING.
func (l *link) knowsPing() bool { return l.minor >= 1 }

func rejected(c command) error {
	reason, err := parseError(c.data)
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: %q", ErrRejected, reason)
}

// refuse tells a peer that broke a rule why it is dropped, if it reads and has not been dropped already.
// A duplicate identity is not told: libzmq gives up for ever on an ERROR, and dials again after a mere close.
// It waits at most refuseLinger, and reads on a little so that closing does not reset the connection under
// the peer's eyes.
func (l *link) refuse(err error) {
	spoken := errors.Is(err, ErrProtocol) || errors.Is(err, ErrLimit)
	if !spoken || !l.greeted {
		return
	}
	l.out.seal()
	l.out.pushRaw(appendError(nil, err.Error()))
	linger := time.NewTimer(refuseLinger)
	defer linger.Stop()
	select {
	case <-l.out.whenFlushed():
	case <-l.wrote:
		return
	case <-linger.C:
		return
	}
	if !l.closeWrite() {
		return
	}
	l.rd.due, l.rd.silence = time.Now().Add(refuseLinger), 0
	_, _ = io.CopyN(io.Discard, l.rd.buf, refuseDrainBytes)
}

// closeWrite half-closes the connection where it can be.
func (l *link) closeWrite() bool {
	c, ok := l.conn.(interface{ CloseWrite() error })
	return ok && c.CloseWrite() == nil
}
