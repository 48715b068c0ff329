package frame

// AppendCancel asks that nothing of a WRITE be written any more; control stream, after its Begin.
//
//	id 8
func AppendCancel(dst []byte, id uint64) []byte { return appendID(dst, KindCancel, id) }

// DecodeCancel decodes the body.
func DecodeCancel(b []byte) (uint64, error) { return decodeID(b) }
