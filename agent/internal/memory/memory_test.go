package memory

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
)

func TestSegmentIsZeroedSealedAndOurs(t *testing.T) {
	s, err := Map(3 * 4096)
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range s.Bytes() {
		if b != 0 {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
	s.Bytes()[4096] = 7
	if got := At(s.Addr()+4096, 1)[0]; got != 7 {
		t.Errorf("At reads %d", got)
	}
	if err := unix.Ftruncate(s.FD(), 4096); !errors.Is(err, unix.EPERM) {
		t.Errorf("the file can be shrunk: %v", err)
	}
	for range 2 {
		if err := s.Unmap(); err != nil {
			t.Error(err)
		}
	}
}

// The table against a slow oracle over a small address space: one owner per byte.
func TestTableAgainstBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := NewTable(8)
		var bytes [64]*Range
		live := map[*Range]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				a, n := rapid.IntRange(1, 60).Draw(t, "addr"), rapid.IntRange(-1, 20).Draw(t, "len")
				want := n > 0 && len(live) < 8
				for i := a; i < a+n; i++ {
					if i < 64 && bytes[i] != nil {
						want = false
					}
				}
				r, err := table.Add(uint64(a), n, "test")
				if (err == nil) != want {
					t.Fatalf("add %d+%d: %v, want ok=%v", a, n, err, want)
				}
				if err == nil {
					live[r] = true
					for i := a; i < a+n && i < 64; i++ {
						bytes[i] = r
					}
				}
			},
			"find": func(t *rapid.T) {
				a, n := rapid.IntRange(0, 60).Draw(t, "addr"), rapid.IntRange(1, 3).Draw(t, "len")
				want := bytes[a]
				for i := a; i < a+n; i++ {
					if bytes[i] != want {
						want = nil
					}
				}
				if want != nil && want.retired {
					want = nil
				}
				if got := table.Find(uint64(a), uint64(n)); got != want {
					t.Fatalf("find %d+%d: %v, want %v", a, n, got, want)
				}
			},
			"retire and wait": func(t *rapid.T) {
				a := rapid.IntRange(0, 63).Draw(t, "addr")
				r := bytes[a]
				if r == nil {
					return // a Skip after a draw would end the sequence
				}
				r.Retire()
				if table.Find(r.Addr, 1) != nil || table.Hold([]*Range{r}) != r {
					t.Fatal("a retired range is in use")
				}
				if rapid.Bool().Draw(t, "wait") {
					if err := r.Wait(context.Background()); err != nil {
						t.Fatal(err)
					}
					delete(live, r)
					for i := range bytes {
						if bytes[i] == r {
							bytes[i] = nil
						}
					}
				}
			},
		})
	})
}

func TestFindDoesNotOverflow(t *testing.T) {
	table := NewTable(1)
	if _, err := table.Add(4096, 4096, "test"); err != nil {
		t.Fatal(err)
	}
	for _, q := range [][2]uint64{{4096, ^uint64(0)}, {8191, ^uint64(0)}, {^uint64(0), 1}, {0, 5000}, {4095, 2}} {
		if table.Find(q[0], q[1]) != nil {
			t.Errorf("found [%#x, +%#x)", q[0], q[1])
		}
	}
	var le *agent.LimitError
	if _, err := table.Add(1, 1, "x"); !errors.As(err, &le) {
		t.Errorf("beyond the limit: %v", err)
	}
}

func TestWaitWaitsForHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable(2)
		r, _ := table.Add(4096, 4096, "test")
		table.Hold([]*Range{r})
		table.Hold([]*Range{r})
		r.Retire()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("wait with a hold: %v", err)
		}
		if _, err := table.Add(4096, 1, "other"); err == nil {
			t.Error("registered over a range that is still held")
		}
		go func() {
			time.Sleep(time.Minute)
			table.Unhold([]*Range{r})
			table.Unhold([]*Range{r})
		}()
		done := make(chan error, 2)
		for range 2 {
			go func() { done <- r.Wait(t.Context()) }()
		}
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if _, err := table.Add(4096, 1, "other"); err != nil {
			t.Errorf("after it is gone: %v", err)
		}
	})
}
