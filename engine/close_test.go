package engine

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

func TestCloseWaitsForRequests(t *testing.T) {
	e := newEngine(t, nil)
	s := submit1(t, e, Request{ID: "a", Prompt: prompt(50, 1), MaxTokens: 20})
	if err := e.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	checkAnswer(t, "drained", read(t, s), expect(t, prompt(50, 1), 20, model.Sampling{}))
	_, err := e.Submit(t.Context(), Request{ID: "b", Prompt: prompt(5, 1)})
	var re *RequestError
	if !errors.As(err, &re) || re.Kind != KindUnavailable || e.Ready() == nil {
		t.Errorf("after Close: %v, ready %v", err, e.Ready())
	}
	if err := e.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestCloseGivesUp(t *testing.T) {
	e := newEngine(t, func(c *Config) { c.MaxRunning = 1 })
	var streams []*Stream
	for i := range 3 {
		streams = append(streams, submit1(t, e, Request{ID: kv.RequestID(fmt.Sprint(i)), Prompt: prompt(50, i), MaxTokens: 1900}))
	}
	if e.Ready() != nil {
		t.Error(e.Ready())
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := e.Close(ctx); err != nil {
		t.Fatal(err)
	}
	for _, s := range streams {
		if a := read(t, s); a.Finish != connector.FinishAbort || a.Err.Kind != KindUnavailable {
			t.Errorf("%+v", a.Output)
		}
	}
}

// A second Close with less patience ends the first one's waiting.
func TestCloseAgainGivesUp(t *testing.T) {
	e := newEngine(t, nil)
	s := submit1(t, e, Request{ID: "a", Prompt: prompt(50, 1), MaxTokens: 1900})
	first := make(chan error)
	go func() { first <- e.Close(context.Background()) }()
	closeNow(t, e)
	if err := <-first; err != nil {
		t.Error(err)
	}
	if a := read(t, s); a.Finish != connector.FinishAbort {
		t.Errorf("%+v", a.Output)
	}
}
