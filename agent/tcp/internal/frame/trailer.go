package frame

import "fmt"

// Trailer follows the payload of a Chunk or a Data.
//
//	status 4 (0 whole, 1 abandoned) │ crc 4
type Trailer struct {
	Abandoned bool   // the sender may not read the memory any more; the payload is filled with zeros
	CRC       uint32 // CRC32C (Castagnoli) of the payload; 0 if abandoned
}

// Append encodes.
func (t Trailer) Append(dst []byte) []byte {
	var status uint32
	if t.Abandoned {
		status = 1
	}
	return le.AppendUint32(le.AppendUint32(dst, status), t.CRC)
}

// DecodeTrailer decodes exactly TrailerSize bytes.
func DecodeTrailer(b []byte) (Trailer, error) {
	if len(b) != TrailerSize {
		return Trailer{}, errShort
	}
	status, crc := le.Uint32(b), le.Uint32(b[4:])
	if status > 1 || status == 1 && crc != 0 {
		return Trailer{}, fmt.Errorf("trailer with status %d, checksum %#x", status, crc)
	}
	return Trailer{Abandoned: status == 1, CRC: crc}, nil
}
