package wire

import (
	"math"

	"github.com/tinylib/msgp/msgp"
)

const requestMagic = "get_meta_msg"

// HandshakeRequest asks a side channel for the metadata of one rank (nixl-connector.md, section
// 2.2). A stock listener ends for good when it has no such rank, so ask it only for ranks known to
// exist.
type HandshakeRequest struct {
	PP, TP int
}

// AppendHandshakeRequest appends the one frame of a request: an array of the magic as bin and the
// two ranks.
func AppendHandshakeRequest(dst []byte, q HandshakeRequest) []byte {
	dst = msgp.AppendArrayHeader(dst, 3)
	dst = msgp.AppendBytes(dst, []byte(requestMagic))
	dst = appendInt(dst, q.PP)
	return appendInt(dst, q.TP)
}

// DecodeHandshakeRequest decodes a request for a listener. It answers what a stock listener answers:
// magicOK is false for a wrong magic, also for the right text as str, which stock only warns about;
// ranks may be integral floats or bools.
//
// Stricter than stock: a bin of three bytes is not taken for an array, negative ranks are refused.
// Whether the rank exists is the caller's to check.
func DecodeHandshakeRequest(b []byte) (q HandshakeRequest, magicOK bool, err error) {
	r := newReader("handshake request", b, MaxHandshakeRequest)
	if n := r.arrayLen(3); r.err == nil && n != 3 {
		r.fail(ErrType, "has %d elements instead of 3", n)
	}
	r.field = "magic"
	magicOK = r.magic()
	r.field = "pp_rank"
	q.PP = r.looseRank()
	r.field = "tp_rank"
	q.TP = r.looseRank()
	if err := r.end(); err != nil {
		return HandshakeRequest{}, false, err
	}
	return q, magicOK, nil
}

func (r *reader) magic() bool {
	if r.err != nil {
		return false
	}
	if c, ok := r.peek(); ok && c >= mBin8 && c <= mBin32 {
		return string(r.bin(MaxHandshakeRequest)) == requestMagic
	}
	r.skip()
	return false
}

// looseRank reads what Python compares equal to a rank: an int, an integral float or a bool.
func (r *reader) looseRank() int {
	c, _ := r.peek()
	switch c {
	case mFalse, mTrue:
		r.next(1)
		return int(c - mFalse)
	case mFloat32, mFloat64:
		f := r.float()
		if r.err == nil && (f != math.Trunc(f) || f < 0 || f > math.MaxInt32) {
			r.fail(ErrRange, "%v is not a rank", f)
		}
		return int(f)
	}
	return r.intIn(0, math.MaxInt)
}
