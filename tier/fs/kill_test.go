package fs

import (
	"bufio"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kvferry/kvferry/tier/core"
)

const childEnv = "KVFERRY_FS_TEST_CHILD"

// childWrites stores blocks until it is killed. It says when it has begun, and when the first are stored.
func childWrites(dir string) {
	t, err := New(Config{Root: dir, Facts: "a model", BlockLen: blockLen, Budget: 40 * fileSize(key(0), blockLen)})
	if err != nil {
		panic(err)
	}
	h := newHost(4)
	if err := t.Start(h); err != nil {
		panic(err)
	}
	println("begun")
	said := false
	id := core.JobID(0)
	for {
		for slot := range h.mem { // as many at once as there are workers
			n := rand.IntN(200)
			fill(h.mem[slot], n)
			id++
			t.Store(core.Job{ID: id, Keys: []core.Key{key(n)}, Slots: []core.Slot{core.Slot(slot)}})
		}
		for range h.mem {
			<-h.ended
		}
		if !said {
			println("stored")
			said = true
		}
	}
}

// A process that is killed while it writes leaves a store that starts again, and from which every
// block that it says it has is whole.
func TestKilledWhileWriting(t *testing.T) {
	dir := t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	served, dropped := 0, 0
	for kill := range kills {
		cmd := exec.Command(exe, "-test.run=^$")
		cmd.Env = append(os.Environ(), childEnv+"="+dir)
		stderr, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(stderr)
		says := func(want string) {
			if line, err := lines.ReadString('\n'); err != nil || line != want {
				t.Fatalf("the child says %q, %v", line, err)
			}
		}
		says("begun\n")
		if kill == 0 { // the others may all be killed before anything is stored
			says("stored\n")
		}
		time.Sleep(time.Duration(rand.IntN(30_000)) * time.Microsecond) // any moment will do
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		f := open(t, dir, nil)
		r := f.tier.Recovery()
		dropped += r.DroppedAll
		if r.ForeignAll != 0 {
			t.Errorf("foreign: %v", r.Foreign)
		}
		for n := range 200 {
			if f.has(n) {
				if !f.load(n) {
					t.Errorf("block %d is there and cannot be read", n)
				}
				served++
			}
		}
		f.close()
	}
	t.Logf("%d kills: %d blocks read, %d files dropped", kills, served, dropped)
	if served == 0 {
		t.Error("no child has stored anything")
	}
}
