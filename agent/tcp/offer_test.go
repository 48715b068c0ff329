package tcp

import (
	"bytes"
	"reflect"
	"strings"
	"testing"
)

// What decodes is the one encoding of what it means.
func FuzzOffer(f *testing.F) {
	f.Add(offer{"p", []string{"127.0.0.1:1"}}.encode())
	f.Add(offer{"0123456789abcdef", []string{"[::1]:65535", "host.example:7"}}.encode())
	f.Add([]byte{1, 1, 'p', 8})
	f.Add(offer{"p", []string{strings.Repeat("a", 255)}}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if o, err := decodeOffer(b); err == nil && !bytes.Equal(o.encode(), b) {
			t.Errorf("%x decodes to %+v", b, o)
		}
	})
}

func TestOffer(t *testing.T) {
	want := offer{"p", []string{"a:1", strings.Repeat("b", 253) + ":2"}}
	b := want.encode()
	if got, err := decodeOffer(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for n := range len(b) {
		if o, err := decodeOffer(b[:n]); err == nil {
			t.Errorf("cut to %d bytes: %+v", n, o)
		}
	}
	if _, err := decodeOffer(append(b, 0)); err == nil {
		t.Error("left-over byte accepted")
	}
}

func TestAddresses(t *testing.T) {
	if _, err := New(Config{Listen: "0.0.0.0:0"}); err == nil {
		t.Error("listens everywhere and advertises nothing")
	}
	a, err := New(Config{Listen: "0.0.0.0:0", Advertise: []string{"127.0.0.1", "example.org:99"}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	o, err := decodeOffer(a.Offers()[0].Blob)
	if err != nil || len(o.addrs) != 2 || o.addrs[1] != "example.org:99" || o.name != a.Name() {
		t.Errorf("%+v, %v", o, err)
	}
	for _, cfg := range []Config{
		{Streams: 17}, {Streams: -1}, {ChunkBytes: 5}, {ChunkBytes: 1 << 30}, {Listen: "nonsense"},
		{AbortTimeout: -1}, {Advertise: make([]string, 9)},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v accepted", cfg)
		}
	}
}
