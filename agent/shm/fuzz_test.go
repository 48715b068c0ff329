package shm

import (
	"bytes"
	"io"
	"net"
	"os"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
)

// FuzzFrames: whatever body comes, a decoder gives an error or a value that encodes to the same
// body.
func FuzzFrames(f *testing.F) {
	w := writeFrame{transfer: 3, slot: 4, word: 5, silence: 6, bytes: 7, grant: agent.GrantID{8}, notif: []byte("note")}
	for k, b := range map[kind][]byte{
		kindHello:    hello{name: "name", control: 4096}.append(nil, kindHello),
		kindSegment:  segmentFrame{id: 1, addr: 2, length: 3}.append(nil),
		kindForget:   appendForget(nil, 9),
		kindWrite:    w.append(nil),
		kindRead:     readFrame{transfer: 3, bytes: 7, grant: agent.GrantID{8}}.append(nil),
		kindPieces:   appendPiece(append(frame(nil, kindPieces, 1+pieceBytes), 1), wirePiece{1, 2, 3}),
		kindCancel:   appendTransfer(nil, kindCancel, 5),
		kindRefused:  appendRefused(nil, 5, "why"),
		kindReadable: readableFrame{transfer: 3, slot: 4, word: 5, staged: 6}.append(nil),
	} {
		f.Add(byte(k), b[headerBytes:])
		f.Add(byte(k), b[headerBytes:len(b)-1])
	}
	f.Fuzz(func(t *testing.T, k byte, body []byte) {
		if len(body) > maxBody(kind(k), 1<<10) {
			return
		}
		again, err := recode(kind(k), body)
		if err == nil && !bytes.Equal(again[headerBytes:], body) {
			t.Errorf("kind %d: %x comes back as %x", k, body, again[headerBytes:])
		}
	})
}

// recode decodes a body and encodes what it says.
func recode(k kind, body []byte) ([]byte, error) {
	switch k {
	case kindHello, kindWelcome:
		h, err := decodeHello(body)
		return h.append(nil, k), err
	case kindSegment:
		s, err := decodeSegment(body)
		return s.append(nil), err
	case kindForget:
		id, err := decodeForget(body)
		return appendForget(nil, id), err
	case kindWrite:
		w, err := decodeWrite(body)
		return w.append(nil), err
	case kindRead:
		r, err := decodeRead(body)
		return r.append(nil), err
	case kindPieces:
		last, pieces, n, err := decodePieces(body)
		if err != nil {
			return nil, err
		}
		b := append(frame(nil, k, len(body)), 0)
		if last {
			b[headerBytes] = 1
		}
		for p := range pieces {
			b = appendPiece(b, p)
			n--
		}
		if n != 0 {
			panic("the count of pieces is wrong")
		}
		return b, nil
	case kindCancel, kindReadEnd, kindDone:
		id, err := decodeTransfer(body)
		return appendTransfer(nil, k, id), err
	case kindRefused:
		id, text, err := decodeRefused(body)
		return appendRefused(nil, id, text), err
	case kindReadable:
		r, err := decodeReadable(body)
		return r.append(nil), err
	}
	return nil, errMalformed
}

// FuzzOffer: an offer is refused, or it is the one that its encoding says.
func FuzzOffer(f *testing.F) {
	f.Add(offer{host: hostID{1}, name: "name", socket: "socket"}.encode())
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := decodeOffer(b)
		if err == nil && !bytes.Equal(o.encode(), b) {
			t.Errorf("%x comes back as %x", b, o.encode())
		}
	})
}

// FuzzReceiver: a stream of bytes in parts gives frames within their bounds and then an error, and
// leaves no descriptor open.
func FuzzReceiver(f *testing.F) {
	f.Add(appendTransfer(appendForget(nil, 9), kindCancel, 5), byte(3), byte(1))
	f.Add(frame(nil, kindNotify, 1<<30), byte(1), byte(9))
	f.Add([]byte{}, byte(0), byte(20))
	f.Fuzz(func(t *testing.T, stream []byte, part, files byte) {
		a, b := socketPair(t)
		defer a.Close()
		go func() {
			defer b.Close()
			if n := int(files) % 30; n > 0 {
				_, _, _ = b.WriteMsgUnix([]byte{0}, unix.UnixRights(make([]int, n)...), nil)
			}
			for step := int(part) + 1; len(stream) > 0; {
				n := min(step, len(stream))
				if _, err := b.Write(stream[:n]); err != nil {
					return
				}
				stream = stream[n:]
			}
		}()
		r := newReceiver(a, 1<<10)
		for {
			k, body, err := r.next()
			if err != nil {
				break
			}
			if len(body) > maxBody(k, 1<<10) || len(r.fds) > maxFDs {
				t.Errorf("kind %d: %d bytes, %d descriptors", k, len(body), len(r.fds))
			}
		}
		r.release()
		_, _ = io.Copy(io.Discard, a)
	})
}

func socketPair(t testing.TB) (a, b *net.UnixConn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	conn := func(fd int) *net.UnixConn {
		file := os.NewFile(uintptr(fd), "")
		defer file.Close()
		c, err := net.FileConn(file)
		must(t, err)
		return c.(*net.UnixConn)
	}
	return conn(fds[0]), conn(fds[1])
}

// An offer names the agent and its host.
func TestOfferNamesThisHost(t *testing.T) {
	a := newAgent(t, Config{Name: "somebody"})
	defer a.Close()
	o, err := decodeOffer(a.Offers()[0].Blob)
	must(t, err)
	if o.name != "somebody" || !SameHost(a.Offers()[0]) {
		t.Errorf("offer says %+v", o)
	}
	other := o
	other.host[3]++
	if SameHost(agent.Offer{Transport: Transport, Blob: other.encode()}) || SameHost(agent.Offer{Transport: "tcp", Blob: a.offer}) {
		t.Error("another host is taken for this one")
	}
	if !reflect.DeepEqual(a.Offers(), a.Offers()) {
		t.Error("offers change")
	}
	if _, err := New(Config{Name: "two words"}); err == nil {
		t.Error("a name with a blank is accepted")
	}
}
