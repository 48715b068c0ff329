package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/internal/zmtp/zmtptest"
)

func dialReq(t testing.TB, g *rig) *Req {
	t.Helper()
	q, err := DialReq(context.Background(), g.net.Dial, serverAddr, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func dialDealer(t testing.TB, g *rig, opts Options) *Dealer {
	t.Helper()
	d, err := DialDealer(context.Background(), g.net.Dial, serverAddr, opts)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestRequestReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		go func() { _ = echo(g.r) }()
		q := dialReq(t, g)
		defer q.Close()
		for _, want := range shapes() {
			got, err := q.Request(context.Background(), want...)
			if err != nil || !sameFrames(got, want) {
				t.Fatalf("got %d frames, %v", len(got), err)
			}
		}
		_, err := q.Request(context.Background())
		wantError(t, err, ErrNoFrames)
		wantError(t, g.r.Send(Peer{Identity: "nobody"}, []byte("x")), ErrUnknownPeer)
		wantError(t, g.r.Send(Peer{Identity: "nobody"}), ErrNoFrames)
	})
}

// Many callers of one Req wait for each other and each gets its own reply.
func TestRequestsAlternate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		go func() { _ = echo(g.r) }()
		q := dialReq(t, g)
		defer q.Close()
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				want := fmt.Sprint("request ", i)
				got, err := q.Request(context.Background(), []byte(want))
				if err != nil || len(got) != 1 || string(got[0]) != want {
					t.Errorf("got %q, %v", got, err)
				}
			})
		}
		all.Wait()
	})
}

// A request given up closes the socket: its reply must not be taken for another's.
func TestRequestGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		q := dialReq(t, g)
		defer q.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		begun := time.Now()
		_, err := q.Request(ctx, []byte("slow"))
		wantError(t, err, context.DeadlineExceeded)
		if took := time.Since(begun); took != 5*time.Second {
			t.Errorf("gave up after %v", took)
		}
		_, err = q.Request(context.Background(), []byte("next"))
		wantError(t, err, ErrAbandoned)
		wantError(t, q.Err(), ErrAbandoned)
		g.wantEnd(io.EOF)
	})
}

// A context that is over before the request leaves the socket good.
func TestRequestNotBegun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		go func() { _ = echo(g.r) }()
		q := dialReq(t, g)
		defer q.Close()
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, err := q.Request(ctx, []byte("x"))
		wantError(t, err, context.Canceled)
		if _, err = q.Request(context.Background(), []byte("x")); err != nil {
			t.Error(err)
		}
	})
}

func TestBadReplies(t *testing.T) {
	for name, reply := range map[string][]byte{
		"no delimiter":   message("reply", "x"),
		"only delimiter": message(""),
		"two replies":    append(message("", "one"), message("", "two")...),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &rig{t: t}
				server := serveRaw(t, &g.net, hello(typeRouter, ""))
				q := dialReq(t, g)
				defer q.Close()
				p := <-server
				defer p.close()
				got := make(chan error, 1)
				go func() {
					_, err := q.Request(context.Background(), []byte("x"))
					got <- err
				}()
				synctest.Wait()
				p.send(reply)
				err := <-got
				if name == "two replies" {
					if err != nil {
						t.Errorf("the first reply: %v", err)
					}
				} else {
					wantError(t, err, ErrProtocol)
				}
				synctest.Wait()
				_, err = q.Request(context.Background(), []byte("x"))
				wantError(t, err, ErrProtocol)
			})
		})
	}
}

func TestDialFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n zmtptest.Network
		_, err := DialReq(context.Background(), n.Dial, serverAddr, Options{})
		var op *net.OpError
		if !errors.As(err, &op) {
			t.Errorf("nobody listens: %v", err)
		}
		_, err = DialDealer(context.Background(), n.Dial, serverAddr, Options{Identity: "\x00"})
		if err == nil || !strings.Contains(err.Error(), "zero byte") {
			t.Errorf("bad identity: %v", err)
		}
		_, err = DialDealer(context.Background(), n.Dial, serverAddr, Options{Limits: Limits{MaxFrames: -1}})
		if err == nil || !strings.Contains(err.Error(), "MaxFrames") {
			t.Errorf("bad limit: %v", err)
		}

		ln, err := n.Listen(serverAddr) // accepts nothing
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		_, err = DialReq(context.Background(), n.Dial, serverAddr, Options{})
		wantError(t, err, ErrTimeout)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err = DialReq(ctx, n.Dial, serverAddr, Options{})
		wantError(t, err, context.DeadlineExceeded)
		if took := time.Since(begun); took != DefaultHandshakeTimeout+time.Second {
			t.Errorf("took %v", took)
		}
		ln.Close()
	})
}

// A server that accepts and says nothing: the handshake timeout ends it, or the context, whichever is first.
func TestDialMuteServer(t *testing.T) {
	for _, limit := range []time.Duration{time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			g := &rig{t: t}
			server := serveRaw(t, &g.net, nil)
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			defer cancel()
			begun := time.Now()
			_, err := DialReq(ctx, g.net.Dial, serverAddr, Options{})
			want, after := context.DeadlineExceeded, limit
			if limit > DefaultHandshakeTimeout {
				want, after = ErrTimeout, DefaultHandshakeTimeout
			}
			wantError(t, err, want)
			if took := time.Since(begun); took != after {
				t.Errorf("took %v, want %v", took, after)
			}
			(<-server).close()
		})
	}
}

func TestDealerTalksToRouter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		d := dialDealer(t, g, Options{Identity: "host:1"})
		for _, want := range shapes() {
			if err := d.Send(context.Background(), want...); err != nil {
				t.Fatal(err)
			}
			m, err := g.r.Recv(context.Background())
			if err != nil || m.Identity != "host:1" || m.Generation != 1 || !sameFrames(m.Frames, want) {
				t.Fatalf("received %d frames from %v, %v", len(m.Frames), m.Peer, err)
			}
		}
		if err := g.r.Send(Peer{Identity: "host:1"}, []byte("a"), []byte("b")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if !g.r.Drop(Peer{Identity: "host:1"}) || g.r.Drop(Peer{Identity: "host:2"}) {
			t.Error("Drop does not tell who was there")
		}
		<-d.Done()
		got, err := d.Recv(context.Background())
		if err != nil || !sameFrames(got, [][]byte{[]byte("a"), []byte("b")}) {
			t.Errorf("before the end came %q, %v", got, err)
		}
		_, err = d.Recv(context.Background())
		wantError(t, err, io.EOF)
		wantError(t, d.Err(), io.EOF)
		wantError(t, d.Send(context.Background(), []byte("x")), io.EOF)
		d.Close()
		g.wantEnd(ErrClosed)
	})
}

// What a closed connection had sent is still received; the name is free for the next generation.
func TestGenerations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		for generation := uint64(1); generation <= 3; generation++ {
			d := dialDealer(t, g, Options{Identity: "same"})
			for range 3 {
				if err := d.Send(context.Background(), fmt.Append(nil, generation)); err != nil {
					t.Fatal(err)
				}
			}
			if err := d.Shutdown(context.Background()); err != nil {
				t.Fatal(err)
			}
			wantError(t, d.Send(context.Background(), []byte("late")), ErrClosed)
			g.wantEnd(io.EOF)
		}
		counts := make(map[uint64]int)
		for range 9 {
			m, err := g.r.Recv(context.Background())
			if err != nil || string(m.Frames[0]) != fmt.Sprint(m.Generation) {
				t.Fatalf("received %q of %v, %v", m.Frames, m.Peer, err)
			}
			counts[m.Generation]++
		}
		if counts[1] != 3 || counts[2] != 3 || counts[3] != 3 {
			t.Errorf("messages by generation: %v", counts)
		}
		d := dialDealer(t, g, Options{Identity: "same"})
		defer d.Close()
		wantError(t, g.r.Send(Peer{"same", 3}, []byte("x")), ErrUnknownPeer)
		if err := g.r.Send(Peer{"same", 4}, []byte("x")); err != nil {
			t.Error(err)
		}
		g.r.tenants.mu.Lock()
		if n, held := len(g.r.tenants.mu.all), g.r.tenants.mu.held; n != 1 || held != 0 {
			t.Errorf("%d places, %d bytes are still taken", n, held)
		}
		g.r.tenants.mu.Unlock()
	})
}

// The newest of two connections with one identity is refused, after a moment for the older one to end.
func TestDuplicateIdentity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		first := dialDealer(t, g, Options{Identity: "same"})
		begun := time.Now()
		_, err := DialDealer(context.Background(), g.net.Dial, serverAddr, Options{Identity: "same"})
		wantError(t, err, io.ErrUnexpectedEOF)
		if took := time.Since(begun); took != duplicateGrace {
			t.Errorf("refused after %v", took)
		}
		if e := g.wantEnd(ErrIdentityInUse); e.peer != (Peer{}) {
			t.Errorf("a refused connection is reported as %v", e.peer)
		}
		if err := first.Send(context.Background(), []byte("mine")); err != nil {
			t.Fatal(err)
		}
		g.wantRecv("same", "mine")

		time.AfterFunc(duplicateGrace/2, func() { first.Close() })
		begun = time.Now()
		second := dialDealer(t, g, Options{Identity: "same"})
		defer second.Close()
		if took := time.Since(begun); took != duplicateGrace/2 {
			t.Errorf("took over after %v", took)
		}
		synctest.Wait()
	})
}

func TestDealerBackPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n zmtptest.Network
		ln, err := n.Listen(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		conns := make(chan net.Conn, 1)
		go func() {
			defer ln.Close()
			conn, _ := ln.Accept()
			skip := make([]byte, len(hello(typeDealer, "")))
			go conn.Write(hello(typeRouter, ""))
			_, _ = io.ReadFull(conn, skip)
			conns <- conn
		}()
		d, err := DialDealer(context.Background(), n.Dial, serverAddr, Options{Limits: Limits{SendMessages: 5}})
		if err != nil {
			t.Fatal(err)
		}
		conn := <-conns // reads nothing from here on
		defer conn.Close()
		sent := 0
		for ; ; sent++ {
			synctest.Wait()
			if err = d.TrySend([]byte("x")); err != nil {
				break
			}
		}
		wantError(t, err, ErrQueueFull)
		if sent != 6 { // one is with the writer
			t.Errorf("%d messages were taken", sent)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		wantError(t, d.Send(ctx, []byte("x")), context.DeadlineExceeded)
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() {
				if err := d.Send(context.Background(), []byte("x")); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		p := newRawPeer(conn)
		waiting.Wait()
		synctest.Wait()
		if got := len(p.got()) / 3; got != 9 {
			t.Errorf("%d messages came, 9 were sent", got)
		}
		d.Close()
		p.close()
	})
}

// Heartbeats: PING at each interval; answers keep the link, silence ends it after Every+Timeout.
func TestHeartbeat(t *testing.T) {
	opts := Options{Heartbeat: Heartbeat{Every: 2 * time.Second, Timeout: 10 * time.Second, TTL: 10 * time.Second}}
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, opts)
		defer g.close()
		d := dialDealer(t, g, Options{Identity: "answers"})
		defer d.Close()
		begun := time.Now()
		mute := g.raw("mute", hello(typeDealer, "mute"))
		defer mute.close()
		old := hello(typeDealer, "3.0")
		old[11] = 0
		p := g.raw("old", old)
		defer p.close()
		if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != 12*time.Second || e.peer.Identity != "mute" {
			t.Errorf("%v ended after %v", e.peer, e.when.Sub(begun))
		}
		want := hello(typeRouter, "")
		for range 5 { // at 12 s, the sixth PING and the end coincide
			want = append(want, "\x04\x07\x04PING\x00\x64"...)
		}
		if got := mute.got(); !slices.Equal(got[:min(len(got), len(want))], want) {
			t.Errorf("the mute peer was sent %q", got)
		}
		time.Sleep(time.Hour)
		wantBytes(t, "sent to a 3.0 peer", p.got(), hello(typeRouter, ""))
		if d.Err() != nil || len(g.ends) != 0 {
			t.Errorf("ended: %v, and %d others", d.Err(), len(g.ends))
		}
	})
}

// A PING on demand is answered whether or not anybody receives, binds the peer to no TTL, and is the only one.
func TestPingOnDemand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		pongs := 0
		d := dialDealer(t, g, Options{Identity: "asks", OnPong: func() { pongs++ }})
		for want := 1; want <= 2; want++ {
			if !d.Ping() {
				t.Fatal("a peer of ZMTP 3.1 cannot be asked")
			}
			synctest.Wait()
			if time.Sleep(time.Hour); pongs != want || d.Err() != nil {
				t.Fatalf("%d answers to %d PINGs; ended: %v", pongs, want, d.Err())
			}
		}
		d.Close()
		synctest.Wait()
		d.Ping()
	})
}

// The TTL of the latest PING counts, any traffic renews it, and 0 lifts it.
func TestPingTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		p := g.raw("peer", hello(typeDealer, "p"))
		defer p.close()
		p.send(appendPing(nil, 5*time.Second))
		time.Sleep(4 * time.Second)
		p.send(message("traffic"))
		time.Sleep(4 * time.Second)
		p.send(appendPing(nil, 0))
		time.Sleep(time.Hour)
		p.send(appendPing(nil, 100*time.Millisecond))
		begun := time.Now()
		if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != 100*time.Millisecond {
			t.Errorf("dropped after %v", e.when.Sub(begun))
		}
		g.wantRecv("p", "traffic")
	})
}

// Cancelling the Router's context ends everything that hangs on it.
func TestContextEndsRouter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n zmtptest.Network
		ln, err := n.Listen(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		r, err := Listen(ctx, ln, Options{})
		if err != nil {
			t.Fatal(err)
		}
		d, err := DialDealer(context.Background(), n.Dial, serverAddr, Options{})
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan error, 1)
		go func() {
			_, err := r.Recv(context.Background())
			got <- err
		}()
		short, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		_, err = r.Recv(short)
		wantError(t, err, context.DeadlineExceeded)
		why := errors.New("going home")
		cancel(why)
		err = <-got
		wantError(t, err, ErrClosed)
		wantError(t, err, why)
		<-d.Done()
		wantError(t, d.Err(), io.EOF)
		wantError(t, r.Send(Peer{Identity: "x"}, []byte("x")), ErrClosed)
		_, err = DialDealer(context.Background(), n.Dial, serverAddr, Options{})
		if err == nil {
			t.Error("the listener still accepts")
		}
		d.Close()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Close in every state of a connection: nothing is left (synctest fails a bubble with goroutines left).
func TestCloseInAnyState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Limits: Limits{InboxMessages: 1}})
		greet := appendGreeting(nil, "")
		for _, b := range [][]byte{nil, greet[:20], greet, hello(typeReq, ""), append(hello(typeReq, ""), 1),
			append(hello(typeReq, ""), message("full")...)} {
			p := g.raw("any", b)
			defer p.close()
		}
		first := g.raw("any", hello(typeDealer, "dup"))
		defer first.close()
		synctest.Wait()
		second := g.raw("any", hello(typeDealer, "dup")) // in its grace
		defer second.close()
		bad := g.raw("any", append(hello(typeDealer, ""), 0xff)) // being told
		defer bad.close()
		unread, err := g.net.Dial(context.Background(), "tcp", serverAddr) // its greeting cannot be written
		if err != nil {
			t.Fatal(err)
		}
		defer unread.Close()
		synctest.Wait()
		begun := time.Now()
		g.close()
		if took := time.Since(begun); took != 0 {
			t.Errorf("Close took %v", took)
		}
		g.close()
	})
}

// failingListener fails before it works, as one does that is out of file descriptors.
type failingListener struct {
	net.Listener
	fails int
}

func (l *failingListener) Accept() (net.Conn, error) {
	if l.fails > 0 {
		l.fails--
		return nil, errors.New("too many open files")
	}
	return l.Listener.Accept()
}

func TestListenerTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &rig{t: t}
		ln, err := g.net.Listen(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Listen(context.Background(), &failingListener{ln, 10}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		d := dialDealer(t, g, Options{})
		d.Close()
		ln.Close()
		_, err = r.Recv(context.Background())
		wantError(t, err, ErrClosed)
		if err := r.Close(); err == nil {
			t.Error("closing a closed listener gave no error")
		}
	})
}

// The same sockets over real TCP, with an orderly end that loses nothing.
func TestOverTCP(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Listen(t.Context(), ln, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	const senders, each = 8, 200
	var all sync.WaitGroup
	for i := range senders {
		all.Go(func() {
			d, err := DialDealer(within(t), nil, r.Addr().String(), Options{Identity: fmt.Sprint("d", i)})
			if err != nil {
				t.Error(err)
				return
			}
			for n := range each {
				if err := d.Send(within(t), fmt.Append(nil, n), make([]byte, 5000)); err != nil {
					t.Error(err)
				}
			}
			if err := d.Shutdown(within(t)); err != nil {
				t.Error(err)
			}
		})
	}
	next := make(map[string]int)
	for range senders * each {
		m, err := r.Recv(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if string(m.Frames[0]) != fmt.Sprint(next[m.Identity]) {
			t.Fatalf("message %s of %s came where %d was due", m.Frames[0], m.Identity, next[m.Identity])
		}
		next[m.Identity]++
	}
	all.Wait()
	go func() { _ = echo(r) }()
	q, err := DialReq(within(t), nil, r.Addr().String(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	big := make([]byte, 8<<20)
	got, err := q.Request(within(t), big)
	if err != nil || len(got) != 1 || len(got[0]) != len(big) {
		t.Errorf("8 MiB came back as %d frames, %v", len(got), err)
	}
}

// A client that breaks a rule on TCP reads the ERROR before the end, although it had sent more.
func TestErrorReachesTCPClient(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Listen(t.Context(), ln, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	conn, err := net.Dial("tcp", r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(append(hello("PUB", ""), make([]byte, 10000)...)); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if err != nil || !strings.Contains(string(got), "ERROR") || !strings.Contains(string(got), "PUB") {
		t.Errorf("client read %q, %v", got, err)
	}
}

// Of our own heartbeat's bound and the peer's TTL, the shorter counts.
func TestHeartbeatAndTTL(t *testing.T) {
	for ttl, want := range map[time.Duration]time.Duration{
		3 * time.Second: 3 * time.Second, time.Minute: 12 * time.Second, 0: 12 * time.Second,
	} {
		synctest.Test(t, func(t *testing.T) {
			g := newRig(t, Options{Heartbeat: Heartbeat{Every: 2 * time.Second, Timeout: 10 * time.Second}})
			defer g.close()
			p := g.raw("p", append(hello(typeDealer, "p"), appendPing(nil, ttl)...))
			defer p.close()
			begun := time.Now()
			if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != want {
				t.Errorf("with TTL %v dropped after %v", ttl, e.when.Sub(begun))
			}
		})
	}
}

// Shutdown refuses what comes after it, and gives up with its context.
func TestShutdownOfStuckPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n zmtptest.Network
		ln, err := n.Listen(serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		conns := make(chan net.Conn, 1)
		go func() {
			conn, _ := ln.Accept()
			go conn.Write(hello(typeRouter, ""))
			_, _ = io.ReadFull(conn, make([]byte, len(hello(typeDealer, ""))))
			conns <- conn // reads nothing more
		}()
		d, err := DialDealer(context.Background(), n.Dial, serverAddr, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer (<-conns).Close()
		if err := d.TrySend([]byte("unread")); err != nil {
			t.Fatal(err)
		}
		wantError(t, d.TrySend(), ErrNoFrames)
		over := make(chan error, 1)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		go func() { over <- d.Shutdown(ctx) }()
		synctest.Wait()
		wantError(t, d.TrySend([]byte("late")), ErrClosed)
		wantError(t, d.Send(context.Background(), []byte("late")), ErrClosed)
		wantError(t, <-over, context.DeadlineExceeded)
		<-d.Done()
	})
}

func TestOptionsAreChecked(t *testing.T) {
	for want, o := range map[string]Options{
		"MaxFrameBytes": {Limits: Limits{MaxFrameBytes: -1}},
		"SendBytes":     {Limits: Limits{SendBytes: -1}},
		"stall":         {Timeouts: Timeouts{Stall: -1}},
		"negative":      {Heartbeat: Heartbeat{Every: -1}},
		"interval":      {Heartbeat: Heartbeat{TTL: time.Second}},
		"the most":      {Heartbeat: Heartbeat{Every: time.Second, TTL: 2 * time.Hour}},
		"256 bytes":     {Identity: strings.Repeat("i", 256)},
	} {
		if _, err := o.settled(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("options wrong in %q: %v", want, err)
		}
	}
	if o, err := (Options{}).settled(); err != nil || o.Limits.MaxFrames != DefaultMaxFrames || o.Timeouts.Stall != DefaultStallTimeout {
		t.Errorf("default options: %+v, %v", o, err)
	}
}

// A peer that sends its last words and is gone before we wrote to it has still said them.
func TestLastWordsSurviveFailedWrite(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	r, err := Listen(t.Context(), ln, Options{
		Limits: Limits{InboxMessages: 1},
		OnEnd:  func(_ Peer, _ string, err error) { ended <- err },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	conn, err := net.Dial("tcp", r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	words := append(hello(typeDealer, "p"), message("one")...)
	for range 50 {
		words = append(words, message("more")...)
	}
	if _, err := conn.Write(append(words, message("last")...)); err != nil {
		t.Fatal(err)
	}
	m, err := r.Recv(within(t))
	if err != nil {
		t.Fatal(err)
	}
	conn.Close() // with our greeting unread: a reset
	for err == nil {
		err = r.Send(m.Peer, []byte("too late")) // until a write has failed
		time.Sleep(time.Millisecond)
	}
	wantError(t, err, ErrUnknownPeer)
	for string(m.Frames[0]) != "last" {
		if m, err = r.Recv(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	<-ended
}
