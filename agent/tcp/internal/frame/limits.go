package frame

// Limits of the format. Each is checked by both sides.
const (
	// MaxName bounds an agent's name; ours are 32 characters.
	MaxName = 128
	// MaxStreams bounds the data streams of one session: more do not make one network faster.
	MaxStreams = 16
	// MaxText bounds what a peer may say in words.
	MaxText = 512
	// MaxNotif bounds a notification whatever the settings: far beyond the longest registration.
	MaxNotif = 16 << 20
	// MaxRanges bounds the ranges of one chunk, and so its body to 12 KiB.
	MaxRanges = 1024
	// MaxPayload bounds the payload of one chunk: what is wasted when one is cut short.
	MaxPayload = 8 << 20
	// MaxChunks bounds the chunks of one transfer: one bit each is kept.
	MaxChunks = 1 << 18
)
