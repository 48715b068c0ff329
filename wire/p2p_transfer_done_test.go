package wire

import (
	"errors"
	"testing"

	"pgregory.net/rapid"
)

func TestP2PTransferDoneVectors(t *testing.T) { testP2PVectors(t, "transfer_done") }

func TestP2PTransferDoneRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage {
		m := P2PTransferDone{ID: p2pIDs.Draw(t, "id"), Success: rapid.Bool().Draw(t, "ok"), Round: rapid.Uint64().Draw(t, "round")}
		if rapid.Bool().Draw(t, "with sums") {
			m.Sums = rapid.SliceOf(rapid.Uint32()).Draw(t, "sums")
		}
		return m
	})
}

// Sums are four bytes each.
func TestP2PTransferDoneSums(t *testing.T) {
	b := AppendP2P(nil, P2PTransferDone{ID: "a", Success: true, Sums: []uint32{0x01020304, 5}})
	if m, err := DecodeP2P(b); err != nil || len(m.(P2PTransferDone).Sums) != 2 || m.(P2PTransferDone).Sums[0] != 0x01020304 {
		t.Fatal(m, err)
	}
	odd := append(b[:len(b)-10:len(b)-10], 0xc4, 7, 1, 2, 3, 4, 0, 0, 0)
	if m, err := DecodeP2P(odd); !errors.Is(err, ErrRange) {
		t.Errorf("%x: %v, %v", odd, m, err)
	}
}

func FuzzP2PTransferDone(f *testing.F) {
	f.Add(AppendP2P(nil, P2PTransferDone{ID: "a", Success: true, Round: 1, Sums: []uint32{1, 2}}))
	fuzzP2P(f, "transfer_done")
}
