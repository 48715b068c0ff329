package tcp

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

// conn is one stream's connection. One goroutine reads it and one writes it.
type conn struct {
	*net.TCPConn
	raw     syscall.RawConn
	in      io.Reader // buffered on control streams, where no payload follows
	most    int       // the longest body that is read
	head    [frame.HeaderSize]byte
	body    []byte // of the last frame read; reused
	scratch []byte // for bytes that have no place; made when needed
	rx, tx  mover
}

func newConn(tc *net.TCPConn, userTimeout time.Duration) (*conn, error) {
	raw, err := tc.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{TCPConn: tc, raw: raw, in: tc, most: shortBody}
	err = tc.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepalive, Interval: keepalive, Count: 3})
	if err != nil {
		return nil, fmt.Errorf("set keepalive: %w", err)
	}
	ctlErr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	})
	if ctlErr != nil {
		return nil, ctlErr
	}
	if err != nil {
		return nil, fmt.Errorf("set TCP_USER_TIMEOUT: %w", err)
	}
	return c, nil // TCP_NODELAY is Go's default
}

// next reads a frame's header and body. The body is valid until the next call. A clean end of the
// stream between frames is io.EOF.
func (c *conn) next() (frame.Kind, []byte, error) {
	if _, err := io.ReadFull(c.in, c.head[:]); err != nil {
		return 0, nil, err
	}
	h, err := frame.DecodeHeader(c.head[:])
	if err != nil {
		return 0, nil, err
	}
	if h.Length > c.most {
		return 0, nil, fmt.Errorf("frame of kind %d with a body of %d bytes; %d are allowed here", h.Kind, h.Length, c.most)
	}
	if h.Length > bodyStep {
		// Memory grows with what arrives, not with what is announced.
		var long bytes.Buffer
		if _, err := io.CopyN(&long, c.in, int64(h.Length)); err != nil {
			return 0, nil, unexpected(err)
		}
		return h.Kind, long.Bytes(), nil
	}
	if cap(c.body) < h.Length {
		c.body = make([]byte, max(h.Length, 512))
	}
	body := c.body[:h.Length]
	if _, err := io.ReadFull(c.in, body); err != nil {
		return 0, nil, unexpected(err)
	}
	return h.Kind, body, nil
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// passage is what must be open for memory to be touched: gates to enter and leave, or nil for
// never.
type passage interface {
	Enter() bool
	Leave()
}

// receive reads a payload straight into place and its trailer. As soon as the passage is shut, what
// remains goes nowhere, and placed is false. moved is called after each step.
func (c *conn) receive(ranges []frame.Range, total int, way passage, moved func()) (placed bool, t frame.Trailer, err error) {
	m := &c.rx
	m.reset(ranges, total)
	placed = way != nil
	var failed error
	err = c.raw.Read(func(fd uintptr) bool {
		for m.left > 0 {
			n, errno := c.receiveStep(fd, way, &placed)
			switch {
			case errno == unix.EAGAIN:
				return false
			case errno != 0:
				failed = fmt.Errorf("read: %w", errno)
				return true
			case n == 0:
				failed = io.ErrUnexpectedEOF
				return true
			}
			moved()
		}
		return true
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return placed, t, err
	}
	var b [frame.TrailerSize]byte
	if _, err := io.ReadFull(c.TCPConn, b[:]); err != nil {
		return placed, t, unexpected(err)
	}
	t, err = frame.DecodeTrailer(b[:])
	return placed, t, err
}

func (c *conn) receiveStep(fd uintptr, way passage, placed *bool) (int, unix.Errno) {
	m := &c.rx
	if *placed && way.Enter() {
		n, errno := vector(unix.SYS_READV, fd, m.window())
		if errno == 0 {
			m.advance(n)
		}
		way.Leave()
		return n, errno
	}
	*placed = false
	if c.scratch == nil {
		c.scratch = make([]byte, scratchBytes)
	}
	iov := unix.Iovec{Base: &c.scratch[0]}
	iov.SetLen(min(m.left, scratchBytes))
	n, errno := vector(unix.SYS_READV, fd, []unix.Iovec{iov})
	if errno == 0 {
		m.left -= n
	}
	return n, errno
}

// zeros stands in for memory that may not be read any more.
var zeros [scratchBytes]byte

// send writes a head, a payload from where it lies, and the trailer. As soon as the passage is
// shut, zeros take the payload's place, and the trailer says that it is abandoned. moved is called
// after each step.
func (c *conn) send(head []byte, ranges []frame.Range, total int, way passage, moved func()) (whole bool, err error) {
	if _, err := c.Write(head); err != nil {
		return false, err
	}
	m := &c.tx
	m.reset(ranges, total)
	whole = true
	var failed error
	err = c.raw.Write(func(fd uintptr) bool {
		for m.left > 0 {
			_, errno := c.sendStep(fd, way, &whole)
			if errno == unix.EAGAIN {
				return false
			}
			if errno != 0 {
				failed = fmt.Errorf("write: %w", errno)
				return true
			}
			moved()
		}
		return true
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return false, err
	}
	t := frame.Trailer{Abandoned: !whole}
	if whole {
		t.CRC = m.crc
	}
	_, err = c.Write(t.Append(head[:0]))
	return whole, err
}

func (c *conn) sendStep(fd uintptr, way passage, whole *bool) (int, unix.Errno) {
	m := &c.tx
	if *whole && way.Enter() {
		n, errno := vector(unix.SYS_WRITEV, fd, m.window())
		if errno == 0 {
			m.advance(n)
		}
		way.Leave()
		return n, errno
	}
	*whole = false
	iov := unix.Iovec{Base: &zeros[0]}
	iov.SetLen(min(m.left, len(zeros)))
	n, errno := vector(unix.SYS_WRITEV, fd, []unix.Iovec{iov})
	if errno == 0 {
		m.left -= n
	}
	return n, errno
}

// offerWords tries once to say something, without waiting.
func (c *conn) offerWords(b []byte) {
	// Control, unlike Write, does not queue behind a writer that waits.
	_ = c.raw.Control(func(fd uintptr) { _, _ = unix.Write(int(fd), b) })
}

// reset closes so that nothing that is still in the kernel is sent.
func (c *conn) reset() {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// both is a passage through two gates.
type both struct{ first, second passage }

func (b both) Enter() bool {
	if !b.first.Enter() {
		return false
	}
	if !b.second.Enter() {
		b.first.Leave()
		return false
	}
	return true
}

func (b both) Leave() {
	b.second.Leave()
	b.first.Leave()
}
