package wire

import (
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// P2PTransferDone ends a fetch: every block of it was written, or it failed as a whole.
type P2PTransferDone struct {
	ID      string
	Success bool
	Round   uint64
}

// Type is "transfer_done".
func (P2PTransferDone) Type() string { return "transfer_done" }

func (m P2PTransferDone) append(b []byte) []byte {
	b = p2pHead(b, m.Type(), 3)
	b = p2pAppendID(b, m.ID)
	b = msgp.AppendString(b, "success")
	b = msgp.AppendBool(b, m.Success)
	return p2pAppendRound(b, m.Round)
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
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	return orNil(m, err)
}
