package frame

// AppendCancelled answers a Cancel: nothing of the WRITE is written any more, for whatever reason.
//
//	id 8
func AppendCancelled(dst []byte, id uint64) []byte { return appendID(dst, KindCancelled, id) }

// DecodeCancelled decodes the body.
func DecodeCancelled(b []byte) (uint64, error) { return decodeID(b) }
