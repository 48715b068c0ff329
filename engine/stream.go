package engine

import (
	"context"
	"io"
	"sync"
)

// Stream is the answer to one request. One goroutine reads it. What is not yet read is bounded by
// the tokens that the request may have; the engine never waits for a reader.
type Stream struct {
	abort func()        // tells the loop that nobody wants the rest
	wake  chan struct{} // holds one element when there is something to read

	mu struct {
		sync.Mutex
		unread Output // all outputs since the last Next, as one
		any    bool   // unread is one
		ended  bool   // the last output was written
		read   bool   // and read
	}
}

func newStream() *Stream { return &Stream{wake: make(chan struct{}, 1)} }

// Next waits for more tokens or for ctx. The last Output of a request has Finish set, whatever
// happened to the request; after it, Next returns io.EOF. Other errors are ctx's only, and the
// request goes on.
func (s *Stream) Next(ctx context.Context) (Output, error) {
	for {
		if out, ok, err := s.take(); ok || err != nil {
			return out, err
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return Output{}, ctx.Err()
		}
	}
}

// Close aborts the request if it has not ended; it does not wait until it has. A request that ends at
// the same moment holds no blocks for a peer afterwards. It may be called at any time, more than once,
// and from any goroutine; a reader is given a last Output.
func (s *Stream) Close() {
	s.mu.Lock()
	ended := s.mu.ended
	s.mu.Unlock()
	if !ended {
		s.abort()
	}
}

// Discard is Close for an answer that has reached nobody who might ask for the KV: if the request has
// ended with blocks that are held for a peer, they are let go as by Engine.Release. It may be called as
// Close may, and does nothing if nothing is held.
func (s *Stream) Discard() { s.abort() }

func (s *Stream) take() (out Output, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.mu.any {
		if s.mu.read {
			return Output{}, false, io.EOF
		}
		return Output{}, false, nil
	}
	out = s.mu.unread
	s.mu.unread, s.mu.any = Output{}, false
	s.mu.read = s.mu.ended
	return out, true, nil
}

// put adds an output; the loop calls it.
func (s *Stream) put(o Output) {
	s.mu.Lock()
	u := &s.mu.unread
	o.Tokens = append(u.Tokens, o.Tokens...)
	o.LogProbs = append(u.LogProbs, o.LogProbs...)
	o.Text = u.Text + o.Text
	*u = o
	s.mu.any = true
	s.mu.ended = o.Finish != ""
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
