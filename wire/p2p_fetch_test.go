package wire

import (
	"testing"

	"pgregory.net/rapid"
)

func TestP2PFetchVectors(t *testing.T) { testP2PVectors(t, "fetch") }

func TestP2PFetchRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage {
		m := &P2PFetch{ID: p2pIDs.Draw(t, "id"), Keys: drawP2PKeys(t), Indexes: []uint64{}, Round: rapid.Uint64().Draw(t, "round")}
		for range m.Keys {
			m.Indexes = append(m.Indexes, rapid.Uint64().Draw(t, "index"))
		}
		if rapid.Bool().Draw(t, "granted") {
			m.Grant[rapid.IntRange(0, P2PGrantLen-1).Draw(t, "at")] = 7
		}
		return m
	})
}

func FuzzP2PFetch(f *testing.F) { fuzzP2P(f, "fetch") }
