package engine

import (
	"context"
)

// Stream is the answer to one request. One goroutine reads it. What is not yet read is bounded by
// the tokens that the request may have; the engine never waits for a reader.
type Stream struct{}

// Next waits for more tokens or for ctx. The last Output of a request has Finish set, whatever
// happened to the request; after it, Next returns io.EOF. Other errors are ctx's only, and the
// request goes on.
func (s *Stream) Next(ctx context.Context) (Output, error) { panic("unreachable") }

// Close aborts the request if it has not ended, without waiting. It may be called at any time, more
// than once, and from any goroutine; a reader is given a last Output.
func (s *Stream) Close() { panic("unreachable") }
