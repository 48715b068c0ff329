package wire

import (
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// CapP2PLater is announced, in the extension of its connect, by a node that asks anew for what a peer has and
// could not keep for it yet.
const CapP2PLater = "p2p_later"

// P2PLookupResp answers a lookup: Hits[i] is for Keys[i]. It does not name the round.
type P2PLookupResp struct {
	ID   string
	Keys []OffloadKey
	Hits []bool
	// Later[i] says of a key that is no hit that it would be, if the peer held less at the moment; nil: of
	// none. It is sent only to nodes that announce CapP2PLater; a stock peer would skip it.
	Later []bool
}

const p2pLaterKey = "later"

// Type is "lookup_resp".
func (*P2PLookupResp) Type() string { return "lookup_resp" }

func (m *P2PLookupResp) append(b []byte) []byte {
	n := 3
	if m.Later != nil {
		n++
	}
	b = p2pHead(b, m.Type(), n)
	b = p2pAppendID(b, m.ID)
	b = p2pAppendKeys(b, m.Keys)
	b = msgp.AppendString(b, "hits")
	b = appendBools(b, m.Hits)
	if m.Later == nil {
		return b
	}
	b = msgp.AppendString(b, extensionKey)
	b = msgp.AppendMapHeader(b, 1)
	b = msgp.AppendString(b, p2pLaterKey)
	return appendBools(b, m.Later)
}

func appendBools(b []byte, all []bool) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(all)))
	for _, x := range all {
		b = msgp.AppendBool(b, x)
	}
	return b
}

func (r *reader) bools() []bool {
	n := r.arrayLen(MaxP2PKeys)
	all := make([]bool, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		all = append(all, r.boolean())
	}
	return all
}

func (m *P2PLookupResp) readExtension(r *reader) {
	for range r.mapLen() {
		if string(r.extensionKey()) == p2pLaterKey {
			m.Later = r.bools()
		} else {
			r.skip()
		}
		if r.err != nil {
			return
		}
	}
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
			m.Hits = r.bools()
		case extensionKey:
			m.readExtension(r)
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	if err == nil && len(m.Keys) != len(m.Hits) {
		err = p2pUneven("lookup_resp", "hits", len(m.Keys), len(m.Hits))
	}
	if err == nil && m.Later != nil && len(m.Keys) != len(m.Later) {
		err = p2pUneven("lookup_resp", "later", len(m.Keys), len(m.Later))
	}
	return orNil(m, err)
}
