package zmtp

import (
	"bytes"
	"errors"
	"io"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// scriptConn is a connection that reads a script, in pieces of the given sizes (then all at once).
type scriptConn struct {
	net.Conn
	r      io.Reader
	pieces []int
}

func (c *scriptConn) SetReadDeadline(time.Time) error { return nil }

func (c *scriptConn) Read(p []byte) (int, error) {
	if len(c.pieces) > 0 {
		p = p[:min(len(p), c.pieces[0])]
		c.pieces = c.pieces[1:]
	}
	return c.r.Read(p)
}

// received is all that a byte stream says after the handshake.
type received struct {
	messages [][]string
	commands []string
}

func drain(r *reader) (received, error) {
	var got received
	for {
		frames, err := r.message(func(c command) error {
			got.commands = append(got.commands, c.name+":"+string(c.data))
			return nil
		})
		if err != nil {
			return got, err
		}
		m := make([]string, len(frames))
		for i, f := range frames {
			m[i] = string(f)
		}
		got.messages = append(got.messages, m)
	}
}

// slowDecode is the oracle: it has the whole stream at hand, and nothing in common with reader.
func slowDecode(b []byte, lim Limits) (got received, clean bool) {
	var open []string
	for {
		if len(b) == 0 {
			return got, len(open) == 0
		}
		flags := b[0]
		if flags > 7 || flags&5 == 5 {
			return got, false
		}
		b = b[1:]
		width := 1
		if flags&2 != 0 {
			width = 8
		}
		if len(b) < width {
			return got, false
		}
		size := uint64(0)
		for _, c := range b[:width] {
			size = size<<8 | uint64(c)
		}
		b = b[width:]
		if flags&4 == 0 {
			total := size
			for _, f := range open {
				total += uint64(len(f))
			}
			if size > uint64(lim.MaxFrameBytes) || total > uint64(lim.MaxMessageBytes) || total < size || len(open) == lim.MaxFrames {
				return got, false
			}
		} else if size > maxCommandBytes {
			return got, false
		}
		if uint64(len(b)) < size {
			return got, false
		}
		body := string(b[:size])
		b = b[size:]
		switch {
		case flags&4 != 0:
			if body == "" || body[0] == 0 || int(body[0]) >= len(body) {
				return got, false
			}
			n := 1 + int(body[0])
			got.commands = append(got.commands, body[1:n]+":"+body[n:])
		case flags&1 != 0:
			open = append(open, body)
		default:
			got.messages = append(got.messages, append(open, body))
			open = nil
		}
	}
}

func compareDecoders(t interface{ Fatalf(string, ...any) }, input []byte, pieces []int, lim Limits) {
	want, clean := slowDecode(input, lim)
	r := newReader(&scriptConn{r: bytes.NewReader(input), pieces: pieces}, &lim, time.Hour)
	got, err := drain(r)
	if !slices.EqualFunc(got.messages, want.messages, slices.Equal[[]string]) || !slices.Equal(got.commands, want.commands) {
		t.Fatalf("decoded %q, want %q", got, want)
	}
	if clean != (err == io.EOF) {
		t.Fatalf("ended with %v, a clean end was %v", err, clean)
	}
	if err != io.EOF && !errors.Is(err, ErrProtocol) && !errors.Is(err, ErrLimit) && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("untyped error %v", err)
	}
}

func TestDecoderAgainstOracle(t *testing.T) {
	lim := Limits{MaxFrameBytes: 300 << 10, MaxFrames: 6, MaxMessageBytes: 400 << 10}.withDefaults()
	rapid.Check(t, func(t *rapid.T) {
		var input []byte
		for range rapid.IntRange(0, 12).Draw(t, "items") {
			size := rapid.OneOf(rapid.IntRange(0, 300), rapid.SampledFrom([]int{4095, 4096, 65535, 65536, 65537, 200 << 10, 300 << 10, 300<<10 + 1})).Draw(t, "size")
			body := strings.Repeat(string(rune('a'+len(input)%26)), size)
			switch rapid.IntRange(0, 3).Draw(t, "kind") {
			case 0:
				input = appendCommand(input, "NAME", []byte(body[:min(size, 9000)]))
			case 1:
				input = append(appendFrameHeader(input, flagMore, size), body...)
			default:
				input = append(appendFrameHeader(input, 0, size), body...)
			}
		}
		if rapid.Bool().Draw(t, "cut") {
			input = input[:rapid.IntRange(0, len(input)).Draw(t, "at")]
		}
		pieces := rapid.SliceOfN(rapid.IntRange(1, 70000), 0, 30).Draw(t, "pieces")
		compareDecoders(t, input, pieces, lim)
	})
}

func FuzzFrames(f *testing.F) {
	f.Add(append(message("", "a", "b"), appendPing(nil, time.Second)...), byte(1))
	f.Add(message(strings.Repeat("x", 300)), byte(7))
	f.Add([]byte{2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, byte(0))
	f.Add([]byte{1, 0, 1, 0, 1, 0, 1, 0, 0, 0}, byte(2))
	lim := Limits{MaxFrameBytes: 2000, MaxFrames: 4, MaxMessageBytes: 3000}.withDefaults()
	f.Fuzz(func(t *testing.T, input []byte, piece byte) {
		compareDecoders(t, input, slices.Repeat([]int{int(piece) + 1}, len(input)/(int(piece)+1)), lim)
	})
}

func FuzzGreeting(f *testing.F) {
	f.Add(appendGreeting(nil, "abc"))
	f.Add([]byte("GET / HTTP/1.1"))
	f.Fuzz(func(t *testing.T, input []byte) {
		lim := Limits{}.withDefaults()
		g, err := newReader(&scriptConn{r: bytes.NewReader(input)}, &lim, time.Hour).greeting()
		want := len(input) >= 64 && input[0] == 0xff && input[9]&1 == 1 && input[10] >= 3 &&
			bytes.Equal(input[12:32], append([]byte("NULL"), make([]byte, 16)...))
		if (err == nil) != want {
			t.Fatalf("greeting %x: %v, want accepted %v", input, err, want)
		}
		if err == nil && (g.major != input[10] || g.minor != input[11]) {
			t.Fatalf("version %d.%d", g.major, g.minor)
		}
	})
}

func FuzzCommand(f *testing.F) {
	f.Add(appendReady(nil, ready{typeDealer, "id"})[2:])
	f.Add(appendPing(nil, time.Second)[2:])
	f.Add(appendError(nil, "why")[2:])
	f.Fuzz(func(t *testing.T, body []byte) {
		c, err := parseCommand(body)
		if err != nil {
			return
		}
		if again := append(append([]byte{byte(len(c.name))}, c.name...), c.data...); !bytes.Equal(again, body) {
			t.Fatalf("command %x was split into %q and %x", body, c.name, c.data)
		}
		if r, err := parseReady(c.data); err == nil {
			again := appendReady(nil, r)
			h, n, err := parseFlags(again[0])
			if err != nil || !h.command {
				t.Fatalf("READY encodes as %x", again)
			}
			inner, err := parseCommand(again[1+n:])
			if err != nil {
				t.Fatal(err)
			}
			if back, err := parseReady(inner.data); err != nil || back != r {
				t.Fatalf("%+v came back as %+v, %v", r, back, err)
			}
		}
		if ttl, context, err := parsePing(c.data); err == nil {
			if ttl < 0 || ttl > maxHeartbeatTTL || !bytes.HasPrefix(c.data[2:], context) || len(context) > 16 {
				t.Fatalf("PING %x: %v, %x", c.data, ttl, context)
			}
		}
		if reason, err := parseError(c.data); err == nil && !bytes.HasPrefix(c.data[1:], []byte(reason)) {
			t.Fatalf("ERROR %x: %q", c.data, reason)
		}
	})
}

func TestSizeForms(t *testing.T) {
	for _, n := range []int{0, 1, 255, 256, 65536, math.MaxInt32} {
		b := appendFrameHeader(nil, flagMore, n)
		h, width, err := parseFlags(b[0])
		if err != nil || !h.more || h.command || (width == 1) != (n <= 255) || len(b) != 1+width {
			t.Errorf("size %d encodes as %x: %+v, %v", n, b, h, err)
		}
		if got, err := parseSize(b[1:]); err != nil || got != n {
			t.Errorf("size %d came back as %d, %v", n, got, err)
		}
	}
}
