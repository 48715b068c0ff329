package fs

const (
	// maxKey bounds a key, bytes: its hexadecimal form with the suffix must be a file name (255).
	maxKey = 120

	// queuedLoads and queuedStores bound the jobs that wait for a worker. A load beyond it is a miss, a
	// store beyond it is not kept: a disk that cannot follow costs no memory.
	queuedLoads  = 1024
	queuedStores = 1024

	// defaultWorkers: a few requests in flight keep a disk busy; more only queue up in the kernel.
	defaultWorkers = 4
	maxWorkers     = 64

	// grain is what a file's size is rounded up to in the budget: a file system's usual block.
	grain = 4096

	// maxReported bounds the lists of Recovery; the counts go on.
	maxReported = 100
)
