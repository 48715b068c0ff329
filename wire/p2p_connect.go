package wire

import (
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// P2PConnect opens a session; each side sends one, at once, when the connection stands.
type P2PConnect struct {
	// PeerID is the sender's own "host:port", where its ROUTER listens.
	PeerID string
	// AgentMetadata is what the NIXL agent of a stock peer takes; empty without such an agent.
	AgentMetadata []byte
	// BaseAddr is the virtual address of block 0; block i lies at BaseAddr + i*BlockLen, bytes.
	BaseAddr  uint64
	NumBlocks int    // >= 1
	BlockLen  uint64 // bytes, >= 1
	// Fingerprint is of the model facts (p2p-tier.md, section 3.2); "" is compared with nothing.
	Fingerprint string
	// HashSeed must be equal on both sides, or equal content has unequal keys.
	HashSeed string
	// Extension is what a kvferry node adds; nil from a stock peer.
	Extension *Extension
}

// Type is "connect".
func (*P2PConnect) Type() string { return "connect" }

func (m *P2PConnect) append(b []byte) []byte {
	n := 7
	if m.Extension != nil {
		n++
	}
	b = p2pHead(b, m.Type(), n)
	b = msgp.AppendString(b, "peer_id")
	b = msgp.AppendString(b, m.PeerID)
	b = msgp.AppendString(b, "agent_metadata")
	b = msgp.AppendBytes(b, m.AgentMetadata)
	b = msgp.AppendString(b, "base_addr")
	b = msgp.AppendUint64(b, m.BaseAddr)
	b = msgp.AppendString(b, "num_blocks")
	b = appendInt(b, m.NumBlocks)
	b = msgp.AppendString(b, "block_len")
	b = msgp.AppendUint64(b, m.BlockLen)
	b = msgp.AppendString(b, "config_fingerprint")
	b = msgp.AppendString(b, m.Fingerprint)
	b = msgp.AppendString(b, "hash_seed")
	b = msgp.AppendString(b, m.HashSeed)
	if m.Extension != nil {
		b = msgp.AppendString(b, extensionKey)
		b = m.Extension.append(b)
	}
	return b
}

func decodeP2PConnect(b []byte) (P2PMessage, error) {
	m := &P2PConnect{}
	mandatory := []string{"peer_id", "agent_metadata", "base_addr", "num_blocks", "block_len", "hash_seed"}
	err := p2pFields("connect", b, mandatory, func(r *reader, key string) int {
		switch key {
		case "peer_id":
			m.PeerID = r.str(MaxHostLen)
		case "agent_metadata":
			m.AgentMetadata = r.bin(MaxP2PMetadata)
		case "base_addr":
			m.BaseAddr = r.uint()
		case "num_blocks":
			m.NumBlocks = r.intIn(1, MaxP2PBlocks)
		case "block_len":
			m.BlockLen = uint64(r.intIn(1, MaxP2PBlockLen))
		case "hash_seed":
			m.HashSeed = r.str(MaxP2PSeed)
		case "config_fingerprint":
			m.Fingerprint = r.optStr(MaxP2PSeed)
		case extensionKey:
			m.Extension = r.extension()
		default:
			return p2pUnknown
		}
		return slices.Index(mandatory, key)
	})
	return orNil(m, err)
}

// P2PConnectAck is the permission to send: its sender has admitted the peer.
type P2PConnectAck struct{ PeerID string } // the sender's own "host:port"

// Type is "connect_ack".
func (P2PConnectAck) Type() string { return "connect_ack" }

func (m P2PConnectAck) append(b []byte) []byte {
	b = p2pHead(b, m.Type(), 1)
	b = msgp.AppendString(b, "peer_id")
	return msgp.AppendString(b, m.PeerID)
}

func decodeP2PConnectAck(b []byte) (P2PMessage, error) {
	var m P2PConnectAck
	err := p2pFields("connect_ack", b, []string{"peer_id"}, func(r *reader, key string) int {
		if key != "peer_id" {
			return p2pUnknown
		}
		m.PeerID = r.str(MaxHostLen)
		return 0
	})
	return orNil(m, err)
}

// P2PDisconnect ends the session, as far as its sender is concerned.
type P2PDisconnect struct{}

// Type is "disconnect".
func (P2PDisconnect) Type() string { return "disconnect" }

func (m P2PDisconnect) append(b []byte) []byte { return p2pHead(b, m.Type(), 0) }
