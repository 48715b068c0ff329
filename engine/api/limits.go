package api

import "time"

const (
	// DefaultMaxBody bounds a request body; larger ones get 413. It is the router's bound plus what
	// the router adds.
	DefaultMaxBody = 64<<20 + 64<<10

	// maxInFlight bounds completion requests at a time, before the engine's own queue bounds them:
	// each may hold a body. One more gets 429.
	maxInFlight = 4096

	// maxRequestID bounds X-Request-Id. A router's is a client's of 128 with a UUID behind it, and
	// the engine bounds the internal id that is made of it.
	maxRequestID = 256

	// clientWriteTimeout is how long one write to a client may take: its buffers are full and it
	// does not read.
	clientWriteTimeout = 60 * time.Second

	// clientReadTimeout is how long a client may pause inside its body.
	clientReadTimeout = 30 * time.Second

	// headerTimeout, keepAlive and maxHeader bound a client's connection outside requests.
	headerTimeout = 10 * time.Second
	keepAlive     = 75 * time.Second
	maxHeader     = 64 << 10
)
