package engine

import (
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

const (
	hangPrompt = 64  // tokens of a stream's prompt
	hangStream = 200 // tokens of a stream; the next one begins where it ends
	hangCalm   = 2500 * time.Millisecond
)

// BenchmarkHangingHandshake measures the time between two tokens of a running stream of D1 while a
// handshake of D1's with a new prefill engine hangs, until it times out after 5 s, over the same
// without. Rounds with it and two rounds without, of half the time each, take turns in one run. It
// reports p50_ratio and p99_ratio, with over without, and the same of one half of the rounds without
// over the other as noise.
//
// The streams are handed over from a P. All have the same lengths, so that each round has tokens of the
// same positions: attention to more tokens takes longer.
func BenchmarkHangingHandshake(b *testing.B) {
	for _, transport := range []string{TransportTCP, TransportSHM} {
		b.Run(transport, func(b *testing.B) { benchmarkHang(b, transport) })
	}
}

func benchmarkHang(b *testing.B, transport string) {
	s := newHangScene(b, transport)
	calm := func() []time.Duration {
		stop := time.Now().Add(hangCalm)
		return s.gaps(b, func() bool { return time.Now().After(stop) })
	}
	calm()
	var with, without, again []time.Duration
	b.ResetTimer()
	for i := range b.N {
		for k := range 3 {
			switch (i + k) % 3 {
			case 0:
				without = append(without, calm()...)
			case 1:
				with = append(with, s.hang(b)...)
			case 2:
				again = append(again, calm()...)
			}
		}
	}
	b.StopTimer()
	for _, q := range []struct {
		name string
		at   float64
	}{{"p50", 0.5}, {"p99", 0.99}} {
		b.ReportMetric(ratio(quantile(without, q.at), quantile(again, q.at)), q.name+"_noise_ratio")
		all := slices.Concat(without, again)
		b.ReportMetric(ratio(quantile(with, q.at), quantile(all, q.at)), q.name+"_ratio")
		b.ReportMetric(float64(quantile(all, q.at))/1e6, q.name+"-without-ms")
	}
	b.ReportMetric(s.hung.Seconds()/float64(b.N), "hang-s")
	b.ReportMetric(0, "ns/op") // of three rounds: it says nothing
	settle(b, s.p)
	settle(b, s.d)
}

// hangScene is P, and D1 with its stream.
type hangScene struct {
	pair
	serial int
	hung   time.Duration // of all handshakes that hung
}

func newHangScene(b *testing.B, transport string) *hangScene {
	s := &hangScene{}
	with := func(role connector.Role) *Engine {
		return newEngine(b, func(c *Config) { c.Role, c.NoPrefixCache, c.Transport = role, true, transport })
	}
	s.p, s.d = with(connector.Producer), with(connector.Consumer)
	return s
}

// gaps runs streams until the end and gives the times between their tokens. A stream that runs then is
// cut off.
func (s *hangScene) gaps(b *testing.B, end func() bool) (gaps []time.Duration) {
	for !end() {
		s.serial++
		prefill, decode := s.legs(fmt.Sprint("stream-", s.serial), prompt(hangPrompt, s.serial), hangStream)
		decode.IgnoreEOS = true
		d := submit1(b, s.d, decode)
		if a := generate(b, s.p, prefill); a.Err != nil {
			b.Fatal(a.Err)
		}
		var last time.Time
		for tokens := 0; tokens < hangStream && !end(); {
			o, err := d.Next(b.Context())
			if err != nil || o.Err != nil {
				b.Fatalf("D1's stream: %v, %v", err, o.Err)
			}
			now := time.Now()
			if tokens > 0 {
				gaps = append(gaps, now.Sub(last))
			}
			last = now
			tokens += len(o.Tokens)
		}
		d.Close()
		read(b, d)
	}
	return gaps
}

// hang gives the times between tokens while a handshake of D1's hangs.
func (s *hangScene) hang(b *testing.B) []time.Duration {
	port := newMutePort(b)
	port.serve("")
	defer port.close()
	s.serial++
	_, decode := s.legs(fmt.Sprint("new-", s.serial), prompt(hangPrompt, s.serial), 1)
	at := port.Addr().(*net.TCPAddr)
	decode.Params.RemoteEngineID = kv.EngineID(fmt.Sprint("mute-", s.serial))
	decode.Params.RemoteHost, decode.Params.RemotePort = at.IP.String(), at.Port
	began := time.Now()
	stuck := submit1(b, s.d, decode)
	var over atomic.Bool
	ended := make(chan answer)
	go func() {
		a := read(b, stuck)
		over.Store(true)
		ended <- a
	}()
	gaps := s.gaps(b, over.Load)
	a := <-ended
	s.hung += time.Since(began)
	if a.Err == nil || a.Err.Phase != string(connector.PhaseHandshake) || port.accepted.Load() == 0 {
		b.Fatalf("the handshake with a mute engine, which accepted %d connections, ended with %+v", port.accepted.Load(), a.Output)
	}
	return gaps
}
