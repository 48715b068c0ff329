package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func wantError(t testing.TB, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("error is %v, want %v", got, want)
	}
}

// Whoever does not finish the handshake is dropped at its deadline; a client beside it notices nothing.
func TestHandshakeDeadline(t *testing.T) {
	greet := appendGreeting(nil, "")
	for name, first := range map[string][]byte{
		"mute": nil, "half a greeting": greet[:7], "greeting only": greet, "half a READY": hello(typeReq, "")[:80],
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newRig(t, Options{Timeouts: Timeouts{Handshake: 10 * time.Second}})
				defer g.close()
				begun := time.Now()
				p := g.raw("mute", first)
				defer p.close()
				q, err := DialReq(context.Background(), g.net.Dial, serverAddr, Options{})
				if err != nil {
					t.Fatal(err)
				}
				defer q.Close()
				go func() { _ = echo(g.r) }()
				if _, err := q.Request(context.Background(), []byte("hi")); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(begun); took != 0 {
					t.Errorf("honest client waited %v", took)
				}
				if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != 10*time.Second {
					t.Errorf("dropped after %v", e.when.Sub(begun))
				}
			})
		})
	}
}

// A byte a second is no handshake either.
func TestHandshakeTrickle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Timeouts: Timeouts{Handshake: 10 * time.Second}})
		defer g.close()
		begun := time.Now()
		p := g.raw("trickle", nil)
		defer p.close()
		go func() {
			for _, b := range hello(typeReq, "") {
				p.send([]byte{b})
				time.Sleep(time.Second)
			}
		}()
		if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != 10*time.Second {
			t.Errorf("dropped after %v", e.when.Sub(begun))
		}
		time.Sleep(200 * time.Second) // let the trickler finish
	})
}

func TestSilentClientIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		p := g.raw("silent", hello(typeDealer, "a"))
		defer p.close()
		time.Sleep(365 * 24 * time.Hour)
		p.send(message("still here"))
		g.wantRecv("a", "still here")
	})
}

// A message begun must advance by 64 KiB per Stall: tested are none, too little, and just enough.
func TestStartedMessageDeadline(t *testing.T) {
	const size = 200 << 10
	frame := message(strings.Repeat("x", size))
	for _, c := range []struct {
		name  string
		piece int
		every time.Duration
		ends  time.Duration // 0: arrives
	}{
		{"nothing after the flags", 1, time.Hour, 30 * time.Second},
		{"a byte a second", 1, time.Second, 30 * time.Second},
		{"64 KiB in 35 s", 32 << 10, 17500 * time.Millisecond, 30 * time.Second},
		{"64 KiB in 20 s", 32 << 10, 10 * time.Second, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newRig(t, Options{Timeouts: Timeouts{Stall: 30 * time.Second}})
				defer g.close()
				p := g.raw("slow", hello(typeDealer, "slow"))
				defer p.close()
				time.Sleep(time.Hour)
				begun := time.Now()
				sender := make(chan struct{})
				defer func() { <-sender }()
				go func() {
					defer close(sender)
					for rest := frame; len(rest) > 0; rest = rest[min(len(rest), c.piece):] {
						if _, err := p.conn.Write(rest[:min(len(rest), c.piece)]); err != nil {
							return
						}
						time.Sleep(c.every)
					}
				}()
				if c.ends == 0 {
					g.wantRecv("slow", string(frame[9:]))
					return
				}
				if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != c.ends {
					t.Errorf("dropped after %v", e.when.Sub(begun))
				}
			})
		})
	}
}

// A message whose first frames came is begun as well, and commands in between do not keep it alive.
func TestStartedMultipartDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Timeouts: Timeouts{Stall: 30 * time.Second}})
		defer g.close()
		p := g.raw("slow", hello(typeDealer, "slow"))
		defer p.close()
		begun := time.Now()
		p.send(message("one", "")[:5]) // MORE
		go func() {
			for range 5 {
				time.Sleep(7 * time.Second)
				p.send(append(appendPing(nil, 0), message("more", "")[:6]...))
			}
		}()
		if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != 30*time.Second {
			t.Errorf("dropped after %v", e.when.Sub(begun))
		}
		time.Sleep(time.Minute)
	})
}

// Every violation ends its sender's connection with an ERROR that says why, and nobody else's.
func TestViolations(t *testing.T) {
	long := func(flags byte, size uint64) []byte {
		return binary.BigEndian.AppendUint64([]byte{flags}, size)
	}
	ready := func(props string) []byte { return appendCommand(appendGreeting(nil, ""), "READY", []byte(props)) }
	up := func(b ...byte) []byte { return append(hello(typeDealer, "bad"), b...) }
	v2 := appendGreeting(nil, "")
	v2[10] = 2
	curve := appendGreeting(nil, "")
	copy(curve[12:], "CURVE")
	lim := Limits{MaxFrameBytes: 1000, MaxFrames: 3, MaxMessageBytes: 1500}
	for name, c := range map[string]struct {
		bytes []byte
		want  error
		told  string // part of the ERROR command, empty if none is sent
	}{
		"HTTP":              {[]byte("GET / HTTP/1.1\r\n"), ErrProtocol, ""},
		"ZMTP 2":            {v2, ErrProtocol, ""},
		"CURVE":             {curve, ErrProtocol, ""},
		"message first":     {append(appendGreeting(nil, ""), message("x")...), ErrProtocol, "before the handshake"},
		"PING first":        {append(appendGreeting(nil, ""), appendPing(nil, 0)...), ErrProtocol, "PING"},
		"ERROR first":       {append(appendGreeting(nil, ""), appendError(nil, "no")...), ErrRejected, ""},
		"wrong type":        {hello("PUB", ""), ErrProtocol, "PUB"},
		"no type":           {ready(""), ErrProtocol, "socket type"},
		"property cut":      {ready("\x0bSocket"), ErrProtocol, "truncated"},
		"value cut":         {ready("\x01a\x00\x00\x01\x00b"), ErrProtocol, "announces 256"},
		"property twice":    {ready("\x01a\x00\x00\x00\x00\x01A\x00\x00\x00\x00"), ErrProtocol, "repeats"},
		"zero identity":     {hello(typeDealer, "\x00abcd"), ErrProtocol, "zero byte"},
		"long identity":     {hello(typeDealer, strings.Repeat("i", 256)), ErrProtocol, "256 bytes"},
		"huge READY":        {append(appendGreeting(nil, ""), long(6, 1<<40)...), ErrLimit, "command of"},
		"second READY":      {up(appendCommand(nil, "READY", nil)...), ErrProtocol, "second READY"},
		"reserved flag":     {up(0x08, 0), ErrProtocol, "reserved"},
		"command with MORE": {up(0x05, 0), ErrProtocol, "MORE"},
		"nameless command":  {up(0x04, 0), ErrProtocol, "name"},
		"short PING":        {up(appendCommand(nil, "PING", []byte{0})...), ErrProtocol, "PING"},
		"frame 2^63":        {up(long(2, 1<<63)...), ErrLimit, "0x8"},
		"frame 2^62":        {up(long(2, 1<<62)...), ErrLimit, "at most 1000"},
		"frame over":        {up(long(2, 1001)...), ErrLimit, "at most 1000"},
		"four frames":       {up(message("", "", "", "")...), ErrLimit, "3 frames"},
		"message over":      {up(message(strings.Repeat("a", 800), strings.Repeat("b", 701))...), ErrLimit, "at most 1500"},
		"ERROR later":       {up(appendError(nil, "going")...), ErrRejected, ""},
		"cut in a frame":    {up(0, 9, 'a'), io.ErrUnexpectedEOF, ""},
		"cut after MORE":    {up(1, 0), io.ErrUnexpectedEOF, ""},
		"closed":            {up(), io.EOF, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newRig(t, Options{Limits: lim})
				defer g.close()
				other := g.raw("other", hello(typeDealer, "other"))
				defer other.close()
				bad := g.raw("bad", c.bytes)
				synctest.Wait()
				if errors.Is(c.want, io.EOF) || errors.Is(c.want, io.ErrUnexpectedEOF) {
					bad.close()
				}
				e := g.wantEnd(c.want)
				bad.close()
				if !strings.HasPrefix(e.addr, "bad:") {
					t.Errorf("dropped %s", e.addr)
				}
				_, told, _ := bytes.Cut(bad.got(), []byte("\x05ERROR"))
				if !strings.Contains(string(told), c.told) || (c.told == "") != (told == nil) {
					t.Errorf("the peer was told %q, want %q", told, c.told)
				}
				other.send(message("well"))
				g.wantRecv("other", "well")
			})
		})
	}
}

// What must be taken: unknown commands, unknown properties, any case, ZMTP 3.0 and later, odd size forms,
// PING between frames with its context cut at 16 bytes.
func TestTolerated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		future := appendGreeting(nil, "")
		future[10], future[11], future[63] = 4, 7, 9
		b := appendCommand(future, "READY", []byte("\x0bSOCKET-type\x00\x00\x00\x06DEALER\x03X-a\x00\x00\x00\x01b\x08identity\x00\x00\x00\x01n"))
		b = append(b, appendCommand(nil, "SUBSCRIBE", []byte("x"))...)
		b = append(b, 1, 1, 'a')
		b = append(b, appendCommand(nil, "PING", []byte("\x00\x000123456789abcdefTOO LONG"))...)
		b = append(b, appendCommand(nil, "PONG", nil)...)
		b = append(b, 3, 0, 0, 0, 0, 0, 0, 0, 1, 'b') // long form of a short size
		b = append(b, 0, 0)
		p := g.raw("odd", b)
		g.wantRecv("n", "a", "b", "")
		synctest.Wait()
		wantBytes(t, "answer", p.got(), append(hello(typeRouter, ""), "\x04\x15\x04PONG0123456789abcdef"...))
		p.close()
		g.wantEnd(io.EOF)

		old := hello(typeReq, "")
		old[11] = 0
		p = g.raw("old", append(old, message("", "q")...))
		defer p.close()
		m, err := g.r.Recv(context.Background())
		if err != nil || len(m.Identity) != 5 || m.Identity[0] != 0 {
			t.Errorf("received %v, %v from a nameless ZMTP 3.0 peer", m, err)
		}
	})
}

// A frame of 1 GiB is allowed here and announced, and almost nothing comes: nor is memory taken.
func TestAnnouncedSizeIsNotAllocated(t *testing.T) {
	lim := Limits{MaxFrameBytes: 1 << 30, MaxMessageBytes: 1 << 30}.withDefaults()
	var before, after runtime.MemStats
	input := append([]byte{2, 0, 0, 0, 0, 0x40, 0, 0, 0}, make([]byte, 300<<10)...)
	r := newReader(&scriptConn{r: bytes.NewReader(input)}, &lim, time.Hour)
	runtime.ReadMemStats(&before)
	_, err := r.message(nil)
	runtime.ReadMemStats(&after)
	wantError(t, err, io.ErrUnexpectedEOF)
	if took := after.TotalAlloc - before.TotalAlloc; took > 4*uint64(len(input)) {
		t.Errorf("%d bytes came, %d were allocated", len(input), took)
	}
}

// A flooder fills its own share and is then not read. A client's message after that waits for one of the
// flooder's messages, not for all.
func TestFloodDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Limits: Limits{InboxMessages: 50}})
		defer g.close()
		var floods []*rawPeer
		for i := range 3 {
			f := g.raw("bad", hello(typeDealer, fmt.Sprint("flood", i)))
			defer f.close()
			floods = append(floods, f)
			go func() {
				for {
					if _, err := f.conn.Write(message("flood")); err != nil {
						return
					}
				}
			}()
		}
		synctest.Wait() // all three are stuck now
		g.r.tenants.mu.Lock()
		if held, want := g.r.tenants.mu.held, 3*50*messageCost([][]byte{[]byte("flood")}); held != want {
			t.Errorf("three full shares hold %d bytes, want %d", held, want)
		}
		g.r.tenants.mu.Unlock()
		honest := g.raw("good", hello(typeDealer, "honest"))
		defer honest.close()
		for round := range 5 {
			honest.send(message("x"))
			synctest.Wait()
			for n := 0; ; n++ {
				m, err := g.r.Recv(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				if m.Identity == "honest" {
					break
				}
				if n == len(floods) {
					t.Fatalf("round %d: over %d messages of flooders before the honest one", round, n)
				}
			}
		}
	})
}

// A client that never reads is dropped when its queue is full, and Send does not wait for it.
func TestSlowReaderIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Limits: Limits{SendMessages: 10}})
		defer g.close()
		conn, err := g.net.Dial(context.Background(), "tcp", serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		synctest.Wait() // the Router's greeting is being written, and stays so: nothing is read here
		if _, err := conn.Write(append(hello(typeDealer, "slow"), message("hi")...)); err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		m := g.wantRecv("slow", "hi")
		sent := 0
		for ; ; sent++ {
			if err = g.r.Send(m.Peer, []byte("answer")); err != nil {
				break
			}
		}
		wantError(t, err, ErrQueueFull)
		if sent != 9 { // READY waits too
			t.Errorf("%d messages were queued", sent)
		}
		if e := g.wantEnd(ErrQueueFull); e.when != begun || e.peer != m.Peer {
			t.Errorf("dropped %v after %v", e.peer, e.when.Sub(begun))
		}
		wantError(t, g.r.Send(m.Peer, []byte("x")), ErrUnknownPeer)
	})
}

// A client that stops reading in the middle of a message is dropped after Stall, having cost one queue.
func TestStalledReaderIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Timeouts: Timeouts{Stall: 30 * time.Second}})
		defer g.close()
		conn, err := g.net.Dial(context.Background(), "tcp", serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, _ = conn.Write(append(hello(typeDealer, "slow"), message("hi")...))
		begun := time.Now()
		g.wantRecv("slow", "hi")
		if e := g.wantEnd(ErrTimeout); e.when.Sub(begun) != 30*time.Second {
			t.Errorf("dropped after %v", e.when.Sub(begun))
		}
	})
}

// A flood of PINGs whose answers nobody reads costs one PONG.
func TestPingFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		conn, err := g.net.Dial(context.Background(), "tcp", serverAddr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		synctest.Wait() // the Router's greeting is being written
		_, _ = conn.Write(hello(typeDealer, "p"))
		for i := range 10000 {
			_, _ = conn.Write(appendCommand(nil, "PING", fmt.Appendf([]byte{0, 0}, "%016d", i)))
		}
		_, _ = conn.Write(message("done"))
		g.wantRecv("p", "done")
		p := newRawPeer(conn)
		defer p.close()
		synctest.Wait()
		wantBytes(t, "answer", p.got(), append(hello(typeRouter, ""), "\x04\x15\x04PONG0000000000009999"...))
	})
}

// One host takes every place, by mute and by working connections; another host still gets in, and stays.
func TestGreedyHostPays(t *testing.T) {
	for _, mute := range []bool{true, false} {
		t.Run(fmt.Sprint("mute ", mute), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newRig(t, Options{Limits: Limits{MaxConnections: 8}})
				defer g.close()
				greed := func() *rawPeer {
					if mute {
						return g.raw("greedy", nil)
					}
					return g.raw("greedy", hello(typeDealer, ""))
				}
				var all []*rawPeer
				for range 8 {
					all = append(all, greed())
					synctest.Wait()
					time.Sleep(time.Millisecond)
				}
				good := g.raw("good", hello(typeDealer, "good"))
				defer good.close()
				synctest.Wait()
				g.wantEnd(ErrEvicted)
				<-all[0].over // the longest silent
				for range 50 {
					all = append(all, greed())
					synctest.Wait()
				}
				good.send(message("here"))
				g.wantRecv("good", "here")
				for _, p := range all {
					p.close()
				}
			})
		})
	}
}

// Many clients announce and send large messages without finishing them: together they may not hold more than
// BufferedBytes, and the host that holds most pays.
func TestBufferedBytesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Limits: Limits{BufferedBytes: 4 << 20, MaxFrameBytes: 1 << 20}})
		defer g.close()
		big := message(strings.Repeat("x", 1<<20))
		for range 20 {
			p := g.raw("greedy", hello(typeDealer, ""))
			defer p.close()
			go p.send(big[:len(big)-1])
			synctest.Wait()
			g.r.tenants.mu.Lock()
			if held := g.r.tenants.mu.held; held > 4<<20 {
				t.Errorf("%d bytes are held", held)
			}
			g.r.tenants.mu.Unlock()
		}
		good := g.raw("good", hello(typeDealer, "good"))
		defer good.close()
		good.send(big)
		g.wantRecv("good", string(big[9:]))
		for len(g.ends) > 0 {
			g.wantEnd(ErrEvicted)
		}
	})
}

// A client of the host that already has most is refused at once while all places do work.
func TestTooManyConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Limits: Limits{MaxConnections: 2}})
		defer g.close()
		for range 2 {
			p := g.raw("host", hello(typeDealer, ""))
			defer p.close()
			synctest.Wait()
		}
		p := g.raw("host", nil)
		g.wantEnd(ErrTooManyConnections)
		p.close()
	})
}

// The share is bounded in bytes too, and what a connection holds is given back at its end, apart from what
// waits for Recv.
func TestInboxBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{Limits: Limits{InboxBytes: 4000}})
		defer g.close()
		held := func() int {
			g.r.tenants.mu.Lock()
			defer g.r.tenants.mu.Unlock()
			return g.r.tenants.mu.held
		}
		kilo := strings.Repeat("k", 1000)
		cost := messageCost([][]byte{[]byte(kilo)})
		p := g.raw("p", hello(typeDealer, "p"))
		sender := make(chan struct{})
		go func() {
			defer close(sender)
			for range 10 {
				p.send(message(kilo))
			}
			p.send([]byte{1, 3, 'b', 'e', 'g', 0, 200}) // and begins another
		}()
		synctest.Wait()
		if held() != 4*cost {
			t.Errorf("%d bytes are held, want %d", held(), 4*cost)
		}
		for range 7 {
			g.wantRecv("p", kilo)
		}
		<-sender
		synctest.Wait()
		p.close()
		g.wantEnd(io.ErrUnexpectedEOF)
		if held() != 3*cost {
			t.Errorf("%d bytes are held after the end, want %d", held(), 3*cost)
		}
		for range 3 {
			g.wantRecv("p", kilo)
		}
		if held() != 0 {
			t.Errorf("%d bytes are held in the end", held())
		}
	})
}
