package wire

import (
	"math"

	"github.com/tinylib/msgp/msgp"
)

// AppendClock appends the second frame of a side channel's reply: the server's monotonic clock in
// seconds.
func AppendClock(dst []byte, seconds float64) []byte {
	return msgp.AppendFloat64(dst, seconds)
}

// DecodeClock decodes the second frame of a reply. Stricter than stock: only a finite float64.
func DecodeClock(b []byte) (seconds float64, err error) {
	r := newReader("clock", b, 9)
	if c, ok := r.peek(); ok && c != mFloat64 {
		r.fail(ErrType, "has type byte 0x%02x instead of float64", c)
	}
	seconds = r.float()
	if r.err == nil && (math.IsNaN(seconds) || math.IsInf(seconds, 0)) {
		r.fail(ErrRange, "%v is not a time", seconds)
	}
	if err := r.end(); err != nil {
		return 0, err
	}
	return seconds, nil
}
