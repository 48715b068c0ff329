package tcp

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
	"github.com/kvferry/kvferry/kv"
)

// liar is a listener that welcomes one poster with one data stream and then says what a test wants.
type liar struct {
	t     *testing.T
	l     net.Listener
	conns chan *conn
}

func newLiar(t *testing.T) *liar { return newLiarOf(t, 10) }

// newLiarOf permits so many transfers.
func newLiarOf(t *testing.T, transfers int) *liar {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	x := &liar{t: t, l: l, conns: make(chan *conn, 2)}
	t.Cleanup(func() { l.Close() })
	go func() {
		for range 2 {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			c, err := newConn(nc.(*net.TCPConn), time.Minute)
			if err != nil {
				return
			}
			if _, _, err := c.next(); err != nil {
				return
			}
			_, _ = c.Write(frame.Welcome{Transfers: transfers, Notif: 1000, NotifBytes: 10000, Name: "liar"}.Append(nil))
			x.conns <- c
		}
	}()
	return x
}

// A listener that permits no transfer is not admitted: a WRITE to it would wait for ever.
func TestWelcomeWithoutTransfers(t *testing.T) {
	x := newLiarOf(t, 0)
	p, err := New(Config{Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	o := offer{name: "liar", addrs: []string{x.l.Addr().String()}}
	_, err = p.AddPeer(t.Context(), agent.PeerInfo{Offers: []agent.Offer{{Transport: Transport, Blob: o.encode()}}})
	if err == nil || !strings.Contains(err.Error(), "permits no transfers") {
		t.Errorf("admitted: %v", err)
	}
}

// A listener that lies loses its link, and the transfer ends without success.
func TestLyingListener(t *testing.T) {
	const size = 64
	read := func(c *conn, want frame.Kind) []byte {
		kind, body, err := c.next()
		if err != nil || kind != want {
			return nil
		}
		return body
	}
	for name, c := range map[string]struct {
		op      agent.Op
		say     func(control, data *conn)
		outcome agent.Outcome
	}{
		"done before anything": {agent.Write, func(control, _ *conn) {
			read(control, frame.KindBegin)
			_, _ = control.Write(frame.AppendDone(nil, 1)) // wire id 1 is the first transfer's
		}, agent.OutcomePeerLost},
		"ack of a chunk twice": {agent.Write, func(_, data *conn) {
			read(data, frame.KindChunk)
			_, _ = data.Write(frame.AppendAck(frame.AppendAck(nil, 1, 0), 1, 0))
		}, agent.OutcomePeerLost},
		"ack of no chunk": {agent.Write, func(_, data *conn) {
			_, _ = data.Write(frame.AppendAck(nil, 1, 1<<30))
		}, agent.OutcomePeerLost},
		"cancelled unasked": {agent.Write, func(control, _ *conn) {
			read(control, frame.KindBegin)
			_, _ = control.Write(frame.AppendCancelled(nil, 1))
		}, agent.OutcomePeerLost},
		"done for a read": {agent.Read, func(_, data *conn) {
			read(data, frame.KindFetch)
			_, _ = data.Write(frame.AppendDone(nil, 1))
		}, agent.OutcomePeerLost},
		"data of another length": {agent.Read, func(_, data *conn) {
			read(data, frame.KindFetch)
			_, _ = data.Write(frame.Data{ID: 1, Bytes: size + 1}.Append(nil))
		}, agent.OutcomePeerLost},
		"data of another transfer": {agent.Read, func(_, data *conn) {
			read(data, frame.KindFetch)
			_, _ = data.Write(frame.Data{ID: 2, Bytes: size}.Append(nil))
		}, agent.OutcomePeerLost},
		"data on the control stream": {agent.Read, func(control, data *conn) {
			read(data, frame.KindFetch)
			_, _ = control.Write(frame.Data{ID: 1, Bytes: size}.Append(nil))
		}, agent.OutcomePeerLost},
		"data with a wrong sum": {agent.Read, func(_, data *conn) {
			read(data, frame.KindFetch)
			_, _ = data.Write(frame.Data{ID: 1, Bytes: size}.Append(nil))
			_, _ = data.Write(make([]byte, size))
			_, _ = data.Write(frame.Trailer{CRC: 1}.Append(nil))
		}, agent.OutcomeFailed},
		"abandoned data": {agent.Read, func(_, data *conn) {
			read(data, frame.KindFetch)
			_, _ = data.Write(frame.Data{ID: 1, Bytes: size}.Append(nil))
			_, _ = data.Write(make([]byte, size))
			_, _ = data.Write(frame.Trailer{Abandoned: true}.Append(nil))
		}, agent.OutcomeFailed},
		"half of the data": {agent.Read, func(_, data *conn) {
			read(data, frame.KindFetch)
			_, _ = data.Write(frame.Data{ID: 1, Bytes: size}.Append(nil))
			_, _ = data.Write(make([]byte, size/2))
			_ = data.CloseWrite()
		}, agent.OutcomePeerLost},
		"garbage":   {agent.Read, func(c, _ *conn) { _, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n")) }, agent.OutcomePeerLost},
		"a bye":     {agent.Write, func(c, _ *conn) { _, _ = c.Write(frame.AppendBye(nil, "so long")) }, agent.OutcomePeerLost},
		"a refusal": {agent.Write, func(c, _ *conn) { _, _ = c.Write(frame.Refused{ID: 1, Text: "no"}.Append(nil)) }, agent.OutcomeFailed},
	} {
		x := newLiar(t)
		size := size
		if name == "done before anything" {
			size = 64 << 20 // more than the kernel takes, so that it cannot have been sent
		}
		p, err := New(Config{Streams: 1})
		if err != nil {
			t.Fatal(err)
		}
		m, _ := p.Alloc(size)
		peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: []agent.Offer{
			{Transport: Transport, Blob: offer{"liar", []string{x.l.Addr().String()}}.encode()},
		}})
		if err != nil {
			t.Fatal(err)
		}
		control, data := <-x.conns, <-x.conns
		one := []kv.Descriptor{{Addr: m.Addr(), Length: uint64(size)}}
		local, _ := p.Prepare(agent.Local, one)
		remote, _ := p.Prepare(peer.ID, one)
		tr := agent.Transfer{Op: c.op, Local: local, Remote: remote, LocalIdx: []uint32{0}, RemoteIdx: []uint32{0}, Silence: time.Minute}
		if _, err := p.Post(tr); err != nil {
			t.Fatal(err)
		}
		c.say(control, data)
		r := (<-p.Events()).(agent.Result)
		if r.Outcome != c.outcome {
			t.Errorf("%s: %v (%v)", name, r.Outcome, r.Err)
		}
		if _, ok := (<-p.Events()).(agent.Stopped); !ok {
			t.Errorf("%s: no Stopped", name)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		control.Close()
		data.Close()
	}
}

// Another process on a peer's old address is not taken for the peer.
func TestWrongName(t *testing.T) {
	x := newLiar(t)
	p, err := New(Config{Streams: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	_, err = p.AddPeer(t.Context(), agent.PeerInfo{Offers: []agent.Offer{
		{Transport: Transport, Blob: offer{"somebody", []string{x.l.Addr().String()}}.encode()},
	}})
	var pe *agent.PeerError
	if !errors.As(err, &pe) || pe.Phase != "hello" || pe.Peer != "somebody" {
		t.Errorf("%v", err)
	}
	(<-x.conns).Close()
}

// A listener that accepts and says nothing costs its own admission only, for the handshake timeout.
func TestMuteListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p, err := New(Config{HandshakeTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	d, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	// The second address serves.
	o := offer{d.Name(), []string{l.Addr().String(), d.Addr().String()}}
	peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: []agent.Offer{{Transport: Transport, Blob: o.encode()}}})
	if err != nil || peer.ID.Name != d.Name() {
		t.Errorf("%+v, %v", peer, err)
	}
}

// What a peer has sent before it removes us is delivered before its loss, whichever of its streams
// ends first.
func TestLastWords(t *testing.T) {
	for range 30 {
		p, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		d, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()})
		if err != nil {
			t.Fatal(err)
		}
		const n = 100
		for range n {
			if err := p.Notify(peer.ID, []byte("last words")); err != nil {
				t.Fatal(err)
			}
		}
		l := p.peer(peer.ID)
		for sent := false; !sent; {
			l.mu.Lock()
			sent = l.mu.sayCount == 0
			l.mu.Unlock()
		}
		p.RemovePeer(peer.ID)
		for i := range n {
			if ev, ok := (<-d.Events()).(agent.Notification); !ok {
				t.Fatalf("event %d is %+v", i, ev)
			}
		}
		if _, ok := (<-d.Events()).(agent.PeerLost); !ok {
			t.Fatal("the loss is not told")
		}
		p.Close()
		d.Close()
	}
}
