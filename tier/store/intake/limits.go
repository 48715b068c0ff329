package intake

// Defaults of Config.
const (
	// DefaultBatches is how many peers are fetched from at a time: some transfers side by side keep a
	// network busy, more only hold memory.
	DefaultBatches = 8
	// DefaultBatchKeys is how many blocks one fetch asks for. The source pins them meanwhile, and a peer
	// of 128 blocks allows a quarter of them.
	DefaultBatchKeys = 32
	// DefaultPeerKeys is how many offered blocks of one peer wait: a long prompt's worth, some 100 KiB.
	DefaultPeerKeys = 2048
)
