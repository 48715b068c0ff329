package main

import (
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

var foundLine = regexp.MustCompile(`found (\d+) blocks \(\d+ bytes\) in files, dropped (\d+)`)

// A store that is killed while it writes starts again, says what it has dropped, and serves whole blocks
// only; what was on the disk before is not lost.
func TestStoreKilledWhileWriting(t *testing.T) {
	t.Parallel()
	args := []string{"--size", "32MiB", "--fs", t.TempDir(), "--fs-size", "4GiB"}
	next, served, dropped, kept := 0, 0, 0, 0
	for kill := range storeKills {
		store := storeUp(t, args...)
		if next > 0 {
			found := foundLine.FindStringSubmatch(store.waitLine(foundLine.MatchString))
			n, _ := strconv.Atoi(found[1])
			d, _ := strconv.Atoi(found[2])
			if n < kept {
				t.Errorf("%d blocks are found, %d were on the disk before", n, kept)
			}
			if told := strings.Count(store.output(), "what=block_dropped"); told != d {
				t.Errorf("%d files were dropped, %d are told:\n%s", d, told, store.output())
			}
			kept = n
			dropped += d
		}
		reader := newCPUTier(t, store, "a model")
		for range 4 { // some of what was ever computed, new blocks first
			from := max(0, next-64)
			if next > 64 && rand.IntN(2) == 0 {
				from = rand.IntN(next - 64)
			}
			served += strings.Count(reader.fetch(blockKeys(from, min(next, from+32))), "+")
		}
		reader.close()
		writer := newCPUTier(t, store, "a model")
		writer.compute(blockKeys(next, next+128))
		next += 128
		if kill == 0 { // the others may all be killed before anything is written
			eventually(t, "files", func() bool { return number(store, "kvferry_store_files") == 128 })
		}
		time.Sleep(time.Duration(rand.IntN(150_000)) * time.Microsecond) // any moment will do
		store.kill()
		writer.close()
		if t.Failed() {
			return
		}
	}
	t.Logf("%d kills: %d blocks computed, %d found at the last start, %d read back, %d files dropped", storeKills, next, kept, served, dropped)
	if served == 0 {
		t.Error("no store has kept anything")
	}
}
