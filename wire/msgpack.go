package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// Type bytes of msgpack that the reader looks at.
const (
	mNil     = 0xc0
	mFalse   = 0xc2
	mTrue    = 0xc3
	mBin8    = 0xc4
	mBin16   = 0xc5
	mBin32   = 0xc6
	mExt8    = 0xc7
	mExt32   = 0xc9
	mFloat32 = 0xca
	mFloat64 = 0xcb
	mUint8   = 0xcc
	mUint64  = 0xcf
	mInt8    = 0xd0
	mInt64   = 0xd3
	mFixExt1 = 0xd4
	mFixExt9 = 0xd8 // fixext 16
	mStr8    = 0xd9
	mStr32   = 0xdb
	mArray16 = 0xdc
	mArray32 = 0xdd
	mMap16   = 0xde
	mMap32   = 0xdf
)

// appendInt appends v in its narrowest form, unsigned unless negative, as the stock encoder does.
func appendInt(dst []byte, v int) []byte {
	if v >= 0 {
		return msgp.AppendUint64(dst, uint64(v))
	}
	return msgp.AppendInt64(dst, int64(v))
}

// reader decodes one message. The first error sticks: later reads return zero values, so a decoder
// checks it once per loop turn and at the end. Nothing it returns shares memory with the input,
// except what key returns.
type reader struct {
	msg   string
	buf   []byte
	off   int
	field string // key being read, for errors
	elem  int    // element of that field, -1 for none
	err   *DecodeError
}

func newReader(msg string, b []byte, limit int) *reader {
	r := &reader{msg: msg, buf: b, elem: -1}
	if len(b) > limit {
		r.fail(ErrLimit, "has %d bytes, more than %d", len(b), limit)
	}
	return r
}

func (r *reader) fail(kind error, format string, args ...any) {
	if r.err != nil {
		return
	}
	field := r.field
	if r.elem >= 0 {
		field += "[" + strconv.Itoa(r.elem) + "]"
	}
	r.err = &DecodeError{Message: r.msg, Field: field, Offset: r.off,
		Reason: fmt.Sprintf(format, args...), Kind: kind}
}

// end reports the first error, or bytes behind the message.
func (r *reader) end() error {
	r.field, r.elem = "", -1
	if r.err == nil && r.off != len(r.buf) {
		r.fail(ErrSyntax, "%d bytes follow the message", len(r.buf)-r.off)
	}
	if r.err != nil {
		return r.err
	}
	return nil
}

func (r *reader) remaining() int { return len(r.buf) - r.off }

func (r *reader) peek() (byte, bool) {
	if r.err != nil {
		return 0, false
	}
	if r.off >= len(r.buf) {
		r.fail(ErrSyntax, "the input ends here")
		return 0, false
	}
	return r.buf[r.off], true
}

// next takes n bytes; nil after an error. n may come from the wire.
func (r *reader) next(n int) []byte {
	if r.err != nil {
		return nil
	}
	if n < 0 || n > r.remaining() {
		r.fail(ErrSyntax, "the input ends %d bytes too early", n-r.remaining())
		return nil
	}
	b := r.buf[r.off : r.off+n : r.off+n]
	r.off += n
	return b
}

// sized reads a big-endian number of n bytes behind the type byte.
func (r *reader) sized(n int) uint64 {
	b := r.next(1 + n)
	if b == nil {
		return 0
	}
	var v uint64
	for _, c := range b[1:] {
		v = v<<8 | uint64(c)
	}
	return v
}

func (r *reader) wrongType(want string, c byte) {
	r.fail(ErrType, "expected %s, got %s", want, typeName(c))
}

// count turns a length of the wire into an int after checking that so many items of at least size
// bytes can follow and that it is within limit.
func (r *reader) count(n uint64, size, limit int) int {
	if r.err != nil {
		return 0
	}
	if n > uint64(r.remaining()/size) {
		r.fail(ErrSyntax, "announces %d items but only %d bytes follow", n, r.remaining())
		return 0
	}
	if n > uint64(limit) {
		r.fail(ErrLimit, "has %d items, more than %d", n, limit)
		return 0
	}
	return int(n)
}

// mapLen reads a map header. The loop over the entries must stop at the first error.
func (r *reader) mapLen() int {
	c, ok := r.peek()
	switch {
	case !ok:
		return 0
	case c&0xf0 == 0x80:
		r.next(1)
		return r.count(uint64(c&0x0f), 2, math.MaxInt)
	case c == mMap16 || c == mMap32:
		return r.count(r.sized(2<<(c-mMap16)), 2, math.MaxInt)
	}
	r.wrongType("map", c)
	return 0
}

// arrayLen reads an array header of at most limit items.
func (r *reader) arrayLen(limit int) int {
	c, ok := r.peek()
	switch {
	case !ok:
		return 0
	case c&0xf0 == 0x90:
		r.next(1)
		return r.count(uint64(c&0x0f), 1, limit)
	case c == mArray16 || c == mArray32:
		return r.count(r.sized(2<<(c-mArray16)), 1, limit)
	}
	r.wrongType("array", c)
	return 0
}

// strBytes reads a str. The result shares memory with the input.
func (r *reader) strBytes(limit int) []byte {
	c, ok := r.peek()
	if !ok {
		return nil
	}
	var n int
	switch {
	case c&0xe0 == 0xa0:
		r.next(1)
		n = r.count(uint64(c&0x1f), 1, limit)
	case c >= mStr8 && c <= mStr32:
		n = r.count(r.sized(1<<(c-mStr8)), 1, limit)
	default:
		r.wrongType("str", c)
		return nil
	}
	b := r.next(n)
	if !utf8.Valid(b) {
		r.fail(ErrSyntax, "is not UTF-8")
		return nil
	}
	return b
}

func (r *reader) str(limit int) string { return string(r.strBytes(limit)) }

// key reads a map key and makes it the field that errors name. The result shares memory with the
// input.
func (r *reader) key() []byte {
	r.elem, r.field = -1, "key"
	k := r.strBytes(MaxText)
	if r.err == nil {
		r.field = fieldName(k)
	}
	return k
}

// fieldName keeps a hostile key from filling a log.
func fieldName(k []byte) string {
	const most = 64
	if len(k) > most {
		return string(bytes.ToValidUTF8(k[:most], nil)) + "…"
	}
	return string(k)
}

// bin reads a bin and copies it; never nil without an error.
func (r *reader) bin(limit int) []byte {
	c, ok := r.peek()
	if !ok {
		return nil
	}
	if c < mBin8 || c > mBin32 {
		r.wrongType("bin", c)
		return nil
	}
	b := r.next(r.count(r.sized(1<<(c-mBin8)), 1, limit))
	if r.err != nil {
		return nil
	}
	return append(make([]byte, 0, len(b)), b...)
}

// isNil takes a nil if there is one.
func (r *reader) isNil() bool {
	if c, ok := r.peek(); !ok || c != mNil {
		return false
	}
	r.next(1)
	return true
}

// integer reads any int as magnitude and sign: the value is u, or -u if neg.
func (r *reader) integer() (u uint64, neg bool) {
	c, ok := r.peek()
	switch {
	case !ok:
		return 0, false
	case c < 0x80:
		r.next(1)
		return uint64(c), false
	case c >= 0xe0:
		r.next(1)
		return uint64(-int8(c)), true
	case c >= mUint8 && c <= mUint64:
		return r.sized(1 << (c - mUint8)), false
	case c >= mInt8 && c <= mInt64:
		n := 1 << (c - mInt8)
		u, shift := r.sized(n), 64-8*n
		if v := int64(u<<shift) >> shift; v < 0 {
			return -uint64(v), true
		}
		return u, false
	}
	r.wrongType("int", c)
	return 0, false
}

// int reads an int that fits Go's.
func (r *reader) int() int { return r.intIn(math.MinInt, math.MaxInt) }

// intIn reads an int and checks lo <= v <= hi.
func (r *reader) intIn(lo, hi int) int {
	start := r.off
	u, neg := r.integer()
	if r.err != nil {
		return 0
	}
	v := int(u)
	fits := u <= math.MaxInt
	if neg {
		v = int(-u)
		fits = u <= -math.MinInt
	}
	if !fits || v < lo || v > hi {
		sign := ""
		if neg {
			sign = "-"
		}
		r.off = start
		r.fail(ErrRange, "%s%d is outside %d…%d", sign, u, lo, hi)
		return 0
	}
	return v
}

// uint reads an int that is not negative.
func (r *reader) uint() uint64 {
	start := r.off
	u, neg := r.integer()
	if neg {
		r.off = start
		r.fail(ErrRange, "-%d is negative", u)
		return 0
	}
	return u
}

// float reads a float of either width.
func (r *reader) float() float64 {
	c, ok := r.peek()
	switch {
	case !ok:
		return 0
	case c == mFloat32:
		if b := r.next(5); b != nil {
			return float64(math.Float32frombits(binary.BigEndian.Uint32(b[1:])))
		}
		return 0
	case c == mFloat64:
		if b := r.next(9); b != nil {
			return math.Float64frombits(binary.BigEndian.Uint64(b[1:]))
		}
		return 0
	}
	r.wrongType("float", c)
	return 0
}

func typeName(c byte) string {
	switch {
	case c < 0x80 || c >= 0xe0 || c >= mUint8 && c <= mInt64:
		return "int"
	case c&0xf0 == 0x80 || c == mMap16 || c == mMap32:
		return "map"
	case c&0xf0 == 0x90 || c == mArray16 || c == mArray32:
		return "array"
	case c&0xe0 == 0xa0 || c >= mStr8 && c <= mStr32:
		return "str"
	case c >= mBin8 && c <= mBin32:
		return "bin"
	case c == mNil:
		return "nil"
	case c == mFalse || c == mTrue:
		return "bool"
	case c == mFloat32 || c == mFloat64:
		return "float"
	case c >= mExt8 && c <= mExt32 || c >= mFixExt1 && c <= mFixExt9:
		return "ext"
	}
	return fmt.Sprintf("byte 0x%02x", c)
}

// keySet remembers which of at most 32 keys of a map were there.
type keySet uint32

func (s *keySet) add(i int) { *s |= 1 << i }

// require fails for the first of keys, numbered from 0, that is not in seen.
func (r *reader) require(seen keySet, keys ...string) {
	for i, k := range keys {
		if seen&(1<<i) == 0 {
			r.field, r.elem = k, -1
			r.fail(ErrMissing, "is missing")
			return
		}
	}
}

// ints reads an array of at most limit ints; never nil without an error.
func (r *reader) ints(limit, lo, hi int) []int {
	n := r.arrayLen(limit)
	out := make([]int, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		out = append(out, r.intIn(lo, hi))
	}
	return out
}

// strs reads an array of at most limit strs; never nil without an error.
func (r *reader) strs(limit, textLimit int) []string {
	n := r.arrayLen(limit)
	out := make([]string, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		out = append(out, r.str(textLimit))
	}
	return out
}
