package wire

import (
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// P2PLookupResp answers a lookup: Hits[i] is for Keys[i]. It does not name the round.
type P2PLookupResp struct {
	ID   string
	Keys []OffloadKey
	Hits []bool
}

// Type is "lookup_resp".
func (*P2PLookupResp) Type() string { return "lookup_resp" }

func (m *P2PLookupResp) append(b []byte) []byte {
	b = p2pHead(b, m.Type(), 3)
	b = p2pAppendID(b, m.ID)
	b = p2pAppendKeys(b, m.Keys)
	b = msgp.AppendString(b, "hits")
	b = msgp.AppendArrayHeader(b, uint32(len(m.Hits)))
	for _, h := range m.Hits {
		b = msgp.AppendBool(b, h)
	}
	return b
}

func decodeP2PLookupResp(b []byte) (P2PMessage, error) {
	m := &P2PLookupResp{}
	mandatory := []string{"kv_request_id", "keys", "hits"}
	err := p2pFields("lookup_resp", b, mandatory, func(r *reader, key string) int {
		switch key {
		case "kv_request_id":
			m.ID = r.str(MaxIDLen)
		case "keys":
			m.Keys = r.offloadKeys()
		case "hits":
			n := r.arrayLen(MaxP2PKeys)
			m.Hits = make([]bool, 0, n)
			for i := 0; i < n && r.err == nil; i++ {
				r.elem = i
				m.Hits = append(m.Hits, r.boolean())
			}
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	if err == nil && len(m.Keys) != len(m.Hits) {
		err = p2pUneven("lookup_resp", "hits", len(m.Keys), len(m.Hits))
	}
	return orNil(m, err)
}
