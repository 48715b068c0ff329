package frame

const refusedFixed = 8 + 4

// Refused says that a WRITE has failed and nothing of it is written any more, or that a Fetch is
// not answered.
//
//	id 8 │ index 4 │ text …
type Refused struct {
	ID    uint64
	Index int // of the Fetch
	Text  string
}

// Append encodes.
func (f Refused) Append(dst []byte) []byte {
	at := len(dst)
	dst = le.AppendUint32(le.AppendUint64(begin(dst, KindRefused), f.ID), uint32(f.Index))
	return finish(append(dst, clip(f.Text)...), at)
}

// DecodeRefused decodes the body.
func DecodeRefused(b []byte) (Refused, error) {
	if len(b) < refusedFixed {
		return Refused{}, errShort
	}
	text, err := decodeText(b[refusedFixed:])
	return Refused{ID: le.Uint64(b), Index: int(le.Uint32(b[8:])), Text: text}, err
}
