package memory

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Segment is fd-backed, zeroed memory outside of the Go heap. Its file can neither shrink nor
// grow, so that a process which maps it too can never be made to fault.
type Segment struct {
	fd   int
	data []byte
	once sync.Once
	err  error
}

// Map makes a segment of length bytes, which must be positive.
func Map(length int) (*Segment, error) {
	fd, err := unix.MemfdCreate("kvferry", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	s := &Segment{fd: fd}
	if err := unix.Ftruncate(fd, int64(length)); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("size memory file to %d bytes: %w", length, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("seal the size of a memory file: %w", err)
	}
	s.data, err = unix.Mmap(fd, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("map %d bytes: %w", length, err)
	}
	return s, nil
}

// Bytes is the mapping, valid until Unmap.
func (s *Segment) Bytes() []byte { return s.data }

// Addr is the address of the first byte.
func (s *Segment) Addr() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.data)))) }

// FD is the memory file, valid until Unmap.
func (s *Segment) FD() int { return s.fd }

// Unmap gives the memory back. Further calls do nothing.
func (s *Segment) Unmap() error {
	s.once.Do(func() {
		s.err = unix.Munmap(s.data)
		if err := unix.Close(s.fd); s.err == nil {
			s.err = err
		}
	})
	return s.err
}

// At is the n bytes at an address of this process. The caller vouches that they are registered and
// held, or covered by a grant whose gate it has entered.
func At(addr uint64, n int) []byte {
	p := uintptr(addr)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n)
}
