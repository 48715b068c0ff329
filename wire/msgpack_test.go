package wire

import (
	"bytes"
	"errors"
	"math"
	"testing"

	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

func skipAll(b []byte) error {
	r := newReader("any", b, math.MaxInt)
	r.skip()
	return r.end()
}

func TestSkipAcceptsWhatStockAccepts(t *testing.T) {
	for _, v := range codecVectors(t, "codec-invalid", "any") {
		if err := skipAll(*v.Hex); (err == nil) != v.Accepted {
			t.Errorf("%s: %v, stock says %q", v.Name, err, v.Error)
		}
	}
}

// The independent decoder of the msgp library skips the same number of bytes.
func TestSkipAgreesWithLibrary(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 1, 60).Draw(t, "bytes")
		r := newReader("any", b, math.MaxInt)
		r.skip()
		rest, err := msgp.Skip(b)
		if (r.err == nil) != (err == nil) {
			t.Fatalf("% x: %v, library says %v", b, r.err, err)
		}
		if err == nil && r.off != len(b)-len(rest) {
			t.Errorf("% x: %d bytes, library skips %d", b, r.off, len(b)-len(rest))
		}
	})
}

func TestSkipEveryType(t *testing.T) {
	for _, b := range []string{
		"\x00", "\x7f", "\xe0", "\xff", "\xc0", "\xc2", "\xc3", "\x80", "\x90", "\xa0",
		"\xa3abc", "\xd9\x03abc", "\xda\x00\x03abc", "\xdb\x00\x00\x00\x03abc",
		"\xc4\x03abc", "\xc5\x00\x03abc", "\xc6\x00\x00\x00\x03abc",
		"\xcc\x00", "\xcd\x00\x00", "\xce\x00\x00\x00\x00", "\xcf\x00\x00\x00\x00\x00\x00\x00\x00",
		"\xd0\x00", "\xd1\x00\x00", "\xd2\x00\x00\x00\x00", "\xd3\x00\x00\x00\x00\x00\x00\x00\x00",
		"\xca\x00\x00\x00\x00", "\xcb\x00\x00\x00\x00\x00\x00\x00\x00",
		"\xd4\x05a", "\xd5\x05ab", "\xd6\x05abcd", "\xd7\x05abcdefgh", "\xd8\x05abcdefghabcdefgh",
		"\xc7\x02\x05ab", "\xc8\x00\x02\x05ab", "\xc9\x00\x00\x00\x02\x05ab",
		"\x92\x01\x91\xc0", "\xdc\x00\x02\x01\x02", "\xdd\x00\x00\x00\x01\x01",
		"\x82\x01\x02\x90\x80", "\xde\x00\x01\x01\x02", "\xdf\x00\x00\x00\x01\x01\x02",
	} {
		if err := skipAll([]byte(b)); err != nil {
			t.Errorf("% x: %v", b, err)
		}
		for n := range len(b) {
			if err := skipAll([]byte(b[:n])); !errors.Is(err, ErrSyntax) {
				t.Errorf("% x: %v", b[:n], err)
			}
		}
		if err := skipAll([]byte(b + "\x00")); !errors.Is(err, ErrSyntax) {
			t.Errorf("% x and more: %v", b, err)
		}
	}
}

func TestSkipDepth(t *testing.T) {
	nested := func(n int) []byte { return append(bytes.Repeat([]byte{0x91}, n), 0xc0) }
	if err := skipAll(nested(maxSkipDepth)); err != nil {
		t.Error(err)
	}
	if err := skipAll(nested(maxSkipDepth + 1)); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
	// Containers that end give their depth back.
	if err := skipAll(append([]byte{0xdc, 4, 0}, bytes.Repeat([]byte{0x91, 0xc0}, 1024)...)); err != nil {
		t.Error(err)
	}
}

func TestIntegers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := rapid.Int64().Draw(t, "v")
		for name, b := range map[string][]byte{
			"narrow": appendInt(nil, int(v)),
			"wide":   append([]byte{0xd3}, byte(v>>56), byte(v>>48), byte(v>>40), byte(v>>32), byte(v>>24), byte(v>>16), byte(v>>8), byte(v)),
		} {
			r := newReader("int", b, 9)
			if got := r.int(); r.end() != nil || got != int(v) {
				t.Errorf("%s %d: % x decoded to %d, %v", name, v, b, got, r.err)
			}
		}
	})
	for b, want := range map[string]int{
		"\xd0\x80": -128, "\xd1\x80\x00": -32768, "\xd2\x80\x00\x00\x00": math.MinInt32,
		"\xd3\x80\x00\x00\x00\x00\x00\x00\x00": math.MinInt64, "\xcf\x7f\xff\xff\xff\xff\xff\xff\xff": math.MaxInt64,
		"\xe0": -32, "\xff": -1, "\x7f": 127, "\xcc\xff": 255, "\xd0\x7f": 127,
	} {
		r := newReader("int", []byte(b), 9)
		if got := r.int(); r.end() != nil || got != want {
			t.Errorf("% x: %d, %v, want %d", b, got, r.err, want)
		}
	}
	for _, b := range []string{"\xcf\x80\x00\x00\x00\x00\x00\x00\x00", "\xc3", "\xca\x00\x00\x00\x00", "\xa11", "\xc0", ""} {
		r := newReader("int", []byte(b), 9)
		if got := r.int(); r.end() == nil || got != 0 {
			t.Errorf("% x: %d", b, got)
		}
	}
	r := newReader("uint", []byte{0xff}, 9)
	if r.uint(); !errors.Is(r.end(), ErrRange) {
		t.Error("a negative uint")
	}
}

func TestInputLimit(t *testing.T) {
	r := newReader("any", make([]byte, 11), 10)
	if r.skip(); !errors.Is(r.end(), ErrLimit) {
		t.Error(r.err)
	}
}

func TestErrorsDoNotRepeatHostileKeys(t *testing.T) {
	b := msgp.AppendString([]byte{0x81}, string(bytes.Repeat([]byte("k"), 10000)))
	_, err := DecodeHandshakePayload(append(b, 0xc1))
	if err == nil || len(err.Error()) > 300 {
		t.Errorf("%v", err)
	}
}

func FuzzSkip(f *testing.F) {
	for _, v := range codecVectors(f, "codec-invalid", "any") {
		f.Add([]byte(*v.Hex))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newReader("any", b, math.MaxInt)
		r.skip()
		rest, err := msgp.Skip(b)
		if r.err == nil && (err != nil || r.off != len(b)-len(rest)) {
			t.Errorf("skipped %d of % x, library: %v", r.off, b, err)
		}
	})
}
