package tcp

import "github.com/kvferry/kvferry/agent/tcp/internal/frame"

const (
	// stepBytes is how much one non-blocking call moves while it holds a grant: what Revoke may
	// have to wait for, some tens of microseconds. It also fits the CPU's cache, so that the
	// checksum reads no memory again.
	stepBytes = 256 << 10

	// stepRanges bounds the ranges of one such call; the kernel takes no more than 1024.
	stepRanges = 256

	// fetchesAhead is how many Fetches wait for an answer on one stream: enough to hide a round
	// trip behind a chunk, few enough that a listener answers others in between.
	fetchesAhead = 4

	// strangers is how many connections may be without a Hello. When it is full, the one that has
	// been silent longest makes room, so that idle connections cannot keep anybody out.
	strangers = 256

	// recordSlack is how many more incoming WRITEs a session may have than Welcome said: those
	// refused before their Begin came stay until it does.
	recordSlack = 64

	// sessionChunks bounds the chunks of all incoming WRITEs of one session: 128 KiB of bits.
	sessionChunks = 4 * frame.MaxChunks

	// linkChunks is what a poster allows itself of it: a listener may know of the end of a
	// transfer later than its poster does.
	linkChunks = sessionChunks / 2

	// maxAddresses bounds the addresses in an offer.
	maxAddresses = 8

	// shortBody bounds the frames of strangers and of what a listener answers, dataBody those of
	// data streams: a chunk's ranges. Control frames are bounded by the limit on notifications.
	shortBody = 1 << 10
	dataBody  = 16 << 10

	// bodyStep is what is read of a long body before more memory is made for it: a length alone
	// costs nothing.
	bodyStep = 64 << 10

	// scratchBytes is read at once of what has no place to go.
	scratchBytes = 64 << 10
)
