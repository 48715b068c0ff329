package wire

import (
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
)

// Forms of single fields that more than one message has.

// appendOptStr appends a text of which the empty one means nil.
func appendOptStr(b []byte, s string) []byte {
	if s == "" {
		return msgp.AppendNil(b)
	}
	return msgp.AppendString(b, s)
}

// appendOptInt appends a number of which 0 means nil.
func appendOptInt(b []byte, v int) []byte {
	if v == 0 {
		return msgp.AppendNil(b)
	}
	return appendInt(b, v)
}

func (r *reader) optStr(limit int) string {
	if r.isNil() {
		return ""
	}
	return r.str(limit)
}

func (r *reader) optIntIn(lo, hi int) int {
	if r.isNil() {
		return 0
	}
	return r.intIn(lo, hi)
}

// binExactly reads a bin of exactly len(dst) bytes.
func (r *reader) binExactly(dst []byte) {
	b := r.bin(len(dst))
	if r.err == nil && len(b) != len(dst) {
		r.fail(ErrRange, "has %d bytes instead of %d", len(b), len(dst))
	}
	copy(dst, b)
}

// extensionKey reads a key inside "kvferry" and makes it the field that errors name.
func (r *reader) extensionKey() []byte {
	k := r.key()
	r.field = extensionKey + "." + r.field
	return k
}

func appendBlockIDs(b []byte, ids kv.BlockIDs) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(ids)))
	for _, g := range ids {
		b = msgp.AppendArrayHeader(b, uint32(len(g)))
		for _, id := range g {
			b = msgp.AppendUint64(b, uint64(id))
		}
	}
	return b
}

// blockIDs reads [[int]], or a flat [int] as one group. The result is never nil without an error.
func (r *reader) blockIDs() kv.BlockIDs {
	n := r.arrayLen(MaxBlocks)
	if n == 0 {
		return kv.BlockIDs{}
	}
	if c, ok := r.peek(); ok && typeName(c) != "array" {
		return kv.BlockIDs{r.group(n)}
	}
	if n > MaxGroups {
		r.fail(ErrLimit, "has %d groups, more than %d", n, MaxGroups)
		return nil
	}
	ids, blocks := make(kv.BlockIDs, 0, n), 0
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		m := r.arrayLen(MaxBlocks - blocks)
		ids = append(ids, r.group(m))
		blocks += m
	}
	return ids
}

func (r *reader) group(n int) []kv.BlockID {
	g := make([]kv.BlockID, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		g = append(g, kv.BlockID(r.intIn(0, math.MaxUint32)))
	}
	return g
}

// badText says why a text cannot be used; "" if it can.
func badText(s string, limit int, optional bool) (reason string, kind error) {
	switch {
	case s == "" && !optional:
		return "is empty", ErrRange
	case len(s) > limit:
		return "has " + strconv.Itoa(len(s)) + " bytes, more than " + strconv.Itoa(limit), ErrLimit
	case !utf8.ValidString(s):
		return "is not UTF-8", ErrSyntax
	}
	return "", nil
}
