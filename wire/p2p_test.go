package wire

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// p2pVector is a synthetic message with the stock validator's verdict. Long ones have a length and a
// sum instead of Hex.
type p2pVector struct {
	Name      string
	Values    json.RawMessage
	Validator string
	Hex       *hexBytes
	Len       int
	SHA256    string   `json:"sha256"`
	HexHead   hexBytes `json:"hex_head"`
}

func p2pVectors(t testing.TB, typ string) (valid, invalid []p2pVector) {
	t.Helper()
	var f struct{ Valid, Invalid []p2pVector }
	loadVectors(t, "p2p-codec", &f)
	pick := func(all []p2pVector) (out []p2pVector) {
		for _, v := range all {
			var head struct{ Type string }
			if err := json.Unmarshal(v.Values, &head); err != nil {
				t.Fatal(err)
			}
			if head.Type == typ {
				out = append(out, v)
			}
		}
		return out
	}
	return pick(f.Valid), pick(f.Invalid)
}

// p2pStricter lists what stock takes and this package refuses, with the reason.
var p2pStricter = map[string]string{
	"connect-bool-as-int":    "a bool is no int",
	"fetch-bool-index":       "a bool is no int",
	"lookup-key-as-int-list": "stock turns the ints into bytes",
}

// p2pReencoded lists what is taken but written otherwise.
var p2pReencoded = map[string]string{
	"connect-fingerprint-absent": "written as the empty fingerprint",
	"connect-fingerprint-null":   "written as the empty fingerprint",
	"connect-extra-field":        "unknown keys are skipped",
	"lookup-resp-with-round":     "unknown keys are skipped",
}

// testP2PVectors runs the vectors of one type: decode, re-encode, compare with the recorded bytes.
func testP2PVectors(t *testing.T, typ string) {
	valid, invalid := p2pVectors(t, typ)
	if len(valid) == 0 {
		t.Fatalf("no vectors for %s", typ)
	}
	for _, v := range valid {
		b := v.bytes(t)
		m, err := DecodeP2P(b)
		if why, ok := p2pStricter[v.Name]; ok {
			if err == nil {
				t.Errorf("%s: accepted, but listed as refused (%s)", v.Name, why)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		if m.Type() != typ {
			t.Errorf("%s: decoded as %s", v.Name, m.Type())
		}
		again := AppendP2P(nil, m)
		if why, ok := p2pReencoded[v.Name]; ok == bytes.Equal(again, b) {
			t.Errorf("%s: re-encoded as\n%x\nfrom\n%x (%s)", v.Name, again, b, why)
		}
	}
	for _, v := range invalid {
		if m, err := DecodeP2P(v.bytes(t)); err == nil {
			t.Errorf("%s: accepted as %+v; stock says %s", v.Name, m, v.Validator)
		} else if errors.Is(err, ErrP2PIgnored) || errors.Is(err, ErrP2PBadKey) {
			t.Errorf("%s: %v would not end the session; stock says %s", v.Name, err, v.Validator)
		}
	}
}

// bytes are the message; long ones are made by their recipe and checked against their sum.
func (v p2pVector) bytes(t testing.TB) []byte {
	t.Helper()
	if v.Hex != nil {
		return *v.Hex
	}
	var b []byte
	switch v.Name {
	case "connect-metadata-70000":
		b = AppendP2P(nil, &P2PConnect{PeerID: "10.0.0.1:5710", AgentMetadata: bytes.Repeat([]byte{0xa5}, 70000),
			BaseAddr: 139637976727552, NumBlocks: 19599, BlockLen: 3670016, Fingerprint: "0123456789abcdef", HashSeed: "vllm-none-hash"})
	case "lookup-70000-keys-short":
		b = AppendP2P(nil, &P2PLookup{ID: "r", Keys: make([]OffloadKey, 70000)})
	default:
		t.Fatalf("%s: no recipe", v.Name)
	}
	sum := sha256.Sum256(b)
	if len(b) != v.Len || hex.EncodeToString(sum[:]) != v.SHA256 || !bytes.HasPrefix(b, v.HexHead) {
		t.Fatalf("%s: the recipe gives %d bytes with sum %x, want %d with %s", v.Name, len(b), sum, v.Len, v.SHA256)
	}
	return b
}

// Every message of the recorded exchanges is written back byte for byte.
func TestP2PRecordedExchanges(t *testing.T) {
	type message struct {
		Type string
		Hex  hexBytes
	}
	var golden struct {
		Cases []struct{ Messages []message }
	}
	loadVectors(t, "p2p-golden", &golden)
	var engines struct{ Messages []message }
	loadVectors(t, "p2p-engines", &engines)
	all := engines.Messages
	for _, c := range golden.Cases {
		all = append(all, c.Messages...)
	}
	types := map[string]int{}
	for i, rec := range all {
		m, err := DecodeP2P(rec.Hex)
		if err != nil {
			t.Fatalf("message %d (%s): %v", i, rec.Type, err)
		}
		if m.Type() != rec.Type {
			t.Errorf("message %d is a %s, decoded as %s", i, rec.Type, m.Type())
		}
		if got := AppendP2P(nil, m); !bytes.Equal(got, rec.Hex) {
			t.Errorf("message %d (%s): wrote\n%x\nwant\n%x", i, rec.Type, got, []byte(rec.Hex))
		}
		types[rec.Type]++
	}
	if len(types) < 8 {
		t.Errorf("the recordings have only the types %v", types)
	}
}

// The class of each refusal decides what becomes of the session, as the released tier did it.
func TestP2PInvalidClass(t *testing.T) {
	var f struct {
		Cases []struct {
			Name    string
			Sent    []any // hexadecimal; long ones end in "..."
			Session string
		}
	}
	loadVectors(t, "p2p-invalid", &f)
	// Of these the decoder has nothing to say: the session's state decides.
	wellFormed := map[string]bool{"fetch-duplicate-round": true, "lookup-key-short": true, "lookup-resp-unsolicited": true,
		"transfer-done-unsolicited": true, "abort-unknown": true, "second-connect-after-ack": true, "second-ack": true,
		"ack-peer-id-other": true, "fetch-index-out-of-range": true, "fetch-index-2^31": true}
	seen := map[string]int{}
	for _, c := range f.Cases {
		b, err := hex.DecodeString(fmt.Sprint(c.Sent[len(c.Sent)-1]))
		if err != nil {
			continue
		}
		_, err = DecodeP2P(b)
		class := "well formed"
		switch {
		case errors.Is(err, ErrP2PIgnored):
			class = "ignored"
		case errors.Is(err, ErrP2PBadKey):
			class = "bad key"
		case err != nil:
			class = "fatal"
		}
		seen[class]++
		switch {
		case class == "well formed":
			if !wellFormed[c.Name] && !strings.Contains(c.Name, "connect") {
				t.Errorf("%s: accepted (stock session: %s)", c.Name, c.Session)
			}
		case class == "fatal" && c.Session == "alive", class == "ignored" && c.Session == "gone":
			t.Errorf("%s: %s (%v), but the stock session was %s", c.Name, class, err, c.Session)
		}
	}
	if seen["ignored"] < 10 || seen["bad key"] < 4 || seen["fatal"] < 4 {
		t.Errorf("classes: %v", seen)
	}
}

func TestP2PKeyOrderDoesNotMatter(t *testing.T) {
	b, _ := hex.DecodeString("83" + "a9726f756e645f73657107" + "ad6b765f726571756573745f6964a161" + "a474797065a961626f72745f61636b")
	m, err := DecodeP2P(b)
	if d := cmp.Diff(P2PMessage(P2PAbortAck{ID: "a", Round: 7}), m); d != "" || err != nil {
		t.Error(d, err)
	}
}

func TestP2PLimits(t *testing.T) {
	long := strings.Repeat("x", MaxIDLen+1)
	for name, m := range map[string]P2PMessage{
		"id":   P2PAbortAck{ID: long},
		"key":  &P2PLookup{ID: "a", Keys: []OffloadKey{OffloadKey(strings.Repeat("k", MaxP2PKeyLen+1))}},
		"keys": &P2PLookup{ID: "a", Keys: make([]OffloadKey, MaxP2PKeys+1)},
		"hits": &P2PLookupResp{ID: "a", Keys: []OffloadKey{"k"}, Hits: make([]bool, MaxP2PKeys+1)},
		"blob": &P2PConnect{AgentMetadata: make([]byte, MaxP2PMetadata+1), NumBlocks: 1, BlockLen: 1},
		"size": &P2PConnect{AgentMetadata: make([]byte, MaxP2PMessage), NumBlocks: 1, BlockLen: 1},
	} {
		if _, err := DecodeP2P(AppendP2P(nil, m)); !errors.Is(err, ErrLimit) && !errors.Is(err, ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// drawP2PKeys draws keys of all lengths.
func drawP2PKeys(t *rapid.T) []OffloadKey {
	return rapid.Map(rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 40), 0, 20), func(ks [][]byte) []OffloadKey {
		out := make([]OffloadKey, len(ks))
		for i, k := range ks {
			out[i] = OffloadKey(k)
		}
		return out
	}).Draw(t, "keys")
}

func testP2PRoundTrip(t *testing.T, draw func(*rapid.T) P2PMessage) {
	rapid.Check(t, func(t *rapid.T) {
		m := draw(t)
		got, err := DecodeP2P(AppendP2P(nil, m))
		if err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		if d := cmp.Diff(m, got); d != "" {
			t.Fatal(d)
		}
	})
}

var p2pIDs = rapid.StringN(0, 40, MaxIDLen)

// fuzzP2P decodes anything; what is accepted is stable from then on. The seeds are the vectors of one type.
func fuzzP2P(f *testing.F, typ string) {
	valid, invalid := p2pVectors(f, typ)
	for _, v := range append(valid, invalid...) {
		if v.Hex != nil {
			f.Add([]byte(*v.Hex))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeP2P(b)
		if err != nil {
			return
		}
		once := AppendP2P(nil, m)
		again, err := DecodeP2P(once)
		if err != nil {
			t.Fatalf("%x was accepted, its own form %x is not: %v", b, once, err)
		}
		if d := cmp.Diff(m, again); d != "" {
			t.Fatal(d)
		}
	})
}
