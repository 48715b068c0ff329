package frame

import (
	"fmt"
	"math"
)

// Range is contiguous memory of the listener.
type Range struct {
	Addr uint64
	Len  int
}

const rangeSize = 8 + 4

func appendRanges(dst []byte, ranges []Range) []byte {
	for _, r := range ranges {
		dst = le.AppendUint64(dst, r.Addr)
		dst = le.AppendUint32(dst, uint32(r.Len))
	}
	return dst
}

// decodeRanges appends the ranges that fill b to buf[:0], and sums their lengths.
func decodeRanges(b []byte, buf []Range) (ranges []Range, total int, err error) {
	n := len(b) / rangeSize
	if n*rangeSize != len(b) || n == 0 || n > MaxRanges {
		return nil, 0, fmt.Errorf("%d bytes are not 1 to %d ranges", len(b), MaxRanges)
	}
	buf = buf[:0]
	for ; len(b) > 0; b = b[rangeSize:] {
		addr, length := le.Uint64(b), le.Uint32(b[8:])
		if length == 0 || length > MaxPayload || addr == 0 || addr > math.MaxUint64-uint64(length) {
			return nil, 0, fmt.Errorf("%d bytes at %#x are not a range", length, addr)
		}
		buf = append(buf, Range{Addr: addr, Len: int(length)})
		total += int(length)
	}
	if total > MaxPayload {
		return nil, 0, fmt.Errorf("chunk of %d bytes; at most %d are allowed", total, MaxPayload)
	}
	return buf, total, nil
}
