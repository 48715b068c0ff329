package peer

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

func vectors[V any](t testing.TB, file string) []V {
	t.Helper()
	text, err := os.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var doc struct{ Vectors []V }
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	if len(doc.Vectors) == 0 {
		t.Fatalf("%s has no vectors", file)
	}
	return doc.Vectors
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// sideChannelVector is one answer of a stock engine's side channel.
type sideChannelVector struct {
	Name    string
	Request string   `json:"request_hex"`
	Frames  []string `json:"reply_frames_hex"`
	Clock   float64
}

// Given a stock engine's payload and clock, the listener answers byte for byte what stock did.
func TestGoldenReplies(t *testing.T) {
	for _, v := range vectors[sideChannelVector](t, "side-channel.json") {
		t.Run(v.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFabric()
				l, err := NewListener(f.listen(addrP), ListenerConfig{Clock: func() float64 { return v.Clock }})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				q, _, err := wire.DecodeHandshakeRequest(unhex(t, v.Request))
				if err != nil {
					t.Fatal(err)
				}
				if err := l.Set(kv.Rank{PP: q.PP, TP: q.TP}, 1, unhex(t, v.Frames[0])); err != nil {
					t.Fatal(err)
				}
				got := f.request(t, unhex(t, v.Request))
				if len(got) != 2 || !bytes.Equal(got[0], unhex(t, v.Frames[0])) || !bytes.Equal(got[1], unhex(t, v.Frames[1])) {
					t.Errorf("answered %x", got)
				}
			})
		})
	}
}

// request asks the listener at addrP as stock clients do.
func (f *fabric) request(t testing.TB, frames ...[]byte) [][]byte {
	t.Helper()
	req, err := zmtp.DialReq(context.Background(), f.dial, addrP, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer req.Close()
	got, err := req.Request(context.Background(), frames...)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

type behaviourVector struct {
	Name       string
	Socket     string
	Frames     []string `json:"frames_hex"`
	Answered   bool
	ReplyParts int `json:"reply_part_count"`
}

// stricter lists what a stock listener answers and ours does not, with the reason.
var stricter = map[string]string{
	"bin_of_three_bytes": "a byte string is not a request; nobody sends one",
}

// The walk over odd inputs: what a stock listener answers is answered with as many parts; what ends a
// stock listener ends the connection that it came on, at once and with a warning, and the next client
// is served.
func TestListenerBehaviour(t *testing.T) {
	seen := 0
	for _, v := range vectors[behaviourVector](t, "listener-behaviour.json") {
		answered := v.Answered
		if _, ok := stricter[v.Name]; ok {
			seen++
			if !answered {
				t.Errorf("%s: stock does not answer either", v.Name)
			}
			answered = false
		}
		t.Run(v.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { walk(t, v, answered) })
		})
	}
	if seen != len(stricter) {
		t.Error("a documented difference is not in the vectors")
	}
}

func walk(t *testing.T, v behaviourVector, answered bool) {
	f, events := newFabric(), &recorder{}
	l, err := NewListener(f.listen(addrP), ListenerConfig{Events: events})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	want := payload(t, metadata("P", "i", kv.Rank{}), testHash)
	if err := l.Set(kv.Rank{}, 1, want); err != nil {
		t.Fatal(err)
	}
	var frames [][]byte
	for _, h := range v.Frames {
		frames = append(frames, unhex(t, h))
	}
	reply, err := f.send(t, v.Socket, frames)
	switch {
	case !answered && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe): // a pipe says the latter at times
		t.Errorf("got %d parts, %v; want the connection closed", len(reply), err)
	case answered && err != nil:
		t.Error(err)
	case answered && (len(reply) != v.ReplyParts || !bytes.Equal(reply[len(reply)-2], want)):
		t.Errorf("answered %d parts, want %d", len(reply), v.ReplyParts)
	}
	if got := f.request(t, goodRequest); !bytes.Equal(got[0], want) {
		t.Error("the next client is not served")
	}
	synctest.Wait()
	odd := strings.Contains(v.Name, "magic") && v.Name != "bin32_magic"
	switch warned := recorded[BadRequest](events); {
	case answered && !odd && len(warned) != 0, !answered && len(warned) != 1, odd && (len(warned) != 1 || !warned[0].Answered):
		t.Errorf("warnings: %+v", warned)
	case !answered && (warned[0].Answered || warned[0].From == "" || strings.Contains(warned[0].Reason, "dropped by its owner")):
		t.Errorf("the warning says little: %+v", warned[0])
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.mu.reasons) != 0 {
		t.Errorf("%d reasons are kept", len(l.mu.reasons))
	}
}

var goodRequest = wire.AppendHandshakeRequest(nil, wire.HandshakeRequest{})

func (f *fabric) send(t *testing.T, socket string, frames [][]byte) ([][]byte, error) {
	ctx := context.Background()
	if socket == "REQ" {
		req, err := zmtp.DialReq(ctx, f.dial, addrP, zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer req.Close()
		return req.Request(ctx, frames...)
	}
	dealer, err := zmtp.DialDealer(ctx, f.dial, addrP, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	if err := dealer.Send(ctx, frames...); err != nil {
		t.Fatal(err)
	}
	return dealer.Recv(ctx)
}

// The payload of a rank is frozen: other bytes need a greater generation.
func TestSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric()
		l := f.serve(t, addrP, "P", "i", 1)
		defer l.Close()
		old := payload(t, metadata("P", "i", kv.Rank{}), testHash)
		other := payload(t, metadata("P", "i2", kv.Rank{}), testHash)
		if err := l.Set(kv.Rank{}, 1, old); err != nil {
			t.Errorf("the same again: %v", err)
		}
		for _, gen := range []kv.Generation{0, 1} {
			if l.Set(kv.Rank{}, gen, other) == nil {
				t.Errorf("replaced under generation %d", gen)
			}
		}
		if l.Set(kv.Rank{TP: 1}, 0, other) == nil {
			t.Error("accepted generation 0")
		}
		if l.Set(kv.Rank{}, 2, []byte("x")) == nil {
			t.Error("accepted garbage")
		}
		if got := f.request(t, goodRequest); !bytes.Equal(got[0], old) {
			t.Error("a refused Set had an effect")
		}
		if err := l.Set(kv.Rank{}, 2, other); err != nil {
			t.Error(err)
		}
		other[len(other)-1]++ // the listener has its own copy
		if got := f.request(t, goodRequest); !bytes.Equal(got[0][:len(other)-1], other[:len(other)-1]) || got[0][len(other)-1] == other[len(other)-1] {
			t.Error("the new payload is not served, or is shared")
		}
	})
}

// A scanner can cause a few warnings, not one per connection.
func TestWarningsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, events := newFabric(), &recorder{}
		l, err := NewListener(f.listen(addrP), ListenerConfig{Events: events})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		scan := func(n int) {
			for range n {
				conn, err := f.dial(context.Background(), "tcp", addrP)
				if err != nil {
					t.Fatal(err)
				}
				_, _ = conn.Write([]byte("GET / HTTP/1.1\r\nHost: somewhere.else.example.org\r\n\r\n"))
				conn.Close()
			}
			synctest.Wait()
		}
		scan(100)
		if n := len(recorded[BadRequest](events)); n != warnBurst {
			t.Errorf("%d warnings at once", n)
		}
		time.Sleep(warnEvery)
		scan(100)
		all := recorded[BadRequest](events)
		if last := all[len(all)-1]; len(all) != warnBurst+1 || last.Suppressed != 100-warnBurst {
			t.Errorf("%d warnings in all, the last of them %+v", len(all), last)
		}
		time.Sleep(10 * warnBurst * warnEvery)
		scan(100)
		if n := len(recorded[BadRequest](events)); n != 2*warnBurst+1 {
			t.Errorf("%d warnings after a pause", n)
		}
	})
}

// Many mute and half-way clients don't keep a good one from its answer.
func TestMuteClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric()
		l := f.serve(t, addrP, "P", "i", 1)
		defer l.Close()
		for i := range 300 {
			conn, err := f.dial(context.Background(), "tcp", addrP)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if i%2 == 0 {
				go conn.Write([]byte{0xff, 0, 0})
			}
		}
		got := f.request(t, goodRequest)
		if len(got) != 2 {
			t.Errorf("%d parts", len(got))
		}
	})
}

// Every answer has the clock of its own moment.
func TestListenerClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFabric()
		now := 1.5
		l, err := NewListener(f.listen(addrP), ListenerConfig{Clock: func() float64 { now++; return now }})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Set(kv.Rank{}, 1, payload(t, metadata("P", "i", kv.Rank{}), testHash)); err != nil {
			t.Fatal(err)
		}
		for want := 2.5; want < 5; want++ {
			if got, err := wire.DecodeClock(f.request(t, goodRequest)[1]); err != nil || got != want {
				t.Errorf("clock %v, %v; want %v", got, err, want)
			}
		}
	})
}

func TestListen(t *testing.T) {
	ln, err := Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	addr := ln.Addr().(*net.TCPAddr)
	if !addr.IP.IsLoopback() {
		t.Errorf("an address without a host is bound to %v", addr)
	}
	_, err = Listen(addr.String())
	if err == nil || !strings.Contains(err.Error(), addr.String()) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "another port") {
		t.Errorf("a port in use: %v", err)
	}
	for _, bad := range []string{"", "5600", "h:p:5600", "127.0.0.1:99999"} {
		if ln, err := Listen(bad); err == nil {
			ln.Close()
			t.Errorf("%q was accepted", bad)
		}
	}
}

// A stock peer is recognised by the first answer and asked for nothing more; every request is one
// that stock clients send. With an agent that speaks NIXL it connects.
func TestStockPeer(t *testing.T) {
	v := vectors[sideChannelVector](t, "side-channel.json")[0]
	p, err := wire.DecodeHandshakePayload(unhex(t, v.Frames[0]))
	if err != nil {
		t.Fatal(err)
	}
	m, err := wire.DecodeAgentMetadata(p.AgentMetadata)
	if err != nil {
		t.Fatal(err)
	}
	for _, transport := range []string{"tcp", "nixl"} {
		t.Run(transport, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, func(c *Config, a *fakeAgent) { c.Hash = p.CompatibilityHash; a.offers[0].Transport = transport })
				defer b.table.Close()
				stock := b.stock(t, addrP, unhex(t, v.Frames[0]), unhex(t, v.Frames[1]))
				tg := target(m.EngineID, addrP, 0)
				if transport == "tcp" {
					tg = target(m.EngineID, addrP, 1, 2)
					var none *NoTransportError
					if e := b.refused(t, tg, PhaseOffers); !errors.As(e, &none) || !none.Stock || fmt.Sprint(none.Local, none.Remote) != "[tcp] [nixl]" {
						t.Error(e)
					}
				} else {
					c := b.connect(t, tg)
					if string(b.agent.mu.infos[0].Offers[0].Blob) != string(m.AgentMetadata) || c.Has("anything") {
						t.Errorf("got %+v", c)
					}
				}
				if asked := stock(); len(asked) != 1 || hex.EncodeToString(asked[0]) != v.Request {
					t.Errorf("a stock listener was asked %x", asked)
				}
			})
		})
	}
}

// stock answers everything with the same frames; the function it returns ends it and gives what it was
// asked.
func (b *bed) stock(t testing.TB, addr string, frames ...[]byte) func() [][]byte {
	t.Helper()
	r, err := zmtp.Listen(context.Background(), b.listen(addr), zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var asked [][]byte
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			m, err := r.Recv(context.Background())
			if err != nil {
				return
			}
			asked = append(asked, m.Frames[1])
			_ = r.Send(m.Peer, append([][]byte{{}}, frames...)...)
		}
	}()
	return func() [][]byte {
		r.Close()
		<-done
		return asked
	}
}

// Answers that are not what the protocol says, and how a handshake names them.
func TestBadAnswers(t *testing.T) {
	good := payload(t, metadata("P", "i", kv.Rank{}), testHash)
	clock := wire.AppendClock(nil, 1)
	for name, tc := range map[string]struct {
		frames [][]byte
		phase  Phase
	}{
		"one frame":      {[][]byte{good}, PhaseReply},
		"three frames":   {[][]byte{good, clock, {}}, PhaseReply},
		"garbage":        {[][]byte{{0xc1}, clock}, PhaseReply},
		"no clock":       {[][]byte{good, {0xc0}}, PhaseReply},
		"garbage inside": {[][]byte{payloadOf(testHash, []byte{0xc1}), clock}, PhaseMetadata},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, nil)
				defer b.table.Close()
				defer b.stock(t, addrP, tc.frames...)()
				b.refused(t, target("P", addrP), tc.phase)
				b.wantSizes(t, 0, 0)
			})
		})
	}
}

// A peer that greets and then never answers costs its waiters QueryTimeout.
func TestSilentAfterGreeting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		r, err := zmtp.Listen(context.Background(), b.listen(addrP), zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		start := time.Now()
		e := b.refused(t, target("P", addrP), PhaseQuery)
		if took := time.Since(start); took != DefaultQueryTimeout || !strings.Contains(e.Error(), "no answer within 5s") {
			t.Errorf("after %v: %v", took, e)
		}
	})
}

// A peer that answers each rank just in time is bounded by the handshake as a whole.
func TestSlowPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		r, err := zmtp.Listen(context.Background(), b.listen(addrP), zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				m, err := r.Recv(context.Background())
				if err != nil {
					return
				}
				q, _, _ := wire.DecodeHandshakeRequest(m.Frames[1])
				time.Sleep(DefaultQueryTimeout - time.Second)
				rank := kv.Rank{PP: q.PP, TP: q.TP}
				_ = r.Send(m.Peer, []byte{}, payload(t, metadata("P", "i", rank), testHash), wire.AppendClock(nil, 1))
			}
		}()
		start := time.Now()
		e := b.refused(t, target("P", addrP, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9), PhaseQuery)
		if took := time.Since(start); took != DefaultHandshakeTimeout || !strings.Contains(e.Error(), "30s in all") {
			t.Errorf("after %v: %v", took, e)
		}
		r.Close()
		<-done
	})
}

func TestClockSample(t *testing.T) {
	var best ClockSample
	best.improve(10, 10.4, 110.2) // rtt 0.4
	best.improve(20, 20.1, 120.03)
	best.improve(30, 30.3, 131)
	if d := best.Offset - 99.98; d > 1e-9 || d < -1e-9 {
		t.Errorf("offset %v", best.Offset)
	}
	if best.RTT.Round(time.Microsecond) != 100*time.Millisecond {
		t.Errorf("rtt %v", best.RTT)
	}
	if d := best.Local(120.03) - 20.05; d > 1e-9 || d < -1e-9 {
		t.Errorf("local time %v", best.Local(120.03))
	}
}

// A handshake over several ranks keeps the sample of the fastest answer.
func TestClockOfHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		readings := []float64{10, 11, 20, 20.5, 30, 33} // before and after each of three questions
		b := newBed(t, func(c *Config, _ *fakeAgent) {
			c.Clock = func() float64 { v := readings[0]; readings = readings[1:]; return v }
		})
		defer b.table.Close()
		peerClock := 99.0
		l, err := NewListener(b.listen(addrP), ListenerConfig{Clock: func() float64 { peerClock++; return peerClock }})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for r := range 3 {
			if err := l.Set(kv.Rank{TP: r}, 1, payload(t, metadata("P", "i", kv.Rank{TP: r}), testHash)); err != nil {
				t.Fatal(err)
			}
		}
		c := b.connect(t, target("P", addrP, 0, 1, 2))
		if c.Clock.Offset != 101-20.25 || c.Clock.RTT != 500*time.Millisecond {
			t.Errorf("sample %+v", c.Clock)
		}
	})
}
