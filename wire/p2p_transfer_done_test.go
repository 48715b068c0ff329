package wire

import (
	"testing"

	"pgregory.net/rapid"
)

func TestP2PTransferDoneVectors(t *testing.T) { testP2PVectors(t, "transfer_done") }

func TestP2PTransferDoneRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage {
		return P2PTransferDone{ID: p2pIDs.Draw(t, "id"), Success: rapid.Bool().Draw(t, "ok"), Round: rapid.Uint64().Draw(t, "round")}
	})
}

func FuzzP2PTransferDone(f *testing.F) { fuzzP2P(f, "transfer_done") }
