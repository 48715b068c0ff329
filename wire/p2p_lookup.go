package wire

import "slices"

// P2PLookup asks which keys the server holds. What it holds it keeps for a fetch of the same round.
type P2PLookup struct {
	ID    string // kv_request_id
	Keys  []OffloadKey
	Round uint64
}

// Type is "lookup".
func (*P2PLookup) Type() string { return "lookup" }

func (m *P2PLookup) append(b []byte) []byte {
	b = p2pHead(b, m.Type(), 3)
	b = p2pAppendID(b, m.ID)
	b = p2pAppendKeys(b, m.Keys)
	return p2pAppendRound(b, m.Round)
}

func decodeP2PLookup(b []byte) (P2PMessage, error) {
	m := &P2PLookup{}
	mandatory := []string{"kv_request_id", "keys", "round_seq"}
	err := p2pFields("lookup", b, mandatory, func(r *reader, key string) int {
		switch key {
		case "kv_request_id":
			m.ID = r.str(MaxIDLen)
		case "keys":
			m.Keys = r.offloadKeys()
		case "round_seq":
			m.Round = r.uint()
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	return orNil(m, err)
}
