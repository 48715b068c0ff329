package wire

import "slices"

// CapP2PStore is announced, in the extension of its connect, by a node that takes offers.
const CapP2PStore = "p2p_store"

// P2POffer says that its sender holds blocks which the receiver may want to keep. It is a hint: the
// receiver looks them up and fetches them as it does any others, or not. It is sent only to nodes
// that announce CapP2PStore; stock knows no such message.
type P2POffer struct {
	Keys []OffloadKey
}

// Type is "offer".
func (*P2POffer) Type() string { return "offer" }

func (m *P2POffer) append(b []byte) []byte {
	return p2pAppendKeys(p2pHead(b, m.Type(), 1), m.Keys)
}

func decodeP2POffer(b []byte) (P2PMessage, error) {
	m := &P2POffer{}
	mandatory := []string{"keys"}
	err := p2pFields("offer", b, mandatory, func(r *reader, key string) int {
		if key != "keys" {
			return p2pUnknown
		}
		m.Keys = r.offloadKeys()
		return slices.Index(mandatory, key)
	})
	return orNil(m, err)
}
