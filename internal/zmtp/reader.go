package zmtp

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// reader takes frames off a connection under limits and deadlines. Owner: the link's reader goroutine.
//
// Two deadlines can be running. due ends what the peer has begun (the handshake, a message); silence is the
// longest gap between any two bytes and comes from heartbeats alone. With neither, a read waits for ever.
type reader struct {
	conn    net.Conn
	buf     *bufio.Reader
	lim     *Limits
	stall   time.Duration
	due     time.Time         // zero: nothing is owed
	silence time.Duration     // zero: silence is fine
	armed   time.Time         // the deadline last given to conn
	moved   int               // message bytes since due was set
	onRead  func()            // called after each read that brought bytes
	grew    func(n int) error // called before memory for n more bytes of a message is taken
}

func newReader(conn net.Conn, lim *Limits, stall time.Duration) *reader {
	r := &reader{conn: conn, lim: lim, stall: stall, onRead: func() {}, grew: func(int) error { return nil }}
	r.buf = bufio.NewReaderSize((*deadlineReader)(r), readBufferBytes)
	return r
}

// deadlineReader is the side of a reader that touches the connection: it sets the deadline for each read.
type deadlineReader reader

func (r *deadlineReader) Read(p []byte) (int, error) {
	deadline := r.due
	if r.silence > 0 {
		if d := time.Now().Add(r.silence); deadline.IsZero() || d.Before(deadline) {
			deadline = d
		}
	}
	if !deadline.Equal(r.armed) {
		// a pipe whose other end is closed takes no deadline; its Read says io.EOF, which is the truth
		if err := r.conn.SetReadDeadline(deadline); err != nil && !errors.Is(err, io.ErrClosedPipe) {
			return 0, err
		}
		r.armed = deadline
	}
	n, err := r.conn.Read(p)
	if n > 0 {
		r.onRead()
	}
	return n, err
}

// greeting reads the peer's greeting; what is not ZMTP is noticed after ten bytes.
func (r *reader) greeting() (greeting, error) {
	var b [greetingBytes]byte
	if _, err := io.ReadFull(r.buf, b[:signatureBytes]); err != nil {
		return greeting{}, r.explain(err, "greeting")
	}
	if err := checkSignature([signatureBytes]byte(b[:])); err != nil {
		return greeting{}, err
	}
	if _, err := io.ReadFull(r.buf, b[signatureBytes:]); err != nil {
		return greeting{}, r.explain(err, "greeting")
	}
	return parseGreeting(b)
}

// handshakeCommand reads the one command that NULL's handshake consists of.
func (r *reader) handshakeCommand() (command, error) {
	first, err := r.buf.ReadByte()
	if err != nil {
		return command{}, r.explain(err, "handshake")
	}
	h, err := r.header(first)
	if err != nil {
		return command{}, r.explain(err, "handshake")
	}
	if !h.command {
		return command{}, protocolf("a message before the handshake was finished")
	}
	c, err := r.command(h)
	return c, r.explain(err, "handshake")
}

// message reads the next message. Commands before and between its frames go to onCommand.
// io.EOF means that the peer closed the connection between two messages.
func (r *reader) message(onCommand func(command) error) ([][]byte, error) {
	var frames [][]byte
	left := budget{lim: r.lim}
	for {
		if len(frames) == 0 {
			r.due = time.Time{}
		}
		first, err := r.buf.ReadByte()
		if err == io.EOF && len(frames) == 0 {
			return nil, io.EOF
		}
		if err != nil {
			return nil, r.explain(err, "message")
		}
		if len(frames) == 0 {
			r.rearm()
		}
		h, err := r.header(first)
		if err != nil {
			return nil, r.explain(err, "message")
		}
		if h.command {
			c, err := r.command(h)
			if err != nil {
				return nil, r.explain(err, "command")
			}
			if err := onCommand(c); err != nil {
				return nil, err
			}
			continue
		}
		if err := left.admit(h.size); err != nil {
			return nil, err
		}
		body, err := r.body(h.size)
		if err != nil {
			return nil, r.explain(err, "message")
		}
		frames = append(frames, body)
		if !h.more {
			r.due = time.Time{}
			return frames, nil
		}
	}
}

// rearm gives the message that has begun (or has moved by growStep) a new Stall.
func (r *reader) rearm() {
	r.due, r.moved = time.Now().Add(r.stall), 0
}

// header reads a frame's size, its flags having come.
func (r *reader) header(first byte) (frameHeader, error) {
	h, n, err := parseFlags(first)
	if err != nil {
		return h, err
	}
	var size [8]byte
	if _, err := io.ReadFull(r.buf, size[:n]); err != nil {
		return h, noEOF(err)
	}
	h.size, err = parseSize(size[:n])
	return h, err
}

func (r *reader) command(h frameHeader) (command, error) {
	if h.size > maxCommandBytes {
		return command{}, limitf("command of %d bytes, at most %d are taken", h.size, maxCommandBytes)
	}
	body := make([]byte, h.size)
	if _, err := io.ReadFull(r.buf, body); err != nil {
		return command{}, noEOF(err)
	}
	return parseCommand(body)
}

// body reads size bytes. Its buffer starts at growStep and at most doubles once it is full: the memory
// taken is bounded by what has come, not by what was announced.
func (r *reader) body(size int) ([]byte, error) {
	var buf []byte
	for have := 0; ; {
		if have == len(buf) {
			grown := min(size, max(growStep, 2*have))
			if err := r.grew(grown - have + frameOverhead); err != nil {
				return nil, err
			}
			next := make([]byte, grown)
			copy(next, buf)
			buf = next
		}
		step := min(len(buf)-have, growStep-r.moved)
		if _, err := io.ReadFull(r.buf, buf[have:have+step]); err != nil {
			return nil, noEOF(err)
		}
		have += step
		if r.moved += step; r.moved >= growStep {
			r.rearm()
		}
		if have == size {
			return buf, nil
		}
	}
}

// explain turns an expired deadline into ErrTimeout, and an end inside something begun into a violation.
func (r *reader) explain(err error, what string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded) && !r.due.IsZero() && r.armed.Equal(r.due):
		return fmt.Errorf("%w: %s begun but not finished in time", ErrTimeout, what)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: nothing came for %v, the heartbeat's bound", ErrTimeout, r.silence)
	case err == io.EOF || err == io.ErrUnexpectedEOF:
		return fmt.Errorf("connection ended inside a %s: %w", what, io.ErrUnexpectedEOF)
	}
	return err
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
