package wire

import "slices"

// P2PAbortFetch takes a fetch back. The server answers with an ack once no byte of it moves.
type P2PAbortFetch struct {
	ID    string
	Round uint64
}

// P2PAbortAck says that no byte of the fetch moves any more.
type P2PAbortAck struct {
	ID    string
	Round uint64
}

// Type is "abort_fetch".
func (P2PAbortFetch) Type() string { return "abort_fetch" }

// Type is "abort_ack".
func (P2PAbortAck) Type() string { return "abort_ack" }

func (m P2PAbortFetch) append(b []byte) []byte {
	return p2pAppendRound(p2pAppendID(p2pHead(b, m.Type(), 2), m.ID), m.Round)
}

func (m P2PAbortAck) append(b []byte) []byte {
	return p2pAppendRound(p2pAppendID(p2pHead(b, m.Type(), 2), m.ID), m.Round)
}

func decodeP2PRound(msg string, b []byte) (id string, round uint64, err error) {
	mandatory := []string{"kv_request_id", "round_seq"}
	err = p2pFields(msg, b, mandatory, func(r *reader, key string) int {
		switch key {
		case "kv_request_id":
			id = r.str(MaxIDLen)
		case "round_seq":
			round = r.uint()
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	return id, round, err
}
