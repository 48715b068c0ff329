package tcp

import (
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent/internal/memory"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// mover walks over the ranges of one payload, step by step, and sums what has passed. It belongs to
// the goroutine of its stream.
type mover struct {
	ranges []frame.Range // of this process's memory
	at     int           // range
	off    int           // bytes of it that are done
	left   int           // bytes of all ranges that are not
	crc    uint32
	iov    []unix.Iovec
}

// reset begins a payload.
func (m *mover) reset(ranges []frame.Range, total int) {
	m.ranges, m.at, m.off, m.left, m.crc = ranges, 0, 0, total, 0
}

// window is the next step's memory. The caller has entered the gates that permit to touch it.
func (m *mover) window() []unix.Iovec {
	m.iov = m.iov[:0]
	room, off := stepBytes, m.off
	for i := m.at; i < len(m.ranges) && room > 0 && len(m.iov) < stepRanges; i++ {
		n := min(m.ranges[i].Len-off, room)
		mem := memory.At(m.ranges[i].Addr+uint64(off), n)
		m.iov = append(m.iov, unix.Iovec{Base: unsafe.SliceData(mem)})
		m.iov[len(m.iov)-1].SetLen(n)
		room -= n
		off = 0
	}
	return m.iov
}

// advance notes that n bytes of the window have passed, and adds them to the checksum. The caller
// is still inside the gates.
func (m *mover) advance(n int) {
	m.left -= n
	for n > 0 {
		r := m.ranges[m.at]
		k := min(r.Len-m.off, n)
		m.crc = crc32.Update(m.crc, castagnoli, memory.At(r.Addr+uint64(m.off), k))
		m.off += k
		n -= k
		if m.off == r.Len {
			m.at, m.off = m.at+1, 0
		}
	}
}

// vector is one readv or writev that does not wait, on a socket that is non-blocking.
func vector(call uintptr, fd uintptr, iov []unix.Iovec) (int, unix.Errno) {
	for {
		n, _, errno := unix.Syscall(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}
