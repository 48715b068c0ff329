package wire

import (
	"encoding/binary"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// CapP2PSums is announced, in the extension of its connect, by a node that tells the checksums of what it
// has written, and compares those that it is told.
const CapP2PSums = "p2p_sums"

// P2PTransferDone ends a fetch: every block of it was written, or it failed as a whole.
type P2PTransferDone struct {
	ID      string
	Success bool
	Round   uint64
	// Sums are the CRC32C of the blocks written, in the order of the fetch's keys; nil: not told. They
	// are sent only to nodes that announce CapP2PSums; a stock peer would skip them.
	Sums []uint32
}

const p2pSumsKey = "sums"

// Type is "transfer_done".
func (P2PTransferDone) Type() string { return "transfer_done" }

func (m P2PTransferDone) append(b []byte) []byte {
	n := 3
	if m.Sums != nil {
		n++
	}
	b = p2pHead(b, m.Type(), n)
	b = p2pAppendID(b, m.ID)
	b = msgp.AppendString(b, "success")
	b = msgp.AppendBool(b, m.Success)
	b = p2pAppendRound(b, m.Round)
	if m.Sums == nil {
		return b
	}
	b = msgp.AppendString(b, extensionKey)
	b = msgp.AppendMapHeader(b, 1)
	b = msgp.AppendString(b, p2pSumsKey)
	b = msgp.AppendBytesHeader(b, uint32(4*len(m.Sums)))
	for _, sum := range m.Sums {
		b = binary.BigEndian.AppendUint32(b, sum)
	}
	return b
}

func decodeP2PTransferDone(b []byte) (P2PMessage, error) {
	var m P2PTransferDone
	mandatory := []string{"kv_request_id", "success", "round_seq"}
	err := p2pFields("transfer_done", b, mandatory, func(r *reader, key string) int {
		switch key {
		case "kv_request_id":
			m.ID = r.str(MaxIDLen)
		case "success":
			m.Success = r.boolean()
		case "round_seq":
			m.Round = r.uint()
		case extensionKey:
			m.readExtension(r)
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	return orNil(m, err)
}

func (m *P2PTransferDone) readExtension(r *reader) {
	for range r.mapLen() {
		if string(r.extensionKey()) == p2pSumsKey {
			b := r.bin(4 * MaxP2PKeys)
			if len(b)%4 != 0 {
				r.fail(ErrRange, "has %d bytes, which are no 32-bit sums", len(b))
			}
			m.Sums = make([]uint32, len(b)/4)
			for i := range m.Sums {
				m.Sums[i] = binary.BigEndian.Uint32(b[4*i:])
			}
		} else {
			r.skip()
		}
		if r.err != nil {
			return
		}
	}
}
