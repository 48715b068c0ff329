package wire

import (
	"errors"
	"testing"
)

func TestRequestVectors(t *testing.T) {
	for _, v := range codecVectors(t, "codec-valid", "side_channel_request") {
		list := value(t, v.Value).([]any)
		want := HandshakeRequest{PP: num(t, list[1]), TP: num(t, list[2])}
		v.expectBytes(t, AppendHandshakeRequest(nil, want))
		got, magicOK, err := DecodeHandshakeRequest(*v.Hex)
		if err != nil || !magicOK || got != want {
			t.Errorf("%s: decoded %+v, %v, %v", v.Name, got, magicOK, err)
		}
	}
}

// The example of nixl-connector.md, section 2.2.
func TestRequestExample(t *testing.T) {
	want := "\x93\xc4\x0cget_meta_msg\x00\x01"
	if got := AppendHandshakeRequest(nil, HandshakeRequest{TP: 1}); string(got) != want {
		t.Errorf("% x", got)
	}
}

type listenerVector struct {
	Name, Socket string
	FramesHex    []hexBytes `json:"frames_hex"`
	Answered     bool
}

func listenerVectors(t testing.TB) []listenerVector {
	var f struct{ Vectors []listenerVector }
	loadVectors(t, "listener-behaviour", &f)
	return f.Vectors
}

// A listener of one rank answers what a stock one answers, except where the decoder's comment says.
func TestRequestLikeStockListener(t *testing.T) {
	stricter := map[string]bool{"bin_of_three_bytes": true}
	oddMagic := map[string]bool{"str_magic": true, "wrong_magic": true, "nil_magic": true}
	seen := 0
	for _, v := range listenerVectors(t) {
		if v.Socket != "REQ" || len(v.FramesHex) != 1 {
			continue // several frames: the listener's own business
		}
		seen++
		q, magicOK, err := DecodeHandshakeRequest(v.FramesHex[0])
		answered := err == nil && q == HandshakeRequest{}
		if want := v.Answered && !stricter[v.Name]; answered != want {
			t.Errorf("%s: answered %v, want %v (%+v, %v)", v.Name, answered, want, q, err)
		}
		if answered && magicOK == oddMagic[v.Name] {
			t.Errorf("%s: magicOK is %v", v.Name, magicOK)
		}
		var de *DecodeError
		if err != nil && !errors.As(err, &de) {
			t.Errorf("%s: %T", v.Name, err)
		}
	}
	if seen < 20 {
		t.Errorf("only %d vectors", seen)
	}
}

func FuzzDecodeHandshakeRequest(f *testing.F) {
	for _, v := range listenerVectors(f) {
		for _, b := range v.FramesHex {
			f.Add([]byte(b))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		q, _, err := DecodeHandshakeRequest(b)
		if err != nil {
			return
		}
		again, magicOK, err := DecodeHandshakeRequest(AppendHandshakeRequest(nil, q))
		if err != nil || !magicOK || again != q {
			t.Errorf("%+v became %+v, %v, %v", q, again, magicOK, err)
		}
	})
}
