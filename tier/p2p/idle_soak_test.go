//go:build soak

package p2p

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Two nodes with an open session and nothing to do, a process each: their processor time and their
// wake-ups in a minute.
func TestIdleTicks(t *testing.T) {
	a := startChild(t, "-")
	b := startChild(t, a.name)
	time.Sleep(5 * time.Second) // start-up is over
	before := [2][2]int{usage(t, a), usage(t, b)}
	const span = time.Minute
	time.Sleep(span)
	for i, c := range []*child{a, b} {
		u := usage(t, c)
		ticks, wakes := u[0]-before[i][0], u[1]-before[i][1]
		t.Logf("node %d: %d ticks of 10 ms and %d wake-ups in %v", i, ticks, wakes, span)
		if ticks > 5 {
			t.Errorf("node %d does not sleep", i)
		}
	}
}

// usage is a process's ticks of processor time, and how often its threads have gone to sleep.
func usage(t *testing.T, c *child) (u [2]int) {
	t.Helper()
	dir := filepath.Join("/proc", strconv.Itoa(c.Process.Pid))
	b, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')'):]))
	for _, i := range []int{12, 13} { // utime, stime
		n, err := strconv.Atoi(f[i])
		if err != nil {
			t.Fatal(err)
		}
		u[0] += n
	}
	threads, err := filepath.Glob(filepath.Join(dir, "task", "*", "status"))
	if err != nil {
		t.Fatal(err)
	}
	for _, th := range threads {
		b, err := os.ReadFile(th)
		if err != nil {
			continue // it has ended
		}
		for _, line := range strings.Split(string(b), "\n") {
			if rest, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
				n, _ := strconv.Atoi(strings.TrimSpace(rest))
				u[1] += n
			}
		}
	}
	return u
}
