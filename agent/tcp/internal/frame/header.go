package frame

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Kind is the type of a frame.
type Kind uint8

const (
	KindHello Kind = iota + 1
	KindWelcome
	KindBye
	KindNotify
	KindBegin
	KindCancel
	KindCancelled
	KindChunk
	KindAck
	KindDone
	KindRefused
	KindFetch
	KindData
)

// Version is the only one of this format.
const Version = 1

// Sizes of what does not vary.
const (
	HeaderSize  = 8
	TrailerSize = 8
)

var le = binary.LittleEndian

var errShort = errors.New("frame is shorter than its fields")

// Header is what each frame begins with.
type Header struct {
	Kind   Kind
	Length int // of the body
}

// maxBody bounds the body of each kind. A notification's bound is the receiver's setting and at
// most this.
var maxBody = map[Kind]int{
	KindHello:     helloFixed + MaxName,
	KindWelcome:   welcomeFixed + MaxName,
	KindBye:       MaxText,
	KindNotify:    MaxNotif,
	KindBegin:     beginFixed + MaxNotif,
	KindCancel:    8,
	KindCancelled: 8,
	KindChunk:     chunkFixed + MaxRanges*rangeSize,
	KindAck:       12,
	KindDone:      8,
	KindRefused:   refusedFixed + MaxText,
	KindFetch:     fetchFixed + MaxRanges*rangeSize,
	KindData:      dataSize,
}

// MaxBody is the longest body of a kind when notifications have at most notif bytes.
func MaxBody(k Kind, notif int) int {
	if k == KindNotify || k == KindBegin {
		return maxBody[k] - MaxNotif + notif
	}
	return maxBody[k]
}

// begin appends a header with an unknown length, finish fills it in.
func begin(dst []byte, k Kind) []byte { return append(dst, byte(k), 0, 0, 0, 0, 0, 0, 0) }

func finish(dst []byte, at int) []byte {
	le.PutUint32(dst[at+4:], uint32(len(dst)-at-HeaderSize))
	return dst
}

// DecodeHeader reads a header of exactly HeaderSize bytes.
func DecodeHeader(b []byte) (Header, error) {
	if len(b) != HeaderSize {
		return Header{}, errShort
	}
	h := Header{Kind: Kind(b[0])}
	limit, known := maxBody[h.Kind]
	if !known {
		return Header{}, fmt.Errorf("unknown kind of frame %d", b[0])
	}
	if b[1]|b[2]|b[3] != 0 {
		return Header{}, fmt.Errorf("frame of kind %d has reserved bytes set", b[0])
	}
	n := le.Uint32(b[4:])
	if int64(n) > int64(limit) {
		return Header{}, fmt.Errorf("frame of kind %d has a body of %d bytes; at most %d are allowed", b[0], n, limit)
	}
	h.Length = int(n)
	return h, nil
}

// idBody is the body of frames that carry nothing but a transfer's id.
func appendID(dst []byte, k Kind, id uint64) []byte {
	at := len(dst)
	return finish(le.AppendUint64(begin(dst, k), id), at)
}

func decodeID(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, errShort
	}
	return le.Uint64(b), nil
}
