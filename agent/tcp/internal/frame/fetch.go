package frame

import "fmt"

const fetchFixed = 8 + 4 + 16

// Fetch asks for a part of a READ; data streams.
//
//	id 8 │ index 4 │ grant 16 │ (address 8, length 4) …
type Fetch struct {
	ID     uint64
	Index  int
	Grant  [16]byte
	Ranges []Range
	Bytes  int // their sum; not encoded
}

// Append encodes.
func (f Fetch) Append(dst []byte) []byte {
	at := len(dst)
	dst = le.AppendUint32(le.AppendUint64(begin(dst, KindFetch), f.ID), uint32(f.Index))
	dst = append(dst, f.Grant[:]...)
	return finish(appendRanges(dst, f.Ranges), at)
}

// DecodeFetch decodes the body, using buf for the ranges.
func DecodeFetch(b []byte, buf []Range) (Fetch, error) {
	if len(b) < fetchFixed {
		return Fetch{}, errShort
	}
	index := le.Uint32(b[8:])
	if index >= MaxChunks {
		return Fetch{}, fmt.Errorf("chunk %d; at most %d are allowed", index, MaxChunks)
	}
	f := Fetch{ID: le.Uint64(b), Index: int(index), Grant: [16]byte(b[12:])}
	var err error
	f.Ranges, f.Bytes, err = decodeRanges(b[fetchFixed:], buf)
	return f, err
}
