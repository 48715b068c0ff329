package connector

import "time"

const (
	// maxTimeout bounds every configured duration: a day is longer than any hand-off, and sums of
	// such durations stay far from overflow.
	maxTimeout = 24 * time.Hour

	// maxNumThreads bounds UCX's threads: each costs NIC resources, and more than this is a slip.
	maxNumThreads = 256
)
