package frame

import (
	"bytes"
	"strings"
	"testing"
)

var ranges = []Range{{Addr: 4096, Len: 10}, {Addr: 1 << 40, Len: 1}}

// samples are one good frame of each kind.
func samples() [][]byte {
	return [][]byte{
		Hello{Stream: 1, Streams: 2, Session: Session{1, 2}, Name: "p"}.Append(nil),
		Welcome{Transfers: 3, Notif: 4, NotifBytes: 5, Name: "d"}.Append(nil),
		AppendBye(nil, "no more room"),
		AppendNotify(nil, []byte("HB:1")),
		Begin{ID: 7, Chunks: 2, Bytes: 22, Grant: [16]byte{9}, Notif: []byte("n")}.Append(nil),
		Begin{ID: 7, Chunks: 2, Bytes: 22, Grant: [16]byte{9}}.Append(nil),
		AppendCancel(nil, 7),
		AppendCancelled(nil, 7),
		Chunk{ID: 7, Index: 1, Chunks: 2, Grant: [16]byte{9}, Ranges: ranges}.Append(nil),
		AppendAck(nil, 7, 1),
		AppendDone(nil, 7),
		Refused{ID: 7, Index: 1, Text: "no live grant"}.Append(nil),
		Fetch{ID: 8, Index: 0, Grant: [16]byte{9}, Ranges: ranges}.Append(nil),
		Data{ID: 8, Index: 0, Bytes: 11}.Append(nil),
	}
}

// recode decodes a whole frame and encodes it again.
func recode(b []byte) ([]byte, error) {
	if len(b) < HeaderSize {
		return nil, errShort
	}
	h, err := DecodeHeader(b[:HeaderSize])
	if err != nil {
		return nil, err
	}
	body := b[HeaderSize:]
	if len(body) != h.Length {
		return nil, errShort
	}
	switch h.Kind {
	case KindHello:
		f, err := DecodeHello(body)
		return f.Append(nil), err
	case KindWelcome:
		f, err := DecodeWelcome(body)
		return f.Append(nil), err
	case KindBye:
		f, err := DecodeBye(body)
		return AppendBye(nil, f), err
	case KindNotify:
		f, err := DecodeNotify(body)
		return AppendNotify(nil, f), err
	case KindBegin:
		f, err := DecodeBegin(body)
		return f.Append(nil), err
	case KindCancel:
		f, err := DecodeCancel(body)
		return AppendCancel(nil, f), err
	case KindCancelled:
		f, err := DecodeCancelled(body)
		return AppendCancelled(nil, f), err
	case KindChunk:
		f, err := DecodeChunk(body, nil)
		return f.Append(nil), err
	case KindAck:
		id, index, err := DecodeAck(body)
		return AppendAck(nil, id, index), err
	case KindDone:
		f, err := DecodeDone(body)
		return AppendDone(nil, f), err
	case KindRefused:
		f, err := DecodeRefused(body)
		return f.Append(nil), err
	case KindFetch:
		f, err := DecodeFetch(body, nil)
		return f.Append(nil), err
	case KindData:
		f, err := DecodeData(body)
		return f.Append(nil), err
	}
	panic("a kind that DecodeHeader knows and this test does not")
}

// Whatever a decoder accepts is the one encoding of what it means. Texts alone are cleaned.
func FuzzDecode(f *testing.F) {
	for _, b := range samples() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		again, err := recode(b)
		if err != nil {
			return
		}
		if kind := Kind(b[0]); kind == KindBye || kind == KindRefused {
			return
		}
		if !bytes.Equal(again, b) {
			t.Errorf("%x decodes and encodes to %x", b, again)
		}
	})
}

func TestSamplesSurvive(t *testing.T) {
	seen := map[Kind]bool{}
	for _, b := range samples() {
		again, err := recode(b)
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("%x: %x, %v", b, again, err)
		}
		seen[Kind(b[0])] = true
		for n := range len(b) {
			cut := bytes.Clone(b[:n])
			if n >= HeaderSize {
				finish(cut, 0) // a header that agrees with the shorter body
			}
			if again, err := recode(cut); err == nil && !bytes.Equal(again, cut) {
				t.Errorf("cut to %d bytes: %x decodes to %x", n, cut, again)
			}
		}
	}
	for k := range maxBody {
		if !seen[k] {
			t.Errorf("no sample of kind %d", k)
		}
	}
}

func TestDecodersRefuse(t *testing.T) {
	many := make([]Range, MaxRanges+1)
	for i := range many {
		many[i] = Range{Addr: 1, Len: 1}
	}
	for name, b := range map[string][]byte{
		"unknown kind":           {99, 0, 0, 0, 0, 0, 0, 0},
		"kind zero":              {0, 0, 0, 0, 0, 0, 0, 0},
		"reserved bytes":         {byte(KindDone), 1, 0, 0, 8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8},
		"huge length":            {byte(KindNotify), 0, 0, 0, 0xff, 0xff, 0xff, 0xff},
		"empty notification":     AppendNotify(nil, nil),
		"stream beyond streams":  Hello{Stream: 3, Streams: 2, Name: "p"}.Append(nil),
		"no streams":             Hello{Streams: 0, Name: "p"}.Append(nil),
		"many streams":           Hello{Streams: MaxStreams + 1, Name: "p"}.Append(nil),
		"no name":                Hello{Streams: 1}.Append(nil),
		"long name":              Hello{Streams: 1, Name: strings.Repeat("x", MaxName+1)}.Append(nil),
		"name with a newline":    Hello{Streams: 1, Name: "a\nb"}.Append(nil),
		"chunk beyond chunks":    Chunk{Index: 2, Chunks: 2, Ranges: ranges}.Append(nil),
		"too many chunks":        Chunk{Index: 0, Chunks: MaxChunks + 1, Ranges: ranges}.Append(nil),
		"no ranges":              Chunk{Chunks: 1}.Append(nil),
		"many ranges":            Chunk{Chunks: 1, Ranges: many}.Append(nil),
		"empty range":            Chunk{Chunks: 1, Ranges: []Range{{Addr: 1}}}.Append(nil),
		"null range":             Fetch{Ranges: []Range{{Len: 1}}}.Append(nil),
		"range wraps":            Fetch{Ranges: []Range{{Addr: ^uint64(0), Len: 2}}}.Append(nil),
		"large chunk":            Fetch{Ranges: []Range{{Addr: 1, Len: MaxPayload}, {Addr: 1, Len: 1}}}.Append(nil),
		"fewer bytes than chunk": Begin{Chunks: 2, Bytes: 1}.Append(nil),
		"negative bytes":         Begin{Chunks: 1, Bytes: -1}.Append(nil),
		"no chunks":              Begin{Bytes: 1}.Append(nil),
		"empty data":             Data{}.Append(nil),
	} {
		if _, err := recode(b); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	other := Hello{Streams: 1, Name: "p"}.Append(nil)
	other[HeaderSize+8] = 2
	if _, err := recode(other); err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("other version: %v", err)
	}
	for _, b := range [][]byte{{2, 0, 0, 0, 0, 0, 0, 0}, {1, 0, 0, 0, 1, 0, 0, 0}, {0}} {
		if _, err := DecodeTrailer(b); err == nil {
			t.Errorf("trailer %x accepted", b)
		}
	}
	for _, tr := range []Trailer{{CRC: 5}, {Abandoned: true}} {
		if got, err := DecodeTrailer(tr.Append(nil)); err != nil || got != tr {
			t.Errorf("trailer %+v: %+v, %v", tr, got, err)
		}
	}
}

// A peer's words are shown without control characters.
func TestTextIsCleaned(t *testing.T) {
	f, err := DecodeRefused(Refused{Text: "a\x1b[2J\xffb\n" + strings.Repeat("x", 2*MaxText)}.Append(nil)[HeaderSize:])
	if err != nil || !strings.HasPrefix(f.Text, "a?[2J?b?x") || len(f.Text) > MaxText {
		t.Errorf("%q, %v", f.Text, err)
	}
}

// A peer that takes no WRITE at all is no peer.
func TestWelcomeWithoutTransfers(t *testing.T) {
	w := Welcome{Transfers: 0, Notif: 4, NotifBytes: 5, Name: "d"}
	if _, err := DecodeWelcome(w.Append(nil)[HeaderSize:]); err == nil || !strings.Contains(err.Error(), "no transfers") {
		t.Errorf("%v", err)
	}
}
