package wire

import (
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// P2PFetch asks for blocks: Keys[i] is to be written to the client's block Indexes[i]. Without keys
// it says that the id wants nothing more.
type P2PFetch struct {
	ID      string
	Keys    []OffloadKey
	Indexes []uint64 // as sent: whether the client has such a block is for the session to say
	Round   uint64
	// Grant is the client's permission for these writes, between kvferry nodes only; zero: none.
	Grant [P2PGrantLen]byte
}

// Type is "fetch".
func (*P2PFetch) Type() string { return "fetch" }

const p2pGrantKey = "grant"

func (m *P2PFetch) append(b []byte) []byte {
	n, granted := 4, m.Grant != [P2PGrantLen]byte{}
	if granted {
		n++
	}
	b = p2pHead(b, m.Type(), n)
	b = p2pAppendID(b, m.ID)
	b = p2pAppendKeys(b, m.Keys)
	b = msgp.AppendString(b, "block_indexes")
	b = msgp.AppendArrayHeader(b, uint32(len(m.Indexes)))
	for _, i := range m.Indexes {
		b = msgp.AppendUint64(b, i)
	}
	b = p2pAppendRound(b, m.Round)
	if granted {
		b = msgp.AppendString(b, extensionKey)
		b = msgp.AppendMapHeader(b, 1)
		b = msgp.AppendString(b, p2pGrantKey)
		b = msgp.AppendBytes(b, m.Grant[:])
	}
	return b
}

func decodeP2PFetch(b []byte) (P2PMessage, error) {
	m := &P2PFetch{}
	mandatory := []string{"kv_request_id", "keys", "block_indexes", "round_seq"}
	err := p2pFields("fetch", b, mandatory, func(r *reader, key string) int {
		switch key {
		case "kv_request_id":
			m.ID = r.str(MaxIDLen)
		case "keys":
			m.Keys = r.offloadKeys()
		case "block_indexes":
			n := r.arrayLen(MaxP2PKeys)
			m.Indexes = make([]uint64, 0, n)
			for i := 0; i < n && r.err == nil; i++ {
				r.elem = i
				m.Indexes = append(m.Indexes, r.uint())
			}
		case "round_seq":
			m.Round = r.uint()
		case extensionKey:
			m.readExtension(r)
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	if err == nil && len(m.Keys) != len(m.Indexes) {
		err = p2pUneven("fetch", "block_indexes", len(m.Keys), len(m.Indexes))
	}
	return orNil(m, err)
}

func (m *P2PFetch) readExtension(r *reader) {
	for range r.mapLen() {
		if string(r.extensionKey()) == p2pGrantKey {
			r.binExactly(m.Grant[:])
		} else {
			r.skip()
		}
		if r.err != nil {
			return
		}
	}
}

func p2pUneven(msg, field string, keys, others int) error {
	return &DecodeError{Message: msg, Field: field, Offset: -1, Kind: ErrRange,
		Reason: fmt.Sprintf("has %d entries for %d keys", others, keys)}
}
