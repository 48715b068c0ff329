package frame

import "fmt"

const beginFixed = 8 + 4 + 8 + 16

// Begin announces a WRITE; control stream. Chunks on other streams may overtake it.
//
//	id 8 │ chunks 4 │ bytes 8 │ grant 16 │ notification …
type Begin struct {
	ID     uint64
	Chunks int
	Bytes  int64
	Grant  [16]byte
	Notif  []byte // none if empty; DecodeBegin's shares memory with the body
}

// Append encodes.
func (f Begin) Append(dst []byte) []byte {
	at := len(dst)
	dst = le.AppendUint64(begin(dst, KindBegin), f.ID)
	dst = le.AppendUint32(dst, uint32(f.Chunks))
	dst = le.AppendUint64(dst, uint64(f.Bytes))
	dst = append(dst, f.Grant[:]...)
	return finish(append(dst, f.Notif...), at)
}

// DecodeBegin decodes the body.
func DecodeBegin(b []byte) (Begin, error) {
	if len(b) < beginFixed {
		return Begin{}, errShort
	}
	f := Begin{ID: le.Uint64(b), Bytes: int64(le.Uint64(b[12:])), Grant: [16]byte(b[20:])}
	chunks := le.Uint32(b[8:])
	if chunks == 0 || chunks > MaxChunks || f.Bytes < int64(chunks) || f.Bytes > int64(chunks)*MaxPayload {
		return Begin{}, fmt.Errorf("transfer of %d bytes in %d chunks", f.Bytes, chunks)
	}
	f.Chunks = int(chunks)
	if len(b) > beginFixed {
		f.Notif = b[beginFixed:]
	}
	return f, nil
}
