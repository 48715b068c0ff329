package connector

import "time"

const (
	// maxTimeout bounds every configured duration: a day is longer than any hand-off, and sums of
	// such durations stay far from overflow.
	maxTimeout = 24 * time.Hour

	// maxNumThreads bounds UCX's threads: each costs NIC resources, and more than this is a slip.
	maxNumThreads = 256

	// maxExtra bounds kv_connector_extra_config, bytes: nine keys need some hundred.
	maxExtra = 1 << 20

	// maxKeyCompared bounds how much of an unknown key is compared with the known ones, bytes.
	maxKeyCompared = 64

	// maxBoundary bounds an encoded StepMeta or WorkerOutput, bytes: a full ledger's registrations
	// of long prompts.
	maxBoundary = 1 << 30

	// maxBoundaryEntries bounds each list in them: a ledger has no more hand-offs, each at most once
	// in a list, and heartbeats name each in three ways. A prompt of 4 million tokens in blocks of 16 has
	// as many prefixes.
	maxBoundaryEntries = 1 << 18

	// maxBoundaryText bounds any text in them, bytes: request ids contain the client's header, error
	// reasons a peer's.
	maxBoundaryText = 64 << 10

	// maxBoundaryBlocks bounds the block ids of one request: 16 million tokens in blocks of 16.
	maxBoundaryBlocks = 1 << 20
)
