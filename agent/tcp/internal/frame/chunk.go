package frame

import "fmt"

const chunkFixed = 8 + 4 + 4 + 16

// Chunk is a part of a WRITE; data streams. Bytes of payload and a Trailer follow it.
//
//	id 8 │ index 4 │ chunks 4 │ grant 16 │ (address 8, length 4) …
type Chunk struct {
	ID     uint64
	Index  int
	Chunks int // of the transfer
	Grant  [16]byte
	Ranges []Range // where the payload goes, in order
	Bytes  int     // their sum; not encoded
}

// Append encodes.
func (f Chunk) Append(dst []byte) []byte {
	at := len(dst)
	dst = le.AppendUint64(begin(dst, KindChunk), f.ID)
	dst = le.AppendUint32(dst, uint32(f.Index))
	dst = le.AppendUint32(dst, uint32(f.Chunks))
	dst = append(dst, f.Grant[:]...)
	return finish(appendRanges(dst, f.Ranges), at)
}

// DecodeChunk decodes the body, using buf for the ranges.
func DecodeChunk(b []byte, buf []Range) (Chunk, error) {
	if len(b) < chunkFixed {
		return Chunk{}, errShort
	}
	index, chunks := le.Uint32(b[8:]), le.Uint32(b[12:])
	if chunks > MaxChunks || index >= chunks {
		return Chunk{}, fmt.Errorf("chunk %d of %d; at most %d are allowed", index, chunks, MaxChunks)
	}
	f := Chunk{ID: le.Uint64(b), Index: int(index), Chunks: int(chunks), Grant: [16]byte(b[16:])}
	var err error
	f.Ranges, f.Bytes, err = decodeRanges(b[chunkFixed:], buf)
	return f, err
}
