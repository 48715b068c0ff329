package proxy

import "time"

const (
	// DefaultMaxBody is a 100k-token prompt with some images. Larger bodies get 413.
	DefaultMaxBody = 64 << 20

	// DefaultMaxInFlight bounds client requests at a time; each holds three goroutines and two
	// connections, one for several answers up to maxPairs times that. One more gets 429.
	DefaultMaxInFlight = 4096

	// DefaultMaxBodyBytes bounds the bodies of all requests at a time. Up to three copies of each
	// live while its legs are sent.
	DefaultMaxBodyBytes = 2 << 30

	// maxAttempts is how often a request is sent in all. A second one mends what a restarted engine
	// or a closed idle connection leaves behind; more would only multiply an overload.
	maxAttempts = 2

	// maxAnswer bounds D's answer if it is not streamed, and every other answer that is read whole.
	maxAnswer = 64 << 20

	// maxPrefillAnswer bounds P's answer: one token and its block ids.
	maxPrefillAnswer = 16 << 20

	// maxErrorBody bounds what is kept of an engine's error.
	maxErrorBody = 64 << 10

	// maxCoordinates bounds the answer of /kv/coordinates, which has some hundred bytes.
	maxCoordinates = 64 << 10

	// maxTargets bounds a pool: each request looks at every engine of it.
	maxTargets = 1024

	// coordinatesTimeout bounds asking P for its coordinates, which it always knows.
	coordinatesTimeout = 5 * time.Second

	// probeTimeout bounds one question of /ready.
	probeTimeout = 2 * time.Second

	// modelsTimeout bounds /v1/models, which engines answer from memory.
	modelsTimeout = 10 * time.Second

	// clientWriteTimeout is how long one write to a client may take: its buffers are full and it
	// does not read.
	clientWriteTimeout = 60 * time.Second

	// clientReadTimeout is how long a client may pause inside its body.
	clientReadTimeout = 30 * time.Second

	// prefillGrace is how long P may still answer when nobody waits for it any more, unless D has a leg as
	// well: an answer that is on its way tells what P keeps, and where, so that D can tell a stock P.
	prefillGrace = 100 * time.Millisecond

	// prefillTail is how long P may take for the rest of an answer that has begun and that nobody waits
	// for any more.
	prefillTail = time.Second

	// handGrace is what D gets to read a leg and to begin with it before the leg is cancelled, so that
	// it can tell P to let go; handTimeout bounds sending it at all.
	handGrace   = 250 * time.Millisecond
	handTimeout = 5 * time.Second

	// releaseTimeout bounds telling P to let a hold go, connecting included; P answers from memory.
	// maxReleases bounds how many are told at a time: one more is left to its lease. maxReleaseAnswer
	// bounds the answer, which has some twenty bytes, or an error.
	releaseTimeout   = 5 * time.Second
	maxReleases      = 256
	maxReleaseAnswer = 64 << 10

	// closeGrace is how long a router that ends waits for requests that its server has cut, for the releases
	// under way and for those of the turns it remembers, all together: some thousand round trips. maxEndReleases
	// bounds how many of these turns one engine is told at a time, on a connection each.
	closeGrace     = time.Second
	maxEndReleases = 16

	// maxPairs bounds how many of a request's answers are under way at a time.
	maxPairs = 16

	// afterDone is how long an engine may take to end its answer behind [DONE].
	afterDone = 250 * time.Millisecond

	// headerTimeout, keepAlive and maxHeader bound a client's connection outside requests.
	headerTimeout = 10 * time.Second
	keepAlive     = 75 * time.Second
	maxHeader     = 64 << 10

	// upstreamIdle is how long a connection to an engine is kept for the next leg: less than the 5 s
	// after which uvicorn closes it.
	upstreamIdle = 4 * time.Second

	// idlePerEngine bounds kept connections per engine.
	idlePerEngine = 1024
)
