package wire

import "math"

// skip passes over one value of any type without recursion.
func (r *reader) skip() {
	var left [maxSkipDepth]uint64 // values still to come per open container
	depth := 0
	for {
		n := r.skipOne()
		if r.err != nil {
			return
		}
		if n > 0 {
			if depth == maxSkipDepth {
				r.fail(ErrLimit, "is nested deeper than %d", maxSkipDepth)
				return
			}
			left[depth] = n
			depth++
			continue
		}
		for depth > 0 {
			left[depth-1]--
			if left[depth-1] > 0 {
				break
			}
			depth--
		}
		if depth == 0 {
			return
		}
	}
}

// skipOne passes over one scalar, or over the header of a container and returns how many values it
// holds.
func (r *reader) skipOne() uint64 {
	c, ok := r.peek()
	if !ok {
		return 0
	}
	switch {
	case c < 0x80 || c >= 0xe0 || c == mNil || c == mFalse || c == mTrue:
		r.next(1)
	case c&0xf0 == 0x80 || c == mMap16 || c == mMap32:
		return 2 * uint64(r.mapLen())
	case c&0xf0 == 0x90 || c == mArray16 || c == mArray32:
		return uint64(r.arrayLen(math.MaxInt))
	case c&0xe0 == 0xa0:
		r.next(1 + int(c&0x1f))
	case c >= mStr8 && c <= mStr32:
		r.next(r.count(r.sized(1<<(c-mStr8)), 1, math.MaxInt))
	case c >= mBin8 && c <= mBin32:
		r.next(r.count(r.sized(1<<(c-mBin8)), 1, math.MaxInt))
	case c >= mExt8 && c <= mExt32:
		n := r.count(r.sized(1<<(c-mExt8)), 1, math.MaxInt)
		r.next(1 + n) // the ext's own type byte
	case c >= mFixExt1 && c <= mFixExt9:
		r.next(2 + 1<<(c-mFixExt1))
	case c == mFloat32:
		r.next(5)
	case c == mFloat64:
		r.next(9)
	case c >= mUint8 && c <= mUint64:
		r.next(1 + 1<<(c-mUint8))
	case c >= mInt8 && c <= mInt64:
		r.next(1 + 1<<(c-mInt8))
	default: // 0xc1
		r.fail(ErrSyntax, "0x%02x is not a type of msgpack", c)
	}
	return 0
}
