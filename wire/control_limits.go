package wire

const (
	// MaxControl bounds a control message, bytes: some thousand registrations of ordinary ids. It is
	// what agents take as one notification by default.
	MaxControl = 1 << 20

	// MaxControlEntries bounds each list in a control message. A sender with more sends several.
	MaxControlEntries = 1 << 12

	// MaxReason bounds the reason of a cancel or failure, bytes: it ends in an error message that
	// people read.
	MaxReason = 1 << 10
)
