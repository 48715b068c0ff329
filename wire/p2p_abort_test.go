package wire

import (
	"testing"

	"pgregory.net/rapid"
)

func TestP2PAbortFetchVectors(t *testing.T) { testP2PVectors(t, "abort_fetch") }
func TestP2PAbortAckVectors(t *testing.T)   { testP2PVectors(t, "abort_ack") }

func TestP2PAbortRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage {
		id, round := p2pIDs.Draw(t, "id"), rapid.Uint64().Draw(t, "round")
		if rapid.Bool().Draw(t, "ack") {
			return P2PAbortAck{ID: id, Round: round}
		}
		return P2PAbortFetch{ID: id, Round: round}
	})
}

func FuzzP2PAbortFetch(f *testing.F) { fuzzP2P(f, "abort_fetch") }
func FuzzP2PAbortAck(f *testing.F)   { fuzzP2P(f, "abort_ack") }
