package wire

import (
	"testing"

	"pgregory.net/rapid"
)

func TestP2PLookupVectors(t *testing.T) { testP2PVectors(t, "lookup") }

func TestP2PLookupRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage {
		return &P2PLookup{ID: p2pIDs.Draw(t, "id"), Keys: drawP2PKeys(t), Round: rapid.Uint64().Draw(t, "round")}
	})
}

func FuzzP2PLookup(f *testing.F) { fuzzP2P(f, "lookup") }
