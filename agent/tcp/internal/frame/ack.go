package frame

// AppendAck says that a chunk has arrived whole; the chunk's own stream.
//
//	id 8 │ index 4
func AppendAck(dst []byte, id uint64, index int) []byte {
	at := len(dst)
	return finish(le.AppendUint32(le.AppendUint64(begin(dst, KindAck), id), uint32(index)), at)
}

// DecodeAck decodes the body.
func DecodeAck(b []byte) (id uint64, index int, err error) {
	if len(b) != 12 {
		return 0, 0, errShort
	}
	return le.Uint64(b), int(le.Uint32(b[8:])), nil
}
