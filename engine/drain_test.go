package engine

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
)

// closing begins a Close whose bound is far, and waits until the engine refuses requests.
func closing(t *testing.T, e *Engine) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		err := e.Close(ctx)
		if ctx.Err() != nil {
			err = errors.Join(err, ctx.Err())
		}
		done <- err
	}()
	for e.Ready() == nil {
		time.Sleep(time.Millisecond)
	}
	_, err := e.Submit(t.Context(), Request{ID: "late", Prompt: prompt(5, 1)})
	var re *RequestError
	if !errors.As(err, &re) || re.Kind != KindUnavailable {
		t.Errorf("a closing engine says %v to a new request", err)
	}
	return done
}

func still(t *testing.T, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		t.Fatalf("it has closed already: %v", err)
	default:
	}
}

// P is told to close while it holds blocks that D has not asked for yet: it hands them over first.
func TestPrefillDrainsHold(t *testing.T) {
	x := newPair(t, nil)
	p := prompt(70, 1)
	prefill, decode := x.legs("r", p, 6)
	checkAnswer(t, "P", generate(t, x.p, prefill), expect(t, p, 1, model.Sampling{}))
	done := closing(t, x.p)
	still(t, done)
	a := generate(t, x.d, decode)
	checkAnswer(t, "D", a, expect(t, p, 6, model.Sampling{}))
	if a.Usage.External != 69 {
		t.Errorf("%+v", a.Usage)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	settle(t, x.d)
}

// P is told to close while it computes what D waits for: it computes it and hands it over first.
func TestPrefillDrainsPrefill(t *testing.T) {
	x := newPair(t, nil)
	p := prompt(300, 1)
	prefill, decode := x.legs("r", p, 3)
	d, s := submit1(t, x.d, decode), submit1(t, x.p, prefill)
	done := closing(t, x.p)
	checkAnswer(t, "P", read(t, s), expect(t, p, 1, model.Sampling{}))
	checkAnswer(t, "D", read(t, d), expect(t, p, 3, model.Sampling{}))
	if err := <-done; err != nil {
		t.Error(err)
	}
	settle(t, x.d)
}

// P's bound ends before D asks: the hold ends with P, and D's request ends as its policy says.
func TestPrefillDrainGivesUp(t *testing.T) {
	x := newPair(t, recompute)
	p := prompt(70, 1)
	prefill, decode := x.legs("r", p, 6)
	checkAnswer(t, "P", generate(t, x.p, prefill), expect(t, p, 1, model.Sampling{}))
	done := closing(t, x.p)
	still(t, done)
	closeNow(t, x.p)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if s := x.p.Stats(); s.Held != 1 || s.Waiting+s.Running+s.WaitingRemote != 0 {
		t.Errorf("P at its end: %+v", s)
	}
	a := generate(t, x.d, decode)
	checkAnswer(t, "D", a, expect(t, p, 6, model.Sampling{}))
	if a.LoadErr == nil {
		t.Error("D had its KV from nowhere")
	}
	settle(t, x.d)
}

// D is told to close while it waits for KV that P has not computed yet: it receives it and answers.
func TestDecodeDrainsReceive(t *testing.T) {
	x := newPair(t, nil)
	p := prompt(70, 1)
	prefill, decode := x.legs("r", p, 6)
	d := submit1(t, x.d, decode)
	done := closing(t, x.d)
	still(t, done)
	checkAnswer(t, "P", generate(t, x.p, prefill), expect(t, p, 1, model.Sampling{}))
	checkAnswer(t, "D", read(t, d), expect(t, p, 6, model.Sampling{}))
	if err := <-done; err != nil {
		t.Error(err)
	}
	settle(t, x.p)
}

// D's bound ends before the KV comes: the client is told, what P computes later is written nowhere,
// and P's blocks come back.
func TestDecodeDrainGivesUp(t *testing.T) {
	t.Parallel()
	x := newPair(t, func(c *Config) { c.Lease = shortLease })
	prefill, decode := x.legs("r", prompt(70, 1), 6)
	d := submit1(t, x.d, decode)
	closeNow(t, x.d)
	if a := read(t, d); a.Finish != connector.FinishAbort || a.Err.Kind != KindUnavailable || a.Err.Phase != "close" {
		t.Errorf("%+v", a.Output)
	}
	checkAnswer(t, "P", generate(t, x.p, prefill), expect(t, prefill.Prompt, 1, model.Sampling{}))
	settle(t, x.p)
}
