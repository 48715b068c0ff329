package frame

import "fmt"

const dataSize = 8 + 4 + 4

// Data answers a Fetch; the same stream. Bytes of payload and a Trailer follow it.
//
//	id 8 │ index 4 │ bytes 4
type Data struct {
	ID    uint64
	Index int
	Bytes int
}

// Append encodes.
func (f Data) Append(dst []byte) []byte {
	at := len(dst)
	dst = le.AppendUint32(le.AppendUint64(begin(dst, KindData), f.ID), uint32(f.Index))
	return finish(le.AppendUint32(dst, uint32(f.Bytes)), at)
}

// DecodeData decodes the body.
func DecodeData(b []byte) (Data, error) {
	if len(b) != dataSize {
		return Data{}, errShort
	}
	n := le.Uint32(b[12:])
	if n == 0 || n > MaxPayload {
		return Data{}, fmt.Errorf("payload of %d bytes", n)
	}
	return Data{ID: le.Uint64(b), Index: int(le.Uint32(b[8:])), Bytes: int(n)}, nil
}
