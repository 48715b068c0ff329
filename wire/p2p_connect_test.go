package wire

import (
	"testing"

	"pgregory.net/rapid"
)

func TestP2PConnectVectors(t *testing.T)    { testP2PVectors(t, "connect") }
func TestP2PConnectAckVectors(t *testing.T) { testP2PVectors(t, "connect_ack") }
func TestP2PDisconnectVectors(t *testing.T) { testP2PVectors(t, "disconnect") }

func TestP2PConnectRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage {
		m := &P2PConnect{
			PeerID:        rapid.StringN(0, 40, MaxHostLen).Draw(t, "peer"),
			AgentMetadata: append([]byte{}, rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "metadata")...),
			BaseAddr:      rapid.Uint64().Draw(t, "base"),
			NumBlocks:     rapid.IntRange(1, MaxP2PBlocks).Draw(t, "blocks"),
			BlockLen:      rapid.Uint64Range(1, MaxP2PBlockLen).Draw(t, "len"),
			Fingerprint:   rapid.StringN(0, 20, 100).Draw(t, "fingerprint"),
			HashSeed:      rapid.StringN(0, 20, 100).Draw(t, "seed"),
		}
		if rapid.Bool().Draw(t, "extended") {
			m.Extension = &Extension{Version: 1, Instance: "i", HostID: "h", Agents: []AgentOffer{{Transport: "tcp", Blob: []byte{1}}},
				Session: rapid.Uint64().Draw(t, "session"), Answers: rapid.Uint64().Draw(t, "answers")}
		}
		return m
	})
}

func FuzzP2PConnect(f *testing.F)    { fuzzP2P(f, "connect") }
func FuzzP2PConnectAck(f *testing.F) { fuzzP2P(f, "connect_ack") }
