package shm

import (
	"encoding/binary"
	"errors"

	"github.com/kvferry/kvferry/agent"
)

// kind is the first byte of a frame's header; the other four are the body's length.
type kind uint8

const (
	kindHello    kind = 1 + iota // poster: magic, name, length of its control page; with the page's fd
	kindWelcome                  // giver: the same
	kindReject                   // giver: why not
	kindSegment                  // either: memory that the other may map; with its fd
	kindForget                   // either: that memory was freed
	kindNotify                   // poster: a notification
	kindWrite                    // poster: a WRITE begins; PIECES follow
	kindRead                     // poster: a READ begins; PIECES follow
	kindPieces                   // poster: some pieces of the transfer that has begun
	kindCancel                   // poster: a transfer is not wanted any more
	kindReadEnd                  // poster: staged memory of a READ is not needed any more
	kindDone                     // giver: a WRITE is whole
	kindRefused                  // giver: a transfer was refused or has stopped
	kindProgress                 // giver: bytes of a WRITE move
	kindReadable                 // giver: a READ may be copied
	kindEnd
)

const (
	headerBytes = 5
	magic       = "kvferry shm 1\n"
	pieceBytes  = 24
)

var errMalformed = errors.New("malformed frame")

// maxBody bounds a frame's body; 0 means that the kind is unknown.
func maxBody(k kind, notification int) int {
	switch {
	case k == 0 || k >= kindEnd:
		return 0
	case k == kindNotify, k == kindWrite:
		return maxFixed + notification
	case k == kindPieces:
		return 1 + framePieces*pieceBytes
	}
	return maxFixed
}

// frame appends a header for a body that the caller appends next.
func frame(b []byte, k kind, body int) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(body))
	return append(b, byte(k))
}

// cursor reads a body. It never reads beyond the end; end reports whether all was there and no
// more.
type cursor struct {
	b     []byte
	short bool
}

func (c *cursor) take(n int) []byte {
	if n > len(c.b) {
		c.short = true
		c.b = nil
		return make([]byte, min(n, 255))
	}
	out := c.b[:n]
	c.b = c.b[n:]
	return out
}

func (c *cursor) u8() uint8   { return c.take(1)[0] }
func (c *cursor) u32() uint32 { return binary.LittleEndian.Uint32(c.take(4)) }
func (c *cursor) u64() uint64 { return binary.LittleEndian.Uint64(c.take(8)) }
func (c *cursor) rest() []byte {
	out := c.b
	c.b = nil
	return out
}
func (c *cursor) end() bool { return !c.short && len(c.b) == 0 }

// hello is the body of HELLO and WELCOME.
type hello struct {
	name    agent.Name
	control uint64 // bytes of the control page, whose fd comes with the frame
}

func (h hello) append(b []byte, k kind) []byte {
	b = frame(b, k, len(magic)+8+len(h.name))
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint64(b, h.control)
	return append(b, h.name...)
}

func decodeHello(body []byte) (hello, error) {
	c := cursor{b: body}
	if string(c.take(len(magic))) != magic {
		return hello{}, errors.New("not an shm agent of this version")
	}
	h := hello{control: c.u64(), name: agent.Name(c.rest())}
	if c.short || !validName(h.name) || h.control == 0 || h.control > maxControl {
		return hello{}, errMalformed
	}
	return h, nil
}

// segmentFrame is the body of SEGMENT.
type segmentFrame struct {
	id           uint32
	addr, length uint64 // in the address space of the sender
}

func (s segmentFrame) append(b []byte) []byte {
	b = frame(b, kindSegment, 20)
	b = binary.LittleEndian.AppendUint32(b, s.id)
	b = binary.LittleEndian.AppendUint64(b, s.addr)
	return binary.LittleEndian.AppendUint64(b, s.length)
}

func decodeSegment(body []byte) (segmentFrame, error) {
	c := cursor{b: body}
	s := segmentFrame{id: c.u32(), addr: c.u64(), length: c.u64()}
	if !c.end() || s.addr == 0 || s.length == 0 || s.addr+s.length < s.addr {
		return segmentFrame{}, errMalformed
	}
	return s, nil
}

func appendForget(b []byte, id uint32) []byte {
	return binary.LittleEndian.AppendUint32(frame(b, kindForget, 4), id)
}

func decodeForget(body []byte) (uint32, error) {
	c := cursor{b: body}
	id := c.u32()
	if !c.end() {
		return 0, errMalformed
	}
	return id, nil
}

// writeFrame is the body of WRITE.
type writeFrame struct {
	transfer agent.TransferID
	slot     uint32 // the word in the poster's control page
	word     uint64 // its value as long as the transfer is wanted
	silence  uint64 // nanoseconds
	bytes    uint64
	grant    agent.GrantID
	notif    []byte // empty: none
}

func (w writeFrame) append(b []byte) []byte {
	b = frame(b, kindWrite, 52+len(w.notif))
	b = binary.LittleEndian.AppendUint64(b, uint64(w.transfer))
	b = binary.LittleEndian.AppendUint32(b, w.slot)
	b = binary.LittleEndian.AppendUint64(b, w.word)
	b = binary.LittleEndian.AppendUint64(b, w.silence)
	b = binary.LittleEndian.AppendUint64(b, w.bytes)
	b = append(b, w.grant[:]...)
	return append(b, w.notif...)
}

func decodeWrite(body []byte) (writeFrame, error) {
	c := cursor{b: body}
	w := writeFrame{transfer: agent.TransferID(c.u64()), slot: c.u32(), word: c.u64(), silence: c.u64(), bytes: c.u64()}
	copy(w.grant[:], c.take(len(w.grant)))
	w.notif = c.rest()
	if c.short || w.transfer == 0 || w.bytes == 0 || w.silence == 0 {
		return writeFrame{}, errMalformed
	}
	return w, nil
}

// readFrame is the body of READ.
type readFrame struct {
	transfer agent.TransferID
	bytes    uint64
	grant    agent.GrantID
}

func (r readFrame) append(b []byte) []byte {
	b = frame(b, kindRead, 32)
	b = binary.LittleEndian.AppendUint64(b, uint64(r.transfer))
	b = binary.LittleEndian.AppendUint64(b, r.bytes)
	return append(b, r.grant[:]...)
}

func decodeRead(body []byte) (readFrame, error) {
	c := cursor{b: body}
	r := readFrame{transfer: agent.TransferID(c.u64()), bytes: c.u64()}
	copy(r.grant[:], c.take(len(r.grant)))
	if !c.end() || r.transfer == 0 || r.bytes == 0 {
		return readFrame{}, errMalformed
	}
	return r, nil
}

// wirePiece is n bytes of the source at src that belong at dst; dst is 0 in a READ, whose poster
// keeps it.
type wirePiece struct{ src, dst, n uint64 }

func appendPiece(b []byte, p wirePiece) []byte {
	b = binary.LittleEndian.AppendUint64(b, p.src)
	b = binary.LittleEndian.AppendUint64(b, p.dst)
	return binary.LittleEndian.AppendUint64(b, p.n)
}

// decodePieces gives the pieces one by one, and whether they are the last of their transfer.
func decodePieces(body []byte) (last bool, pieces func(yield func(wirePiece) bool), count int, err error) {
	if len(body) <= 1 || body[0] > 1 || (len(body)-1)%pieceBytes != 0 {
		return false, nil, 0, errMalformed
	}
	list := body[1:]
	return body[0] == 1, func(yield func(wirePiece) bool) {
		for c := (cursor{b: list}); len(c.b) > 0; {
			if !yield(wirePiece{src: c.u64(), dst: c.u64(), n: c.u64()}) {
				return
			}
		}
	}, len(list) / pieceBytes, nil
}

// appendTransfer is a frame whose body is but a transfer's id: CANCEL, READEND, DONE.
func appendTransfer(b []byte, k kind, id agent.TransferID) []byte {
	return binary.LittleEndian.AppendUint64(frame(b, k, 8), uint64(id))
}

func decodeTransfer(body []byte) (agent.TransferID, error) {
	c := cursor{b: body}
	id := agent.TransferID(c.u64())
	if !c.end() || id == 0 {
		return 0, errMalformed
	}
	return id, nil
}

func appendRefused(b []byte, id agent.TransferID, text string) []byte {
	text = text[:min(len(text), maxText)]
	b = frame(b, kindRefused, 8+len(text))
	b = binary.LittleEndian.AppendUint64(b, uint64(id))
	return append(b, text...)
}

func decodeRefused(body []byte) (agent.TransferID, string, error) {
	c := cursor{b: body}
	id, text := agent.TransferID(c.u64()), c.rest()
	if c.short || id == 0 || len(text) > maxText {
		return 0, "", errMalformed
	}
	return id, string(text), nil
}

// readableFrame is the body of READABLE.
type readableFrame struct {
	transfer agent.TransferID
	slot     uint32 // the word in the giver's control page
	word     uint64 // its value as long as the grant lives
	staged   uint64 // not 0: the pieces lie one behind the other from this address on
}

func (r readableFrame) append(b []byte) []byte {
	b = frame(b, kindReadable, 28)
	b = binary.LittleEndian.AppendUint64(b, uint64(r.transfer))
	b = binary.LittleEndian.AppendUint32(b, r.slot)
	b = binary.LittleEndian.AppendUint64(b, r.word)
	return binary.LittleEndian.AppendUint64(b, r.staged)
}

func decodeReadable(body []byte) (readableFrame, error) {
	c := cursor{b: body}
	r := readableFrame{transfer: agent.TransferID(c.u64()), slot: c.u32(), word: c.u64(), staged: c.u64()}
	if !c.end() || r.transfer == 0 {
		return readableFrame{}, errMalformed
	}
	return r, nil
}
