package engine

const (
	// MaxQueueLimit bounds Config.MaxQueue: each queued request holds its prompt, and a client
	// that waits behind a hundred thousand others is better told so.
	MaxQueueLimit = 1 << 16

	// MaxRunningLimit bounds Config.MaxRunning: every running request gets at least one token in
	// every step, so that a step of this many already takes seconds on a CPU.
	MaxRunningLimit = 1024

	// MaxBatchTokensLimit bounds Config.MaxBatchTokens: the activations of one step are allocated
	// for this many tokens.
	MaxBatchTokensLimit = 1 << 14

	// MaxCacheBytes bounds the KV cache memory, well below what one mapping may have.
	MaxCacheBytes = 1 << 40

	// MaxTierMemory bounds the CPU tier's memory likewise.
	MaxTierMemory = 1 << 40

	// MaxStopStrings and MaxStopBytes bound the work of looking for stop strings after every
	// token, and the text that is held back because it may be the start of one.
	MaxStopStrings = 16
	MaxStopBytes   = 1024

	// MaxStopTokens bounds the set that every sampled token is compared with.
	MaxStopTokens = 128

	// MaxRequestID bounds an internal request id in bytes. It travels in every notification about
	// the request, and ids come from clients' X-Request-Id headers.
	MaxRequestID = 512

	// MaxSalt bounds a cache salt, and each extra key, in bytes; they are hashed once per prompt.
	MaxSalt = 1024

	// MaxExtras bounds the extra keys of a request: stock engines admit far fewer images per prompt.
	MaxExtras = 256

	// MaxAdapters bounds Config.Adapters: each has weights of its own.
	MaxAdapters = 64

	// inboxDepth is how many messages of Submit, Close of streams and Stats may wait for the loop.
	// It only smooths bursts: a sender that finds it full waits, and the loop never blocks.
	inboxDepth = 64
)
