package engine

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/engine/model"
)

func TestResetPrefixCache(t *testing.T) {
	e := newEngine(t, nil)
	p := prompt(64, 1)
	ask := func(cached int) {
		t.Helper()
		a := generate(t, e, Request{ID: "r", Prompt: p, MaxTokens: 3})
		checkAnswer(t, "r", a, expect(t, p, 3, model.Sampling{}))
		if a.Usage.Cached != cached {
			t.Errorf("%d tokens were cached, want %d", a.Usage.Cached, cached)
		}
	}
	ask(0)
	ask(48)
	if n, err := e.ResetPrefixCache(t.Context(), false); n != 4 || err != nil {
		t.Fatalf("%d blocks, %v", n, err)
	}
	ask(0)
	ask(48)

	// What runs goes on, and adds nothing that is older than the reset.
	s := submit1(t, e, Request{ID: "long", Prompt: p, MaxTokens: 400})
	if _, err := s.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ResetPrefixCache(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	s.Close()
	read(t, s)
	if got := e.Stats(); got.BlocksCached != 0 || got.CacheResets != 2 {
		t.Errorf("%+v", got)
	}
	ask(0)
}

// Blocks held for D: refused without waiting; with it, it comes when D has them. Hand-offs that come
// meanwhile come after it.
func TestResetWithHolds(t *testing.T) {
	eachMode(t, nil, resetWithHolds)
}

func resetWithHolds(t *testing.T, x pair) {
	p := prompt(70, 1)
	_, leg := x.begin(t, "r", p, 4)
	_, decode := leg()
	var busy *CacheBusyError
	if _, err := x.p.ResetPrefixCache(t.Context(), false); !errors.As(err, &busy) || busy.Held != 1 || busy.Receiving != 0 {
		t.Fatalf("with a hold: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := x.p.ResetPrefixCache(ctx, true); !errors.As(err, &busy) {
		t.Fatalf("without patience: %v", err)
	}

	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := x.p.ResetPrefixCache(context.Background(), true); err != nil {
				t.Error(err)
			}
		})
	}
	checkAnswer(t, "D", generate(t, x.d, decode), expect(t, p, 4, model.Sampling{}))
	wg.Wait()
	if s := x.p.Stats(); s.BlocksCached != 0 || s.CacheResets < 1 {
		t.Errorf("%+v", s)
	}
	if a := generate(t, x.p, Request{ID: "again", Prompt: p, MaxTokens: 2}); a.Usage.Cached != 0 {
		t.Errorf("an old hash hits: %+v", a.Usage)
	}
}

func TestResetWhileReceiving(t *testing.T) {
	x := newPair(t, nil)
	p := prompt(70, 1)
	prefill, decode := x.legs("r", p, 4)
	s := submit1(t, x.d, decode)
	var busy *CacheBusyError
	if _, err := x.d.ResetPrefixCache(t.Context(), false); !errors.As(err, &busy) || busy.Receiving != 1 {
		t.Fatalf("while receiving: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := x.d.ResetPrefixCache(context.Background(), true)
		done <- err
	}()
	generate(t, x.p, prefill)
	checkAnswer(t, "D", read(t, s), expect(t, p, 4, model.Sampling{}))
	if err := <-done; err != nil {
		t.Error(err)
	}
	// What had arrived before the reset is not in the cache.
	_, again := x.handOff(t, "again", p, 4)
	checkAnswer(t, "again", again, expect(t, p, 4, model.Sampling{}))
	if again.Usage.Cached != 0 {
		t.Errorf("an old hash hits: %+v", again.Usage)
	}
}

func TestResetOfClosedEngine(t *testing.T) {
	e := newEngine(t, nil)
	closeNow(t, e)
	if _, err := e.ResetPrefixCache(t.Context(), true); !errors.Is(err, errClosing) {
		t.Error(err)
	}
}
