package wire

import (
	"testing"

	"pgregory.net/rapid"
)

func TestP2PLookupRespVectors(t *testing.T) { testP2PVectors(t, "lookup_resp") }

func TestP2PLookupRespRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage {
		m := &P2PLookupResp{ID: p2pIDs.Draw(t, "id"), Keys: drawP2PKeys(t), Hits: []bool{}}
		for range m.Keys {
			m.Hits = append(m.Hits, rapid.Bool().Draw(t, "hit"))
		}
		if rapid.Bool().Draw(t, "bounded") {
			m.Later = []bool{}
			for range m.Keys {
				m.Later = append(m.Later, rapid.Bool().Draw(t, "later"))
			}
		}
		return m
	})
}

func FuzzP2PLookupResp(f *testing.F) { fuzzP2P(f, "lookup_resp") }
