package shm

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// memfd makes a memory file of two pages with seals.
func memfd(t testing.TB, flags, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("kvferry test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	must(t, err)
	must(t, unix.Ftruncate(fd, 8192))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	must(t, err)
	return fd
}

// Only memory that cannot go away is mapped, and it cannot be written.
func TestSeals(t *testing.T) {
	fds := fdsOf(t)
	for name, c := range map[string]struct {
		fd     func() int
		length uint64
		want   string
	}{
		"not sealed":        {func() int { return memfd(t, 0, 0) }, 8192, "lack"},
		"may shrink":        {func() int { return memfd(t, 0, wantSeals&^unix.F_SEAL_SHRINK) }, 8192, "lack"},
		"may grow":          {func() int { return memfd(t, 0, wantSeals&^unix.F_SEAL_GROW) }, 8192, "lack"},
		"may be written":    {func() int { return memfd(t, 0, wantSeals&^unix.F_SEAL_FUTURE_WRITE) }, 8192, "lack"},
		"longer than said":  {func() int { return memfd(t, 0, wantSeals) }, 4096, "announced"},
		"shorter than said": {func() int { return memfd(t, 0, wantSeals) }, 16384, "announced"},
		"a file": {func() int {
			f, err := os.CreateTemp(t.TempDir(), "")
			must(t, err)
			defer f.Close()
			must(t, f.Truncate(8192))
			fd, err := unix.Dup(int(f.Fd()))
			must(t, err)
			return fd
		}, 8192, ""},
		"a pipe": {func() int {
			var p [2]int
			must(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
			unix.Close(p[1])
			return p[0]
		}, 8192, "announced"},
		"a directory": {func() int {
			fd, err := unix.Open("/", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			must(t, err)
			return fd
		}, 8192, "announced"},
		"closed": {func() int { return 1 << 20 }, 8192, ""},
	} {
		m, err := mapSealed(c.fd(), 4096, c.length)
		if err == nil {
			m.drop()
			t.Errorf("%s: mapped", name)
		} else if !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	m, err := mapSealed(memfd(t, 0, wantSeals), 4096, 8192)
	must(t, err)
	if err := unix.Mprotect(m.data, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("the mapping can be made writable")
	}
	m.drop()
	if n := fdsOf(t); n != fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
}

// Huge pages can run out behind a mapping, so they are refused whatever their seals.
func TestHugePagesAreRefused(t *testing.T) {
	fd, err := unix.MemfdCreate("kvferry test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
	if err != nil {
		t.Skip("no huge pages here: ", err)
	}
	must(t, unix.Ftruncate(fd, 2<<20))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, wantSeals)
	must(t, err)
	if m, err := mapSealed(fd, 4096, 2<<20); err == nil {
		m.drop()
		t.Error("mapped")
	}
}

// What an agent gives away has the seals that it wants of others, and its own mapping is writable.
func TestOwnMemoryIsSealed(t *testing.T) {
	seg, err := mapOwn(8192)
	must(t, err)
	defer seg.Unmap()
	fd, err := unix.Dup(seg.FD())
	must(t, err)
	m, err := mapSealed(fd, seg.Addr(), 8192)
	must(t, err)
	defer m.drop()
	seg.Bytes()[5] = 5
	if m.data[5] != 5 {
		t.Error("the mapping does not show what was written")
	}
	if _, err := unix.FcntlInt(uintptr(seg.FD()), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
		t.Error("more seals can be added")
	}
	if _, err := unix.Mmap(seg.FD(), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("whoever has the descriptor can map it writable")
	}
	if n, err := unix.Pwrite(seg.FD(), []byte("x"), 0); err == nil {
		t.Errorf("whoever has the descriptor can write it: %d", n)
	}
}

// The table never has two segments at one address, and is bounded.
func TestMappingsAreBounded(t *testing.T) {
	table := newMappings(2)
	table.room = 3 * 8192
	defer table.release()
	add := func(id uint32, addr, length uint64) error {
		return table.add(segmentFrame{id: id, addr: addr, length: length}, memfd(t, 0, wantSeals))
	}
	fds := fdsOf(t)
	must(t, add(1, 1<<20, 8192))
	for name, err := range map[string]error{
		"same id":         add(1, 1<<30, 8192),
		"same place":      add(2, 1<<20, 8192),
		"overlaps behind": add(2, 1<<20+4096, 8192),
		"overlaps before": add(2, 1<<20-4096, 8192),
		"more than all":   add(2, 1<<30, 4*8192),
		"wrong length":    add(2, 1<<30, 4096),
	} {
		if err == nil {
			t.Errorf("%s: mapped", name)
		}
	}
	must(t, add(2, 1<<20+8192, 8192))
	if add(3, 1<<30, 8192) == nil {
		t.Error("a third segment was mapped")
	}
	if table.find(1<<20+8000, 200) != nil || table.find(1<<20-1, 1) != nil || table.find(1<<20+16384, 1) != nil {
		t.Error("found what lies in no segment")
	}
	if m := table.find(1<<20+8192, 8192); m != table.byID[2] {
		t.Error("the second segment is not found")
	}
	must(t, table.forget(1))
	if table.forget(1) == nil || table.find(1<<20, 1) != nil {
		t.Error("a segment is there after it was forgotten")
	}
	must(t, add(3, 1<<20, 8192))
	if n := fdsOf(t); n != fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
}
