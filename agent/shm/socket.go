package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// receiver reads frames and descriptors from a socket. It belongs to the connection's reader. Its
// buffer grows with what has come, never with what was announced.
type receiver struct {
	sock *net.UnixConn
	note int // bound of a notification
	buf  []byte
	r, w int   // unread bytes are buf[r:w]
	fds  []int // received, not yet taken
	oob  [64]byte
}

func newReceiver(sock *net.UnixConn, note int) *receiver {
	return &receiver{sock: sock, note: note, buf: make([]byte, 4096)}
}

// next is the next frame; body is valid until the next call. io.EOF comes only between frames.
func (r *receiver) next() (kind, []byte, error) {
	if err := r.fill(headerBytes); err != nil {
		return 0, nil, err
	}
	length, k := binary.LittleEndian.Uint32(r.buf[r.r:]), kind(r.buf[r.r+4])
	limit := maxBody(k, r.note)
	if limit == 0 {
		return 0, nil, fmt.Errorf("frame of unknown kind %d", k)
	}
	if uint64(length) > uint64(limit) {
		return 0, nil, fmt.Errorf("frame of kind %d announces %d bytes, at most %d are allowed", k, length, limit)
	}
	if err := r.fill(headerBytes + int(length)); err != nil {
		return 0, nil, unexpected(err)
	}
	body := r.buf[r.r+headerBytes : r.r+headerBytes+int(length)]
	r.r += headerBytes + int(length)
	return k, body, nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// fill reads until n bytes are unread.
func (r *receiver) fill(n int) error {
	for r.w-r.r < n {
		if r.r > 0 {
			r.w = copy(r.buf, r.buf[r.r:r.w])
			r.r = 0
		}
		if r.w == len(r.buf) {
			grown := make([]byte, min(2*len(r.buf), max(n, len(r.buf)+4096)))
			copy(grown, r.buf[:r.w])
			r.buf = grown
		}
		got, oob, flags, _, err := r.sock.ReadMsgUnix(r.buf[r.w:], r.oob[:])
		if oob > 0 {
			if err := r.collect(r.oob[:oob]); err != nil {
				return err
			}
		}
		switch {
		case err != nil && r.w > 0:
			return unexpected(err)
		case err != nil:
			return err
		case flags&unix.MSG_CTRUNC != 0:
			return errors.New("more file descriptors than any frame has")
		}
		r.w += got
	}
	return nil
}

// collect takes the descriptors out of control messages.
func (r *receiver) collect(oob []byte) error {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("control message: %w", err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return errors.New("a control message that is not file descriptors")
		}
		r.fds = append(r.fds, fds...)
	}
	if len(r.fds) > maxFDs {
		return errors.New("file descriptors without a frame for them")
	}
	return nil
}

// takeFD is the oldest received descriptor; the caller closes it.
func (r *receiver) takeFD() (int, error) {
	if len(r.fds) == 0 {
		return -1, errors.New("frame without its file descriptor")
	}
	fd := r.fds[0]
	r.fds = r.fds[1:]
	return fd, nil
}

// release closes what nobody took.
func (r *receiver) release() {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
	r.fds = nil
}

// sendFD sends one small frame together with a descriptor.
func sendFD(sock *net.UnixConn, b []byte, fd int) error {
	n, _, err := sock.WriteMsgUnix(b, unix.UnixRights(fd), nil)
	if err == nil && n != len(b) {
		err = io.ErrShortWrite
	}
	return err
}

// sameUser checks that the other end runs under our uid.
func sameUser(sock *net.UnixConn) error {
	raw, err := sock.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return fmt.Errorf("credentials of the peer: %w", credErr)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("the peer runs as user %d, this agent as %d; shared memory is for one user's processes",
			cred.Uid, os.Geteuid())
	}
	return nil
}
