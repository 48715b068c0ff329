package engine

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

func TestStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStream()
		aborts := 0
		s.abort = func() { aborts++ }
		s.put(Output{Tokens: []kv.Token{1}, Text: "a", LogProbs: []float64{-1}})
		s.put(Output{Tokens: []kv.Token{2}, Text: "b", LogProbs: []float64{-2}})
		out, err := s.Next(t.Context())
		want := Output{Tokens: []kv.Token{1, 2}, Text: "ab", LogProbs: []float64{-1, -2}}
		if d := cmp.Diff(want, out); d != "" || err != nil {
			t.Fatalf("a slow reader: %v\n%s", err, d)
		}

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.Next(ctx); !errors.Is(err, context.Canceled) {
			t.Fatalf("a reader who gave up: %v", err)
		}

		got := make(chan Output)
		go func() {
			out, _ := s.Next(t.Context())
			got <- out
		}()
		synctest.Wait() // the reader waits
		s.put(Output{Tokens: []kv.Token{3}, Finish: connector.FinishLength})
		if out := <-got; out.Finish != connector.FinishLength || len(out.Tokens) != 1 {
			t.Fatalf("a waiting reader got %+v", out)
		}
		for range 2 {
			if _, err := s.Next(t.Context()); err != io.EOF {
				t.Fatalf("after the end: %v", err)
			}
		}
		s.Close()
		if aborts != 0 {
			t.Error("an ended request was aborted")
		}
	})
}

func TestStreamCloseAborts(t *testing.T) {
	s := newStream()
	aborts := 0
	s.abort = func() { aborts++ }
	s.Close()
	if aborts != 1 {
		t.Errorf("%d aborts", aborts)
	}
	s.put(Output{Finish: connector.FinishAbort})
	if out, err := s.Next(t.Context()); err != nil || out.Finish != connector.FinishAbort {
		t.Errorf("the last output is %+v, %v", out, err)
	}
}
