package wire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func payloadOf(v any) HandshakePayload {
	m := v.(map[string]any)
	return HandshakePayload{m["compatibility_hash"].(string), m["agent_metadata_bytes"].([]byte)}
}

func TestPayloadVectors(t *testing.T) {
	for _, v := range codecVectors(t, "codec-valid", "NixlHandshakePayload") {
		want := payloadOf(value(t, v.Value))
		v.expectBytes(t, AppendHandshakePayload(nil, want))
		got, err := DecodeHandshakePayload(*v.Hex)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v %s", v.Name, err, d)
		}
	}
}

func TestPayloadAcceptsWhatStockAccepts(t *testing.T) {
	for _, v := range codecVectors(t, "codec-invalid", "NixlHandshakePayload") {
		got, err := DecodeHandshakePayload(*v.Hex)
		if (err == nil) != v.Accepted {
			t.Errorf("%s: %v, stock says %q", v.Name, err, v.Error)
			continue
		}
		if v.Accepted {
			if d := cmp.Diff(payloadOf(value(t, v.Decoded)), got); d != "" {
				t.Errorf("%s: %s", v.Name, d)
			}
		}
	}
}

func TestPayloadNamesTheMissingKey(t *testing.T) {
	_, err := DecodeHandshakePayload([]byte("\x81\xb2compatibility_hash\xa2ab"))
	var de *DecodeError
	if !errors.As(err, &de) || de.Field != keyMetadataBytes || !errors.Is(err, ErrMissing) {
		t.Errorf("%v", err)
	}
}

func TestPayloadSharesNoMemory(t *testing.T) {
	b := AppendHandshakePayload(nil, HandshakePayload{"ab", []byte{1, 2}})
	p, err := DecodeHandshakePayload(b)
	if err != nil {
		t.Fatal(err)
	}
	clear(b)
	if p.CompatibilityHash != "ab" || !bytes.Equal(p.AgentMetadata, []byte{1, 2}) {
		t.Errorf("changed with the input: %+v", p)
	}
}

type sideChannelVector struct {
	Name          string
	RequestHex    hexBytes   `json:"request_hex"`
	ReplyFrames   []hexBytes `json:"reply_frames_hex"`
	InnerHex      hexBytes   `json:"inner_hex"`
	Clock         float64
	InnerKeyOrder []string `json:"inner_key_order"`
}

func sideChannelVectors(t testing.TB) []sideChannelVector {
	var f struct{ Vectors []sideChannelVector }
	loadVectors(t, "side-channel", &f)
	if len(f.Vectors) == 0 {
		t.Fatal("no side-channel vectors")
	}
	return f.Vectors
}

// Both frames of real replies decode and encode back to the same bytes, and so does what is inside.
func TestSideChannelReplies(t *testing.T) {
	for _, v := range sideChannelVectors(t) {
		q, magicOK, err := DecodeHandshakeRequest(v.RequestHex)
		if err != nil || !magicOK || !bytes.Equal(AppendHandshakeRequest(nil, q), v.RequestHex) {
			t.Errorf("%s: request %+v, %v", v.Name, q, err)
		}
		p, err := DecodeHandshakePayload(v.ReplyFrames[0])
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		if !bytes.Equal(AppendHandshakePayload(nil, p), v.ReplyFrames[0]) || !bytes.Equal(p.AgentMetadata, v.InnerHex) {
			t.Errorf("%s: payload differs", v.Name)
		}
		m, err := DecodeAgentMetadata(p.AgentMetadata)
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		if b, err := AppendAgentMetadata(nil, m, ConnectorVersion); err != nil || !bytes.Equal(b, v.InnerHex) {
			t.Errorf("%s: metadata encodes differently (%v)", v.Name, err)
		}
		if err := m.Validate(); err != nil {
			t.Errorf("%s: %v", v.Name, err)
		}
		if m.Extension != nil {
			t.Errorf("%s: a stock peer with an extension", v.Name)
		}
		clock, err := DecodeClock(v.ReplyFrames[1])
		if err != nil || clock != v.Clock || !bytes.Equal(AppendClock(nil, clock), v.ReplyFrames[1]) {
			t.Errorf("%s: clock %v, %v", v.Name, clock, err)
		}
		if d := cmp.Diff(metadataKeys[:metadataExt], v.InnerKeyOrder); d != "" {
			t.Errorf("%s: %s", v.Name, d)
		}
	}
}

func FuzzDecodeHandshakePayload(f *testing.F) {
	for _, v := range codecVectors(f, "codec-invalid", "NixlHandshakePayload") {
		f.Add([]byte(*v.Hex))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := DecodeHandshakePayload(b)
		if err != nil {
			return
		}
		again, err := DecodeHandshakePayload(AppendHandshakePayload(nil, p))
		if d := cmp.Diff(p, again); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
	})
}
