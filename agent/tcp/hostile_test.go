package tcp

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
	"github.com/kvferry/kvferry/kv"
)

// victim is an agent with memory, one page of which "mallory" may write and read, and an honest
// peer that must not notice anything.
type victim struct {
	*Agent
	t           *testing.T
	mem         agent.Memory
	write, read agent.GrantID
	honest      *Agent
	peer        agent.PeerID // of the victim at the honest one
	n           int
}

func newVictim(t *testing.T, cfg Config) *victim {
	t.Helper()
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	h, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); h.Close() })
	v := &victim{Agent: a, t: t, honest: h}
	if v.mem, err = a.Alloc(4 * 4096); err != nil {
		t.Fatal(err)
	}
	page := []kv.Descriptor{{Addr: v.mem.Addr() + 4096, Length: 4096}}
	for acc, g := range map[agent.Access]*agent.GrantID{agent.AccessWrite: &v.write, agent.AccessRead: &v.read} {
		if *g, err = a.Grant(agent.GrantSpec{Peer: "mallory", Access: acc, Ranges: page}); err != nil {
			t.Fatal(err)
		}
	}
	p, err := h.AddPeer(t.Context(), agent.PeerInfo{Offers: a.Offers()})
	if err != nil {
		t.Fatal(err)
	}
	v.peer = p.ID
	return v
}

// unharmed checks that nothing was written outside of the granted page and that the honest peer is
// served.
func (v *victim) unharmed() {
	v.t.Helper()
	for i, b := range v.mem.Bytes() {
		if b != 0 && (i < 4096 || i >= 8192) {
			v.t.Fatalf("byte %d outside of the grant was written", i)
		}
	}
	v.n++
	msg := []byte{byte(v.n)}
	if err := v.honest.Notify(v.peer, msg); err != nil {
		v.t.Fatalf("the honest peer was harmed: %v", err)
	}
	for {
		select {
		case ev := <-v.Events():
			if m, ok := ev.(agent.Notification); ok && m.From.Name == v.honest.Name() && bytes.Equal(m.Msg, msg) {
				return
			}
		case <-time.After(10 * time.Second):
			v.t.Fatal("the honest peer is not served")
		}
	}
}

// lost waits until the loss of a peer is told.
func (v *victim) lost(name agent.Name) {
	v.t.Helper()
	for {
		select {
		case ev := <-v.Events():
			if l, ok := ev.(agent.PeerLost); ok && l.Inbound && l.Peer.Name == name {
				return
			}
		case <-time.After(10 * time.Second):
			v.t.Fatalf("the loss of %s is not told", name)
		}
	}
}

// mallory speaks the format by hand.
type mallory struct {
	t       *testing.T
	session frame.Session
	conns   []*conn
	// expelled: the session may be closed while it still sends.
	expelled bool
}

func (v *victim) mallory(streams int) *mallory {
	v.t.Helper()
	m := &mallory{t: v.t}
	for i := range m.session {
		m.session[i] = byte(rand.Uint32())
	}
	for i := range streams + 1 {
		nc, err := net.Dial("tcp", v.Addr().String())
		if err != nil {
			v.t.Fatal(err)
		}
		c, err := newConn(nc.(*net.TCPConn), time.Minute)
		if err != nil {
			v.t.Fatal(err)
		}
		v.t.Cleanup(func() { c.Close() })
		if _, err := c.hello(frame.Hello{Stream: i, Streams: streams, Session: m.session, Name: "mallory"}); err != nil {
			v.t.Fatal(err)
		}
		m.conns = append(m.conns, c)
	}
	return m
}

func (m *mallory) send(stream int, b ...[]byte) {
	m.t.Helper()
	for _, b := range b {
		if _, err := m.conns[stream].Write(b); err != nil && !m.expelled {
			m.t.Fatal(err)
		}
	}
}

// next reads an answer.
func (m *mallory) next(stream int) (frame.Kind, []byte) {
	m.t.Helper()
	_ = m.conns[stream].SetReadDeadline(time.Now().Add(10 * time.Second))
	kind, body, err := m.conns[stream].next()
	if err != nil {
		m.t.Fatalf("no answer on stream %d: %v", stream, err)
	}
	return kind, body
}

// thrownOut checks that the session is closed.
func (m *mallory) thrownOut(name string) {
	m.t.Helper()
	for _, c := range m.conns {
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(io.Discard, c.TCPConn); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
			m.t.Fatalf("%s: the connection stays open", name)
		}
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func payload(b []byte) [][]byte {
	return [][]byte{b, frame.Trailer{CRC: crc32.Checksum(b, castagnoli)}.Append(nil)}
}

func (v *victim) chunk(id uint64, index, chunks int, off, n int) frame.Chunk {
	return frame.Chunk{
		ID: id, Index: index, Chunks: chunks, Grant: v.write,
		Ranges: []frame.Range{{Addr: v.mem.Addr() + uint64(off), Len: n}},
	}
}

// By hand, the same frames that an honest poster sends do what they should: the tests below differ
// from this one in one thing each.
func TestByHand(t *testing.T) {
	v := newVictim(t, Config{})
	m := v.mallory(2)
	data := bytes.Repeat([]byte{7}, 100)
	// The second chunk overtakes Begin, on another stream.
	m.send(2, append([][]byte{v.chunk(5, 1, 2, 4196, 100).Append(nil)}, payload(data)...)...)
	if kind, _ := m.next(2); kind != frame.KindAck {
		t.Fatalf("answer of kind %d", kind)
	}
	m.send(0, frame.Begin{ID: 5, Chunks: 2, Bytes: 200, Grant: v.write, Notif: []byte("whole")}.Append(nil))
	m.send(0, frame.AppendCancel(nil, 4)) // its answer says that Begin has been read
	if kind, _ := m.next(0); kind != frame.KindCancelled {
		t.Fatalf("answer of kind %d", kind)
	}
	m.send(1, append([][]byte{v.chunk(5, 0, 2, 4096, 100).Append(nil)}, payload(data)...)...)
	for _, want := range []frame.Kind{frame.KindAck, frame.KindDone} {
		if kind, _ := m.next(1); kind != want {
			t.Fatalf("answer of kind %d, want %d", kind, want)
		}
	}
	n := (<-v.Events()).(agent.Notification)
	if string(n.Msg) != "whole" || n.Arrival == nil || n.Arrival.Bytes != 200 || n.From.Name != "mallory" {
		t.Errorf("%+v", n)
	}
	if !bytes.Equal(v.mem.Bytes()[4096:4296], bytes.Repeat([]byte{7}, 200)) {
		t.Error("bytes are not in place")
	}
	// The transfer is over: a chunk of it that comes again is read into nowhere and unanswered.
	m.send(1, append([][]byte{v.chunk(5, 0, 2, 4096, 100).Append(nil)}, payload(bytes.Repeat([]byte{9}, 100))...)...)
	m.send(1, frame.Fetch{ID: 6, Grant: v.read, Ranges: []frame.Range{{Addr: v.mem.Addr() + 4096, Len: 100}}}.Append(nil))
	if kind, _ := m.next(1); kind != frame.KindData {
		t.Fatalf("answer of kind %d", kind)
	}
	got := make([]byte, 100)
	if _, err := io.ReadFull(m.conns[1], got); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read %v (%v): a chunk was replayed", got[0], err)
	}
	v.unharmed()
}

// What is refused is refused with an answer, in whole, and the session goes on.
func TestRefusals(t *testing.T) {
	v := newVictim(t, Config{})
	m := v.mallory(1)
	hundred := make([]byte, 100)
	for i := range hundred {
		hundred[i] = 0xee
	}
	wrongSum := [][]byte{hundred, frame.Trailer{CRC: 1}.Append(nil)}
	id := uint64(0)
	for name, c := range map[string]struct {
		off     int
		grant   agent.GrantID
		payload [][]byte
		bytes   int64
	}{
		"outside":       {0, v.write, payload(hundred), 100},
		"over the edge": {8192 - 50, v.write, payload(hundred), 100},
		"read grant":    {4096, v.read, payload(hundred), 100},
		"no grant":      {4096, agent.GrantID{}, payload(hundred), 100},
		"wrong sum":     {4096, v.write, wrongSum, 100},
		"other total":   {4096, v.write, payload(hundred), 101},
	} {
		id++
		f := v.chunk(id, 0, 1, c.off, 100)
		f.Grant = c.grant
		m.send(0, frame.Begin{ID: id, Chunks: 1, Bytes: c.bytes, Grant: c.grant, Notif: []byte("never")}.Append(nil))
		m.send(0, frame.AppendCancel(nil, id-1)) // its answer says that Begin has been read
		if kind, _ := m.next(0); kind != frame.KindCancelled {
			t.Fatalf("%s: answer of kind %d", name, kind)
		}
		m.send(1, append([][]byte{f.Append(nil)}, c.payload...)...)
		kind, body := m.next(1)
		if name == "other total" && kind == frame.KindAck {
			kind, body = m.next(1)
		}
		r, err := frame.DecodeRefused(body)
		if kind != frame.KindRefused || err != nil || r.ID != id || r.Text == "" {
			t.Errorf("%s: answer of kind %d: %+v, %v", name, kind, r, err)
		}
	}
	for name, c := range map[string]frame.Fetch{
		"outside":     {Grant: v.read, Ranges: []frame.Range{{Addr: v.mem.Addr(), Len: 1}}},
		"write grant": {Grant: v.write, Ranges: []frame.Range{{Addr: v.mem.Addr() + 4096, Len: 1}}},
		"nowhere":     {Grant: v.read, Ranges: []frame.Range{{Addr: 8, Len: 1 << 20}}},
	} {
		m.send(1, c.Append(nil))
		if kind, _ := m.next(1); kind != frame.KindRefused {
			t.Errorf("fetch %s: answer of kind %d", name, kind)
		}
	}
	// A Cancel of what is over is answered all the same.
	m.send(0, frame.AppendCancel(nil, id))
	if kind, _ := m.next(0); kind != frame.KindCancelled {
		t.Errorf("answer of kind %d to a Cancel", kind)
	}
	v.unharmed()
	for len(v.Events()) > 0 {
		if n, ok := (<-v.Events()).(agent.Notification); ok && string(n.Msg) == "never" {
			t.Error("notified of a refused transfer")
		}
	}
}

// What no honest poster sends costs the sender its session.
func TestThrownOut(t *testing.T) {
	v := newVictim(t, Config{Limits: agent.Limits{Transfers: 8, Notification: 1000, PeerNotificationBytes: 2000}, StallTimeout: 200 * time.Millisecond})
	hundred := make([]byte, 100)
	begin := func(id uint64, chunks int) []byte {
		return frame.Begin{ID: id, Chunks: chunks, Bytes: int64(chunks) * 100, Grant: v.write}.Append(nil)
	}
	whole := func(f frame.Chunk) [][]byte { return append([][]byte{f.Append(nil)}, payload(hundred)...) }
	for name, attack := range map[string]func(m *mallory){
		"a chunk twice": func(m *mallory) {
			m.send(0, begin(1, 2))
			m.send(1, whole(v.chunk(1, 0, 2, 4096, 100))...)
			m.send(1, whole(v.chunk(1, 0, 2, 4096, 100))...)
		},
		"a chunk twice, on two streams": func(m *mallory) {
			m.send(0, begin(1, 2))
			m.send(1, whole(v.chunk(1, 1, 2, 4096, 100))...)
			m.send(2, whole(v.chunk(1, 1, 2, 4096, 100))...)
		},
		"an id twice":     func(m *mallory) { m.send(0, begin(3, 1), begin(3, 1)) },
		"ids that fall":   func(m *mallory) { m.send(0, begin(3, 1), begin(2, 1)) },
		"contradiction":   func(m *mallory) { m.send(0, begin(1, 2)); m.send(1, whole(v.chunk(1, 0, 3, 4096, 100))...) },
		"early cancel":    func(m *mallory) { m.send(0, frame.AppendCancel(nil, 9)) },
		"chunk on 0":      func(m *mallory) { m.send(0, v.chunk(1, 0, 1, 4096, 100).Append(nil)) },
		"begin on 1":      func(m *mallory) { m.send(1, begin(1, 1)) },
		"listener's part": func(m *mallory) { m.send(1, frame.AppendDone(nil, 1)) },
		"hello again":     func(m *mallory) { m.send(0, frame.Hello{Streams: 1, Name: "mallory"}.Append(nil)) },
		"garbage":         func(m *mallory) { m.send(2, []byte("GET / HTTP/1.1\r\n\r\n")) },
		"long message":    func(m *mallory) { m.send(0, frame.AppendNotify(nil, make([]byte, 1001))) },
		"huge length":     func(m *mallory) { m.send(0, []byte{byte(frame.KindNotify), 0, 0, 0, 0, 0, 0xff, 0}) },
		"half a payload":  func(m *mallory) { m.send(1, v.chunk(1, 0, 1, 4096, 100).Append(nil), hundred[:50]) },
		"bad trailer": func(m *mallory) {
			m.send(1, v.chunk(1, 0, 1, 4096, 100).Append(nil), hundred, []byte{9, 9, 9, 9, 0, 0, 0, 0})
		},
		"more transfers than welcome": func(m *mallory) {
			for id := range uint64(8 + recordSlack + 1) {
				m.send(0, begin(id+1, 1))
			}
		},
		"more chunks than memory": func(m *mallory) {
			for id := range uint64(5) {
				m.send(0, frame.Begin{ID: id + 1, Chunks: frame.MaxChunks, Bytes: 1 << 30, Grant: v.write}.Append(nil))
			}
		},
		"more attached bytes": func(m *mallory) {
			for id := range uint64(3) {
				m.send(0, frame.Begin{ID: id + 1, Chunks: 1, Bytes: 1, Grant: v.write, Notif: make([]byte, 999)}.Append(nil))
			}
		},
	} {
		m := v.mallory(2)
		m.expelled = true
		attack(m)
		m.thrownOut(name)
		v.lost("mallory")
		v.unharmed()
	}
	a := v.Agent
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := len(a.mu.sessions); n != 1 {
		t.Errorf("%d sessions are left beside the honest one's", n-1)
	}
}

// Connections that say nothing, or not what they should, are bounded, and let others in.
func TestStrangers(t *testing.T) {
	v := newVictim(t, Config{})
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range 3 * strangers {
		c, err := net.Dial("tcp", v.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		switch i % 3 {
		case 1:
			_, _ = c.Write([]byte{byte(frame.KindHello), 0, 0})
		case 2:
			_, _ = c.Write([]byte{byte(frame.KindNotify), 0, 0, 0, 0, 0, 1, 0})
		}
	}
	late, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	if _, err := late.AddPeer(t.Context(), agent.PeerInfo{Offers: v.Offers()}); err != nil {
		t.Errorf("a newcomer is kept out: %v", err)
	}
	v.mu.Lock()
	n := len(v.mu.pending)
	v.mu.Unlock()
	if n > strangers {
		t.Errorf("%d strangers are kept", n)
	}
	v.unharmed()
}

// A session's key and name cannot be joined by others than its opener, nor twice.
func TestJoin(t *testing.T) {
	v := newVictim(t, Config{})
	m := v.mallory(2)
	for name, h := range map[string]frame.Hello{
		"unknown session": {Stream: 1, Streams: 2, Session: frame.Session{1}, Name: "mallory"},
		"other name":      {Stream: 1, Streams: 2, Session: m.session, Name: "eve"},
		"taken stream":    {Stream: 2, Streams: 2, Session: m.session, Name: "mallory"},
		"control again":   {Stream: 0, Streams: 2, Session: m.session, Name: "mallory"},
		"one beyond":      {Stream: 3, Streams: 3, Session: m.session, Name: "mallory"},
	} {
		nc, err := net.Dial("tcp", v.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		c, err := newConn(nc.(*net.TCPConn), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.hello(h); err == nil {
			t.Errorf("%s: welcome", name)
		}
	}
	m.send(0, frame.AppendNotify(nil, []byte("still here")))
	if n := (<-v.Events()).(agent.Notification); string(n.Msg) != "still here" {
		t.Errorf("%+v", n)
	}
	v.unharmed()
}

// Random bytes and mutated conversations, on every stream: never a crash, never a byte outside of
// the grant, never harm to another.
func FuzzSession(f *testing.F) {
	begin := frame.Begin{ID: 1, Chunks: 1, Bytes: 8, Notif: []byte("n")}.Append(nil)
	chunk := frame.Chunk{ID: 1, Chunks: 1, Ranges: []frame.Range{{Addr: 1 << 32, Len: 8}}}.Append(nil)
	f.Add(begin, append(chunk, make([]byte, 16)...))
	f.Add(frame.AppendNotify(nil, []byte("x")), frame.Fetch{ID: 2, Ranges: []frame.Range{{Addr: 4096, Len: 3}}}.Append(nil))
	f.Add(frame.AppendCancel(nil, 1), []byte{})
	f.Fuzz(func(t *testing.T, control, data []byte) {
		v := newVictim(t, Config{StallTimeout: time.Second})
		control, data = bytes.Clone(control), bytes.Clone(data)
		// What looks like a grant's place gets the real one, so that the fuzzer gets further.
		for _, b := range [][]byte{control, data} {
			if len(b) >= frame.HeaderSize+36 && b[0] == byte(frame.KindBegin) {
				copy(b[frame.HeaderSize+20:], v.write[:])
			}
			if len(b) >= frame.HeaderSize+44 && b[0] == byte(frame.KindChunk) {
				copy(b[frame.HeaderSize+16:], v.write[:])
			}
		}
		m := v.mallory(1)
		_, _ = m.conns[0].Write(control)
		_, _ = m.conns[1].Write(data)
		for _, c := range m.conns {
			_ = c.CloseWrite()
		}
		for _, c := range m.conns {
			_, _ = io.Copy(io.Discard, c.TCPConn)
		}
		v.unharmed()
	})
}
