package shm

import (
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// socketOf is where an agent listens.
func socketOf(t testing.TB, a *Agent) string {
	t.Helper()
	o, err := decodeOffer(a.offer)
	must(t, err)
	return o.socket
}

func dialRaw(t testing.TB, a *Agent) *net.UnixConn {
	t.Helper()
	sock, err := dial(context.Background(), socketOf(t, a))
	must(t, err)
	return sock
}

// stranger is a connection on which a test says what it likes after a proper hello.
type stranger struct {
	t    testing.TB
	sock *net.UnixConn
	in   *receiver
	page *control
}

func newStranger(t testing.TB, a *Agent, name agent.Name) *stranger {
	t.Helper()
	page, err := newControl(16)
	must(t, err)
	s := &stranger{t: t, sock: dialRaw(t, a), page: page}
	s.in = newReceiver(s.sock, 1<<20)
	must(t, sendFD(s.sock, hello{name: name, control: uint64(len(page.seg.Bytes()))}.append(nil, kindHello), page.seg.FD()))
	_, theirs, err := receiveHello(s.in, kindWelcome)
	must(t, err)
	theirs.drop()
	return s
}

// gone waits until the agent has hung up. The stranger goes on reading what it says.
func (s *stranger) gone(what string) {
	s.t.Helper()
	must(s.t, s.sock.SetReadDeadline(time.Now().Add(patience)))
	if _, err := io.Copy(io.Discard, s.sock); err != nil {
		if ne, ok := err.(net.Error); ok && ne.Timeout() {
			s.t.Fatalf("%s: the agent does not hang up", what)
		}
	}
	s.close()
}

func (s *stranger) close() {
	_ = s.sock.Close()
	s.in.release()
	_ = s.page.seg.Unmap()
}

func (s *stranger) send(b []byte) { _, _ = s.sock.Write(b) }

// bystanders are two honest agents, one of which is under attack.
type bystanders struct {
	t        testing.TB
	p, d     *Agent
	dm       agent.Memory
	transfer agent.Transfer
}

func newBystanders(t testing.TB) *bystanders {
	b := &bystanders{t: t, p: newAgent(t, Config{}), d: newAgent(t, Config{})}
	t.Cleanup(func() { b.p.Close(); b.d.Close() })
	pm, err := b.p.Alloc(1 << 20)
	must(t, err)
	b.dm, err = b.d.Alloc(1 << 20)
	must(t, err)
	peer, err := b.p.AddPeer(context.Background(), agent.PeerInfo{Offers: b.d.Offers()})
	must(t, err)
	whole := []kv.Descriptor{{Addr: b.dm.Addr(), Length: 1 << 20}}
	b.transfer = agent.Transfer{LocalIdx: []uint32{0}, RemoteIdx: []uint32{0}, Silence: time.Minute}
	b.transfer.Local, err = b.p.Prepare(agent.Local, []kv.Descriptor{{Addr: pm.Addr(), Length: 1 << 20}})
	must(t, err)
	b.transfer.Remote, err = b.p.Prepare(peer.ID, whole)
	must(t, err)
	b.transfer.Grant, err = b.d.Grant(agent.GrantSpec{Peer: b.p.Name(), Ranges: whole})
	must(t, err)
	go func() {
		for range b.d.Events() {
		}
	}()
	return b
}

// check does one honest transfer.
func (b *bystanders) check(what string) {
	b.t.Helper()
	_, err := b.p.Post(b.transfer)
	must(b.t, err)
	r := next[agent.Result](collector{b.t, b.p.Events()})
	if r.Outcome != agent.OutcomeDone {
		b.t.Fatalf("after %s: %v (%v)", what, r.Outcome, r.Err)
	}
	next[agent.Stopped](collector{b.t, b.p.Events()})
}

// Whatever a peer says that is not right costs it its connection, and nobody else anything.
func TestHostileFrames(t *testing.T) {
	b := newBystanders(t)
	b.check("the start")
	fds, maps := fdsOf(t), mapsOf(t)
	huge := binary.LittleEndian.AppendUint32(nil, 1<<31)
	write := writeFrame{transfer: 1, word: 1, silence: 1, bytes: 10}
	pieces := func(last byte, list ...wirePiece) []byte {
		f := append(frame(nil, kindPieces, 1+len(list)*pieceBytes), last)
		for _, p := range list {
			f = appendPiece(f, p)
		}
		return f
	}
	for name, say := range map[string]func(s *stranger){
		"an unknown kind":       func(s *stranger) { s.send(frame(nil, 99, 0)) },
		"kind 0":                func(s *stranger) { s.send(frame(nil, 0, 0)) },
		"a huge length":         func(s *stranger) { s.send(append(huge, byte(kindNotify))) },
		"a giver's frame":       func(s *stranger) { s.send(appendTransfer(nil, kindDone, 1)) },
		"a second hello":        func(s *stranger) { s.send(hello{name: "x", control: 8}.append(nil, kindHello)) },
		"an empty notification": func(s *stranger) { s.send(frame(nil, kindNotify, 0)) },
		"pieces of nothing":     func(s *stranger) { s.send(pieces(1, wirePiece{1, 1, 1})) },
		"no pieces":             func(s *stranger) { s.send(append(write.append(nil), pieces(1)...)) },
		"too few bytes":         func(s *stranger) { s.send(append(write.append(nil), pieces(1, wirePiece{1, 1, 9})...)) },
		"too many bytes":        func(s *stranger) { s.send(append(write.append(nil), pieces(1, wirePiece{1, 1, 11})...)) },
		"an overflowing sum": func(s *stranger) {
			s.send(append(write.append(nil), pieces(1, wirePiece{1, 1, 5}, wirePiece{1, 1, 1<<64 - 1})...))
		},
		"an empty piece":             func(s *stranger) { s.send(append(write.append(nil), pieces(0, wirePiece{1, 1, 0})...)) },
		"two at once":                func(s *stranger) { s.send(write.append(write.append(nil))) },
		"no word":                    func(s *stranger) { s.send(writeFrame{transfer: 1, slot: 1 << 30, silence: 1, bytes: 1}.append(nil)) },
		"transfer 0":                 func(s *stranger) { s.send(writeFrame{silence: 1, bytes: 1}.append(nil)) },
		"a segment without file":     func(s *stranger) { s.send(segmentFrame{id: 1, addr: 4096, length: 4096}.append(nil)) },
		"a segment at the end":       func(s *stranger) { s.send(segmentFrame{id: 1, addr: 1<<64 - 1, length: 4096}.append(nil)) },
		"an unknown segment's end":   func(s *stranger) { s.send(appendForget(nil, 7)) },
		"a truncated body":           func(s *stranger) { s.send(frame(nil, kindCancel, 3)); s.send([]byte{1, 2, 3}) },
		"an unsealed segment":        func(s *stranger) { s.segment(memfd(t, 0, 0)) },
		"files without frames":       func(s *stranger) { s.files(8) },
		"more files than a frame":    func(s *stranger) { s.files(40) },
		"half a frame, then nothing": func(s *stranger) { s.send(write.append(nil)[:20]); _ = s.sock.CloseWrite() },
	} {
		s := newStranger(t, b.d, "stranger")
		say(s)
		s.gone(name)
		b.check(name)
	}
	settled(t, "mappings", func() bool { return mapsOf(t) == maps })
	settled(t, "descriptors", func() bool { return fdsOf(t) == fds })
}

// segment tells of a memory file, and closes it here.
func (s *stranger) segment(fd int) {
	_ = sendFD(s.sock, segmentFrame{id: 1, addr: 1 << 20, length: 8192}.append(nil), fd)
	unix.Close(fd)
}

// files sends descriptors that nothing asks for.
func (s *stranger) files(n int) {
	fd := memfd(s.t, 0, wantSeals)
	defer unix.Close(fd)
	var fds []int
	for range n {
		fds = append(fds, fd)
	}
	_, _, _ = s.sock.WriteMsgUnix(appendTransfer(nil, kindCancel, 1), unix.UnixRights(fds...), nil)
}

// Requests that are well formed but not allowed are refused, and the connection lives.
func TestRefusedPolitely(t *testing.T) {
	b := newBystanders(t)
	s := newStranger(t, b.d, b.p.Name()) // it has even stolen the name
	defer s.close()
	slot, word, _ := s.page.begin()
	s.segment(memfd(t, 0, wantSeals))
	before := append([]byte(nil), b.dm.Bytes()...)
	for name, c := range map[string]struct {
		grant    agent.GrantID
		src, dst uint64
	}{
		"no grant":                {agent.GrantID{1}, 1 << 20, b.dm.Addr()},
		"outside of the grant":    {b.transfer.Grant, 1 << 20, b.dm.Addr() + 1<<20 - 5},
		"a source not shared":     {b.transfer.Grant, 1 << 30, b.dm.Addr()},
		"a source beyond its end": {b.transfer.Grant, 1<<20 + 8190, b.dm.Addr()},
	} {
		f := writeFrame{transfer: 5, slot: slot, word: word, silence: 1e9, bytes: 10, grant: c.grant, notif: []byte("n")}.append(nil)
		f = append(frame(f, kindPieces, 1+pieceBytes), 1)
		s.send(appendPiece(f, wirePiece{src: c.src, dst: c.dst, n: 10}))
		k, body, err := s.in.next()
		must(t, err)
		id, text, err := decodeRefused(body)
		if k != kindRefused || err != nil || id != 5 || text == "" {
			t.Errorf("%s: answered with kind %d, %v", name, k, err)
		}
	}
	for i, c := range b.dm.Bytes() {
		if c != before[i] {
			t.Fatalf("byte %d was written", i)
		}
	}
	b.check("refusals")
}

// A word that changes between doorbell and copy makes the transfer fail, and its notification does
// not come.
func TestChangedWordIsNotDone(t *testing.T) {
	d := newAgent(t, Config{})
	defer d.Close()
	dm, err := d.Alloc(8192)
	must(t, err)
	s := newStranger(t, d, "stranger")
	defer s.close()
	g, err := d.Grant(agent.GrantSpec{Peer: "stranger", Ranges: []kv.Descriptor{{Addr: dm.Addr(), Length: 8192}}})
	must(t, err)
	slot, word, _ := s.page.begin()
	s.segment(memfd(t, 0, wantSeals))
	for i, want := range []kind{kindDone, kindRefused} {
		f := writeFrame{transfer: agent.TransferID(i + 1), slot: slot, word: word, silence: 1e9, bytes: 8192, grant: g, notif: []byte{byte('0' + i)}}.append(nil)
		f = append(frame(f, kindPieces, 1+pieceBytes), 1)
		s.send(appendPiece(f, wirePiece{src: 1 << 20, dst: dm.Addr(), n: 8192}))
		k, _, err := s.in.next()
		must(t, err)
		if k != want {
			t.Errorf("transfer %d is answered with kind %d, want %d", i, k, want)
		}
		s.page.end(slot)
	}
	note := append(frame(nil, kindNotify, 3), "end"...)
	s.send(note)
	evs := collector{t, d.Events()}
	if n := next[agent.Notification](evs); string(n.Msg) != "0" || n.Arrival == nil {
		t.Errorf("notified of %q", n.Msg)
	}
	if n := next[agent.Notification](evs); string(n.Msg) != "end" {
		t.Errorf("notified of %q", n.Msg)
	}
}

// Random bytes, before and after the hello, from many at once.
func TestRandomBytes(t *testing.T) {
	b := newBystanders(t)
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 60 {
		junk := make([]byte, r.IntN(3000))
		for k := range junk {
			junk[k] = byte(r.Uint32())
		}
		if i%2 == 0 {
			sock := dialRaw(t, b.d)
			_, _ = sock.Write(junk)
			_ = sock.Close()
			continue
		}
		s := newStranger(t, b.d, "stranger")
		if len(junk) > 5 { // so that it gets beyond the header
			binary.LittleEndian.PutUint32(junk, uint32(r.IntN(64)))
			junk[4] = byte(1 + r.IntN(int(kindEnd)))
		}
		s.send(junk)
		s.close()
	}
	b.check("random bytes")
}

// Thousands of connections that say nothing keep nobody out, and do not stay.
func TestManySilentConnections(t *testing.T) {
	b := newBystanders(t)
	var socks []*net.UnixConn
	defer func() {
		for _, s := range socks {
			_ = s.Close()
		}
	}()
	for range 1500 {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		sock, err := dial(ctx, socketOf(t, b.d))
		cancel()
		must(t, err)
		socks = append(socks, sock)
	}
	b.check("silent connections")
	e := newAgent(t, Config{})
	defer e.Close()
	_, err := e.AddPeer(t.Context(), agent.PeerInfo{Offers: b.d.Offers()})
	must(t, err)
	b.d.mu.Lock()
	n := len(b.d.mu.greeting)
	b.d.mu.Unlock()
	if n > maxGreeting {
		t.Errorf("%d connections are in their hello", n)
	}
}

// A giver that is slow, but copies, shows it: before a WRITE of many slices is done, its poster hears
// that bytes move.
func TestProgressIsTold(t *testing.T) {
	d := newAgent(t, Config{})
	defer d.Close()
	dm, err := d.Alloc(1 << 20)
	must(t, err)
	s := newStranger(t, d, "stranger")
	defer s.close()
	g, err := d.Grant(agent.GrantSpec{Peer: "stranger", Ranges: []kv.Descriptor{{Addr: dm.Addr(), Length: 1 << 20}}})
	must(t, err)
	slot, word, _ := s.page.begin()
	src, err := mapOwn(1 << 20)
	must(t, err)
	defer src.Unmap()
	must(t, sendFD(s.sock, segmentFrame{id: 1, addr: 1 << 20, length: 1 << 20}.append(nil), src.FD()))
	f := writeFrame{transfer: 1, slot: slot, word: word, silence: 1, bytes: 1 << 20, grant: g}.append(nil)
	f = append(frame(f, kindPieces, 1+pieceBytes), 1)
	s.send(appendPiece(f, wirePiece{src: 1 << 20, dst: dm.Addr(), n: 1 << 20}))
	for progress := 0; ; progress++ {
		k, _, err := s.in.next()
		must(t, err)
		if k == kindDone && progress > 0 {
			return
		}
		if k != kindProgress {
			t.Fatalf("kind %d after %d tellings of progress", k, progress)
		}
	}
}
