package zmtp

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// captured is testdata/zmtp.json: what vLLM 0.32.0's sockets (libzmq) put on the wire.
type captured struct {
	SentGreeting    string               `json:"sent_greeting"`
	SentReadyRouter string               `json:"sent_ready_router"`
	SentReadyDealer string               `json:"sent_ready_dealer"`
	StockDealerSent [][2]json.RawMessage `json:"stock_dealer_sent"`
	StockRouterSent [][2]json.RawMessage `json:"stock_router_sent"`
}

func loadCaptured(t testing.TB) captured {
	t.Helper()
	text, err := os.ReadFile("testdata/zmtp.json")
	if err != nil {
		t.Fatal(err)
	}
	var c captured
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// entry is the n-th thing that a stock socket sent.
func entry(t testing.TB, sent [][2]json.RawMessage, n int) []byte {
	t.Helper()
	var s string
	if err := json.Unmarshal(sent[n][1], &s); err != nil {
		t.Fatal(err)
	}
	return unhex(t, s)
}

func wantBytes(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Errorf("%s is\n%x, want\n%x", what, got, want)
	}
}

func TestGoldenEncoding(t *testing.T) {
	c := loadCaptured(t)
	wantBytes(t, "greeting", appendGreeting(nil, ""), unhex(t, c.SentGreeting))
	wantBytes(t, "ROUTER's READY", appendReady(nil, ready{typeRouter, ""}), unhex(t, c.SentReadyRouter))
	wantBytes(t, "DEALER's READY", appendReady(nil, ready{typeDealer, "127.0.0.1:5822"}), unhex(t, c.SentReadyDealer))
	wantBytes(t, "DEALER's hello", hello(typeDealer, "127.0.0.1:5820"), entry(t, c.StockDealerSent, 0))
	wantBytes(t, "ROUTER's hello", hello(typeRouter, ""), entry(t, c.StockRouterSent, 0))
	wantBytes(t, "PING", appendPing(nil, 10*time.Second), entry(t, c.StockDealerSent, 2))
	wantBytes(t, "PONG", appendCommand(nil, commandPong, []byte("ctx")), []byte("\x04\x08\x04PONGctx"))
	wantBytes(t, "ERROR", appendError(nil, "no"), []byte("\x04\x09\x05ERROR\x02no"))
}

// A stock DEALER's bytes, replayed into a Router: its answer is greeting, READY and one PONG per PING.
func TestGoldenStockDealer(t *testing.T) {
	c := loadCaptured(t)
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Options{})
		defer g.close()
		p := g.raw("stock", entry(t, c.StockDealerSent, 0))
		p.send(entry(t, c.StockDealerSent, 1))
		m, err := g.r.Recv(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if want := entry(t, c.StockDealerSent, 1)[2:]; m.Identity != "127.0.0.1:5820" || !sameFrames(m.Frames, [][]byte{want}) {
			t.Errorf("received %q from %q", m.Frames, m.Identity)
		}
		want := hello(typeRouter, "")
		for i := 2; i < 7; i++ {
			time.Sleep(2 * time.Second)
			p.send(entry(t, c.StockDealerSent, i))
			synctest.Wait()
			want = append(want, "\x04\x05\x04PONG"...)
			wantBytes(t, "answer so far", p.got(), want)
		}
		p.close()
		synctest.Wait()
	})
}

// A stock ROUTER's bytes, replayed to a Dealer. The PING's TTL (10 s) then bounds the silence.
func TestGoldenStockRouter(t *testing.T) {
	c := loadCaptured(t)
	synctest.Test(t, func(t *testing.T) {
		g := &rig{t: t}
		server := serveRaw(t, &g.net, entry(t, c.StockRouterSent, 0))
		d, err := DialDealer(context.Background(), g.net.Dial, serverAddr, Options{Identity: "127.0.0.1:5822"})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		p := <-server
		defer p.close()
		p.send(entry(t, c.StockRouterSent, 1))
		begun := time.Now()
		synctest.Wait()
		wantBytes(t, "what the Dealer sent", p.got(), append(hello(typeDealer, "127.0.0.1:5822"), "\x04\x05\x04PONG"...))
		if at := p.closedAt().Sub(begun); at != 10*time.Second {
			t.Errorf("Dealer hung up after %v of silence, the TTL was 10s", at)
		}
		wantError(t, d.Err(), ErrTimeout)
	})
}
