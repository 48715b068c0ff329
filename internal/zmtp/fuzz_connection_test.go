package zmtp

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/zmtp/zmtptest"
)

func connectionSeeds(f *testing.F) {
	c := loadCaptured(f)
	f.Add(entry(f, c.StockDealerSent, 0))
	f.Add(append(entry(f, c.StockDealerSent, 0), entry(f, c.StockDealerSent, 1)...))
	f.Add(append(entry(f, c.StockRouterSent, 0), entry(f, c.StockRouterSent, 1)...))
	f.Add(append(hello(typeReq, ""), message("", "a", "b")...))
	f.Add(append(hello(typeRouter, "x"), message("", "a")...))
	f.Add([]byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"))
}

// Arbitrary bytes from a client: the Router lives on, an honest client beside it is served, Close returns.
func FuzzRouterConnection(f *testing.F) {
	connectionSeeds(f)
	f.Fuzz(func(t *testing.T, input []byte) {
		var n zmtptest.Network
		ln, err := n.Listen(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		lim := Limits{MaxFrameBytes: 1000, MaxMessageBytes: 2000, MaxFrames: 5}
		r, err := Listen(context.Background(), ln, Options{Limits: lim})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		go func() { _ = echo(r) }()
		conn, err := n.Dial(within(t), "tcp", serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		p := newRawPeer(conn)
		p.send(input)
		q, err := DialReq(within(t), n.Dial, serverAddr, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		if got, err := q.Request(within(t), []byte("honest")); err != nil || string(got[0]) != "honest" {
			t.Fatalf("honest client got %q, %v", got, err)
		}
		p.close()
	})
}

// Arbitrary bytes from a server: a Dealer or Req ends with an error or lives, and Close returns.
func FuzzClientConnection(f *testing.F) {
	connectionSeeds(f)
	f.Fuzz(func(t *testing.T, input []byte) {
		var n zmtptest.Network
		server := make(chan struct{})
		ln, err := n.Listen(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer close(server)
			for range 2 {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				p := newRawPeer(conn)
				p.send(input)
				p.close()
			}
		}()
		if d, err := DialDealer(within(t), n.Dial, serverAddr, Options{}); err == nil {
			for err == nil {
				_, err = d.Recv(within(t))
			}
			d.Close()
		}
		if q, err := DialReq(within(t), n.Dial, serverAddr, Options{}); err == nil {
			if got, err := q.Request(within(t), []byte("x")); err == nil && len(got) == 0 {
				t.Fatal("a reply without frames")
			}
			q.Close()
		}
		ln.Close()
		<-server
	})
}

func BenchmarkRequest(b *testing.B) {
	var n zmtptest.Network
	ln, err := n.Listen(serverAddr)
	if err != nil {
		b.Fatal(err)
	}
	r, err := Listen(context.Background(), ln, Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	go func() { _ = echo(r) }()
	q, err := DialReq(context.Background(), n.Dial, serverAddr, Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer q.Close()
	payload := make([]byte, 100)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := q.Request(context.Background(), payload); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	lim := Limits{}.withDefaults()
	for _, size := range []int{100, 1 << 20} {
		input := message(string(make([]byte, size)))
		b.Run(map[int]string{100: "100B", 1 << 20: "1MiB"}[size], func(b *testing.B) {
			r := newReader(&scriptConn{r: &repeated{input: input}}, &lim, time.Hour)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := r.message(nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// repeated reads its input for ever.
type repeated struct {
	input []byte
	at    int
}

func (r *repeated) Read(p []byte) (int, error) {
	if r.at == len(r.input) {
		r.at = 0
	}
	n := copy(p, r.input[r.at:])
	r.at += n
	return n, nil
}

var _ io.Reader = (*repeated)(nil)
