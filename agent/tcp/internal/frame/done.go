package frame

// AppendDone says that a WRITE is whole and its notification delivered; any stream.
//
//	id 8
func AppendDone(dst []byte, id uint64) []byte { return appendID(dst, KindDone, id) }

// DecodeDone decodes the body.
func DecodeDone(b []byte) (uint64, error) { return decodeID(b) }
