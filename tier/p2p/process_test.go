package p2p

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Two processes with real agents: the memory has no name anywhere, so that a killed one leaves
// nothing behind.
func TestHazardP2P_H30_KilledLeavesNothing(t *testing.T) {
	left := func() []string {
		var all []string
		for _, dir := range []string{"/dev/shm", os.TempDir()} {
			names, err := filepath.Glob(filepath.Join(dir, "*"))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, names...)
		}
		return all
	}
	before := left()
	a := startChild(t, "-")
	b := startChild(t, a.name)
	for _, c := range []*child{a, b} {
		maps, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(c.Process.Pid), "maps"))
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(maps), "\n") {
			if strings.Contains(line, " /dev/shm/") || strings.Contains(line, "rw-s") && !strings.HasSuffix(line, "(deleted)") {
				t.Errorf("memory with a name: %s", line)
			}
		}
		if err := c.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = c.Wait() // killed
	}
	for _, name := range left() {
		if strings.Contains(name, "kvferry") && !slices.Contains(before, name) {
			t.Errorf("%s was left behind", name)
		}
	}
}

// What is dialled and what is accepted is watched by the kernel.
func TestKernelWatches(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	out, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = out.Close() }()
	watch(out)
	in, err := watchful{ln}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	for _, c := range []net.Conn{in, out} {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		_ = raw.Control(func(fd uintptr) {
			for _, o := range []struct{ level, name, want int }{
				{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
				{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 10},
				{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 5},
				{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 2},
				{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 10_000},
			} {
				if got, err := unix.GetsockoptInt(int(fd), o.level, o.name); got != o.want {
					t.Errorf("option %d: %d (%v), want %d", o.name, got, err, o.want)
				}
			}
		})
	}
}
