package zmtp

import (
	"encoding/binary"
	"math"
)

// Frame flags (ZMTP 3.1, "framing"). The other bits are reserved and must be zero.
const (
	flagMore    = 1 << 0
	flagLong    = 1 << 1
	flagCommand = 1 << 2
)

// frameHeader is a frame's flags and size, before its body.
type frameHeader struct {
	more    bool
	command bool
	size    int
}

// parseFlags checks the first byte of a frame and says how many bytes of size follow: 1 or 8.
func parseFlags(b byte) (h frameHeader, sizeBytes int, err error) {
	if b&^(flagMore|flagLong|flagCommand) != 0 {
		return h, 0, protocolf("frame flags 0x%02x use reserved bits", b)
	}
	h.more, h.command = b&flagMore != 0, b&flagCommand != 0
	if h.more && h.command {
		return h, 0, protocolf("a command frame has the MORE flag")
	}
	if b&flagLong != 0 {
		return h, 8, nil
	}
	return h, 1, nil
}

// parseSize reads the size field, of 1 or 8 bytes.
func parseSize(b []byte) (int, error) {
	if len(b) == 1 {
		return int(b[0]), nil
	}
	n := binary.BigEndian.Uint64(b)
	if n > math.MaxInt {
		return 0, limitf("frame of 0x%x bytes", n)
	}
	return int(n), nil
}

// appendFrameHeader appends flags and size, in the short form where it fits.
func appendFrameHeader(dst []byte, flags byte, size int) []byte {
	if size <= 255 {
		return append(dst, flags, byte(size))
	}
	dst = append(dst, flags|flagLong)
	return binary.BigEndian.AppendUint64(dst, uint64(size))
}

// budget is how much of one message may still come. It is the whole of the receiving limits, apart from I/O.
type budget struct {
	lim    *Limits
	frames int
	bytes  int
}

// admit charges the next frame of a message, before its body is read.
func (b *budget) admit(size int) error {
	switch {
	case size > b.lim.MaxFrameBytes:
		return limitf("frame of %d bytes, at most %d are taken", size, b.lim.MaxFrameBytes)
	case b.frames >= b.lim.MaxFrames:
		return limitf("message of more than %d frames", b.lim.MaxFrames)
	case size > b.lim.MaxMessageBytes-b.bytes:
		return limitf("message of at least %d bytes, at most %d are taken", b.bytes+size, b.lim.MaxMessageBytes)
	}
	b.frames++
	b.bytes += size
	return nil
}

// messageCost is what a message counts for in a queue, in bytes.
func messageCost(frames [][]byte) int {
	n := messageOverhead
	for _, f := range frames {
		n += len(f) + frameOverhead
	}
	return n
}
