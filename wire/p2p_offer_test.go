package wire

import (
	"encoding/hex"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

func TestP2POfferRoundTrip(t *testing.T) {
	testP2PRoundTrip(t, func(t *rapid.T) P2PMessage { return &P2POffer{Keys: drawP2PKeys(t)} })
}

// The bytes of an offer, as every kvferry node writes them.
func TestP2POfferBytes(t *testing.T) {
	const want = "82" + "a474797065" + "a56f66666572" + "a46b657973" + "92" + "c40161" + "c4020062"
	got := AppendP2P(nil, &P2POffer{Keys: []OffloadKey{"a", "\x00b"}})
	if hex.EncodeToString(got) != want {
		t.Errorf("%x, want %s", got, want)
	}
}

func TestP2POfferRefused(t *testing.T) {
	for name, c := range map[string]struct {
		hex  string
		kind error
	}{
		"no keys":      {"81" + "a474797065" + "a56f66666572", nil},
		"key as str":   {"82" + "a474797065" + "a56f66666572" + "a46b657973" + "91" + "a161", ErrP2PBadKey},
		"keys as bin":  {"82" + "a474797065" + "a56f66666572" + "a46b657973" + "c40161", nil},
		"cut in a key": {"82" + "a474797065" + "a56f66666572" + "a46b657973" + "91" + "c40261", ErrP2PIgnored},
	} {
		b, err := hex.DecodeString(c.hex)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = DecodeP2P(b); err == nil || c.kind != nil && !errors.Is(err, c.kind) {
			t.Errorf("%s: %v, want %v", name, err, c.kind)
		}
	}
}

func FuzzP2POffer(f *testing.F) {
	f.Add(AppendP2P(nil, &P2POffer{Keys: []OffloadKey{"a", ""}}))
	fuzzP2P(f, "offer")
}
