package shm

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
)

// wantSeals are what memory of a peer must have before it is mapped: its size is fixed, so that no
// access to the mapping can fault, and nobody but its maker can write it.
const wantSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE

// mapping is a read-only view of a peer's memory. It is unmapped when the last reference is
// dropped: the connection has one, each transfer that copies from it another.
type mapping struct {
	addr, end uint64 // where the peer has it
	data      []byte
	refs      atomic.Int32
}

// mapSealed maps length bytes of a peer's file read-only, once it is sure that they cannot go
// away. It closes fd.
func mapSealed(fd int, addr, length uint64) (*mapping, error) {
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size < 0 || uint64(st.Size) != length {
		return nil, fmt.Errorf("memory file has %d bytes where %d were announced, or is none", st.Size, length)
	}
	// Huge pages can run out under a mapping whatever its seals; so can those of a file system.
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || int64(fs.Type) != unix.TMPFS_MAGIC {
		return nil, errors.New("memory file is not a plain memfd")
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("seals of the memory file: %w", err)
	}
	if seals&wantSeals != wantSeals {
		return nil, fmt.Errorf("memory file has seals %#x, which lack %#x", seals, wantSeals&^seals)
	}
	data, err := unix.Mmap(fd, 0, int(length), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of a peer: %w", length, err)
	}
	m := &mapping{addr: addr, end: addr + length, data: data}
	m.refs.Store(1)
	return m, nil
}

func (m *mapping) hold() { m.refs.Add(1) }

func (m *mapping) drop() {
	if m.refs.Add(-1) == 0 {
		_ = unix.Munmap(m.data)
	}
}

// at is where this process sees the peer's address, which lies in the mapping.
func (m *mapping) at(addr uint64) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.data)))) + (addr - m.addr)
}

// mappings is what one peer has told about its memory. It belongs to the connection's reader.
type mappings struct {
	byID   map[uint32]*mapping
	sorted []*mapping // by the peer's address; disjoint
	last   *mapping   // of the latest find
	limit  int
	bytes  uint64
	room   uint64
}

func newMappings(limit int) *mappings {
	return &mappings{byID: map[uint32]*mapping{}, limit: limit, room: maxMapped()}
}

// add maps what a SEGMENT frame tells. It closes fd.
func (t *mappings) add(s segmentFrame, fd int) error {
	err := func() error {
		if t.byID[s.id] != nil {
			return fmt.Errorf("segment %d is told twice", s.id)
		}
		if n := len(t.byID); n >= t.limit {
			return &agent.LimitError{What: "memory segments of one peer", Got: n + 1, Limit: t.limit}
		}
		if s.length > t.room-t.bytes {
			return fmt.Errorf("segment of %d bytes, and %d bytes are mapped: more than this machine's memory", s.length, t.bytes)
		}
		return nil
	}()
	if err != nil {
		unix.Close(fd)
		return err
	}
	i := t.after(s.addr)
	if i > 0 && t.sorted[i-1].end > s.addr || i < len(t.sorted) && t.sorted[i].addr < s.addr+s.length {
		unix.Close(fd)
		return fmt.Errorf("segment %d overlaps another", s.id)
	}
	m, err := mapSealed(fd, s.addr, s.length)
	if err != nil {
		return err
	}
	t.byID[s.id] = m
	t.sorted = slices.Insert(t.sorted, i, m)
	t.bytes += s.length
	return nil
}

func (t *mappings) forget(id uint32) error {
	m := t.byID[id]
	if m == nil {
		return fmt.Errorf("segment %d is not known", id)
	}
	delete(t.byID, id)
	i := t.after(m.addr) - 1
	t.sorted = slices.Delete(t.sorted, i, i+1)
	t.bytes -= m.end - m.addr
	t.last = nil
	m.drop()
	return nil
}

// after is the index of the first mapping that begins behind addr.
func (t *mappings) after(addr uint64) int {
	i, found := slices.BinarySearchFunc(t.sorted, addr, func(m *mapping, a uint64) int { return cmp.Compare(m.addr, a) })
	if found {
		i++
	}
	return i
}

// find is the mapping that contains all of [addr, addr+n), or nil.
func (t *mappings) find(addr, n uint64) *mapping {
	m := t.last
	if m == nil || addr < m.addr || addr >= m.end {
		i := t.after(addr)
		if i == 0 {
			return nil
		}
		m = t.sorted[i-1]
		t.last = m
	}
	if addr < m.addr || addr >= m.end || n > m.end-addr {
		return nil
	}
	return m
}

// release drops all.
func (t *mappings) release() {
	for _, m := range t.sorted {
		m.drop()
	}
	t.byID, t.sorted, t.last = nil, nil, nil
}

// sources is a set of mappings that one transfer copies from.
type sources []*mapping

// add holds m unless it is held already.
func (s *sources) add(m *mapping) {
	if k := len(*s); k > 0 && (*s)[k-1] == m || slices.Contains(*s, m) {
		return
	}
	m.hold()
	*s = append(*s, m)
}

func (s *sources) drop() {
	for _, m := range *s {
		m.drop()
	}
	*s = nil
}
