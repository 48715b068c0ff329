package scheduler

const (
	// maxRequests bounds the hand-offs in the ledger. An engine holds far fewer requests, since
	// each needs blocks or a place in its queue; a request beyond it is refused at arrival.
	maxRequests = 1 << 16

	// maxRanks bounds TP x PP, so that a slip in a configuration cannot make the ledger allocate
	// without reason. The largest engines in use have some hundred ranks.
	maxRanks = 1 << 12
)
