package openai

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func readEvents(t *testing.T, pieces ...[]byte) (data []string, raw, pending []byte) {
	t.Helper()
	var r EventReader
	for _, p := range pieces {
		err := r.Feed(p, func(e Event) error {
			raw = append(raw, e.Raw...)
			if e.Data == nil {
				data = append(data, "<none>")
			} else {
				data = append(data, string(e.Data))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return data, raw, r.Pending()
}

func TestEventReader(t *testing.T) {
	for in, want := range map[string][]string{
		"data: a\n\ndata:b\n\n":                   {"a", "b"},
		"data: a\r\n\r\ndata: b\r\r":              {"a", "b"},
		": ping\n\ndata: x\n\n":                   {"<none>", "x"},
		"event: e\ndata: 1\nid: 7\ndata: 2\n\n":   {"1\n2"},
		"\n\n\ndata\n\n":                          {""},
		"data:  two spaces\n\n":                   {" two spaces"},
		"database: no\n\n":                        {"<none>"},
		"data: cut":                               nil,
		"data: {\"a\":\"\xc3\xa9\"}\n\ndata: [DO": {"{\"a\":\"é\"}"},
	} {
		data, raw, pending := readEvents(t, []byte(in))
		if d := cmp.Diff(want, data); d != "" {
			t.Errorf("%q:\n%s", in, d)
		}
		if got := string(raw) + string(pending); got != in {
			t.Errorf("%q: events and rest are %q", in, got)
		}
	}
}

func TestEventReaderLimitAndError(t *testing.T) {
	var r EventReader
	if err := r.Feed([]byte("data: "+strings.Repeat("x", MaxEventBytes)), func(Event) error { return nil }); err == nil {
		t.Error("an event beyond the limit was accepted")
	}
	stop := errors.New("stop")
	var s EventReader
	if err := s.Feed([]byte("data: x\n\n"), func(Event) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
}

func TestAppendEvent(t *testing.T) {
	out := AppendEvent(nil, []byte("a\nb\r\nc\rd"))
	out = AppendComment(out, "ping")
	out = AppendDone(out)
	if want := "data: a\ndata: b\ndata: c\ndata: d\n\n: ping\n\ndata: [DONE]\n\n"; string(out) != want {
		t.Fatalf("got %q", out)
	}
	data, _, _ := readEvents(t, out)
	if d := cmp.Diff([]string{"a\nb\nc\nd", "<none>", Done}, data); d != "" {
		t.Error(d)
	}
}

// FuzzEventReader checks that events do not depend on where the stream is split.
func FuzzEventReader(f *testing.F) {
	f.Add([]byte("data: a\r\n\r\ndata: b\n\n: c\r\rdata"), []byte{3, 1, 1})
	f.Add([]byte("\r\n\r\n\n\rdata:x\r\n\n"), []byte{1})
	f.Fuzz(func(t *testing.T, in, cuts []byte) {
		whole, wholeRaw, wholePending := readEvents(t, in)
		var pieces [][]byte
		rest := in
		for i := 0; len(rest) > 0; i++ {
			n := 1
			if len(cuts) > 0 {
				n = 1 + int(cuts[i%len(cuts)])
			}
			n = min(n, len(rest))
			pieces = append(pieces, rest[:n])
			rest = rest[n:]
		}
		data, raw, pending := readEvents(t, pieces...)
		if d := cmp.Diff(whole, data); d != "" {
			t.Fatalf("%q: %s", in, d)
		}
		if !bytes.Equal(append(raw, pending...), in) || !bytes.Equal(append(wholeRaw, wholePending...), in) {
			t.Fatalf("%q: bytes were lost", in)
		}
	})
}
