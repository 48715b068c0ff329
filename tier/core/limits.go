package core

const (
	// MaxJobs bounds the loads and stores in flight together. Each holds its blocks; a tier that is
	// slower than the engine then gets fewer stores instead of a longer queue.
	MaxJobs = 8192

	// MaxRequests bounds the requests between Begin and their end; an engine has at most some
	// thousand at once.
	MaxRequests = 65536

	// MaxTiers bounds the tiers behind the CPU.
	MaxTiers = 8

	// peerShareDiv: peers may hold one part in this many of the slots by their lookups, unless
	// configured. The rest stays for the engine whatever peers do.
	peerShareDiv = 2
)
