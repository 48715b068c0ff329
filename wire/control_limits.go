package wire

const (
	// MaxControl bounds a control message, bytes: some thousand registrations of ordinary ids. It is
	// what agents take as one notification by default.
	MaxControl = 1 << 20

	// MaxControlEntries bounds each list in a control message. A sender with more sends several.
	MaxControlEntries = 1 << 12

	// MaxReaders bounds the requests of one D that read the same KV: the n of a request, which
	// servers bound to 128 or less.
	MaxReaders = 1 << 10

	// MaxReason bounds the reason of a cancel or failure, bytes: it ends in an error message that
	// people read.
	MaxReason = 1 << 10
)
