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

	// clientReadTimeout is how long a client may pause inside its body, and minBodyRate how many bytes
	// per second it must send on the whole once that time is over: a body of DefaultMaxBody ends
	// within 35 minutes.
	clientReadTimeout = 30 * time.Second
	minBodyRate       = 32 << 10

	// maxBodyBytes bounds the bodies that are being read or parsed, together. It is several of the
	// largest, or some hundred thousand usual ones. What is beyond gets 429.
	maxBodyBytes = 512 << 20

	// maxConns bounds connections: more than maxInFlight, so that /health and /metrics are still
	// answered. A quiet one costs some 20 KiB.
	maxConns = maxInFlight + 1024

	// maxReleaseBody bounds the body of /kv/release: an internal id, each byte of it escaped, and a token.
	maxReleaseBody = 8 << 10

	// maxKeyedHolds bounds the holds that are found by a release key: the oldest makes room, and is left to its
	// token and its lease. A release by key follows the answer that was lost by a network's round trip, not by
	// some thousand answers. One takes some 300 bytes.
	maxKeyedHolds = 4096

	// earlyRelease is how long a release is remembered whose request has not arrived: as long as the bytes of
	// a leg may wait for an overloaded engine to read them. maxEarlyReleases bounds them, some 200 bytes
	// each: whoever floods it costs others what a lost release costs, P's lease.
	earlyRelease     = time.Minute
	maxEarlyReleases = 8192

	// maxResetWait bounds the wait of a cache reset: new hand-offs wait as long.
	maxResetWait = 10 * time.Minute

	// headerTimeout, keepAlive and maxHeader bound a client's connection outside requests.
	headerTimeout = 10 * time.Second
	keepAlive     = 75 * time.Second
	maxHeader     = 64 << 10
)
