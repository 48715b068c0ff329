package wire

import "github.com/tinylib/msgp/msgp"

// HandshakePayload is the first frame of a side channel's reply (nixl-connector.md, section 2.3).
type HandshakePayload struct {
	CompatibilityHash string // 64 lower-case hex digits, see CompatFactors.Hash
	AgentMetadata     []byte // an encoded AgentMetadata; decode it only after the hash was compared
}

const (
	keyHash          = "compatibility_hash"
	keyMetadataBytes = "agent_metadata_bytes"
)

// AppendHandshakePayload appends the msgpack form of p.
func AppendHandshakePayload(dst []byte, p HandshakePayload) []byte {
	dst = msgp.AppendMapHeader(dst, 2)
	dst = msgp.AppendString(dst, keyHash)
	dst = msgp.AppendString(dst, p.CompatibilityHash)
	dst = msgp.AppendString(dst, keyMetadataBytes)
	return msgp.AppendBytes(dst, p.AgentMetadata)
}

// DecodeHandshakePayload decodes the first frame of a reply. Stricter than stock only in the limits
// of this package.
func DecodeHandshakePayload(b []byte) (HandshakePayload, error) {
	var p HandshakePayload
	var seen keySet
	r := newReader("handshake payload", b, MaxHandshakePayload)
	for range r.mapLen() {
		switch key := r.key(); string(key) {
		case keyHash:
			p.CompatibilityHash = r.str(MaxHashLen)
			seen.add(0)
		case keyMetadataBytes:
			p.AgentMetadata = r.bin(MaxHandshakePayload)
			seen.add(1)
		default:
			r.skip()
		}
		if r.err != nil {
			break
		}
	}
	r.require(seen, keyHash, keyMetadataBytes)
	if err := r.end(); err != nil {
		return HandshakePayload{}, err
	}
	return p, nil
}
