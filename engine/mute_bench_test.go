package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/worker"
	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

const (
	muteRequests = 40                    // of D1 in a round
	muteEvery    = 10 * time.Millisecond // between two registrations of D2
	mutePrompt   = 64                    // tokens of D1's prompts
	muteAnswer   = 4                     // tokens of D1's answers
	muteHeld     = 1500                  // tokens of the prompt whose KV D2 asks for: 3 MB
)

// BenchmarkMuteDecodeEngine measures the latency of D1's requests, hand-off included, while a hostile
// D2 keeps P busy with a peer that does not answer, over the same without it. Rounds with D2 and two
// rounds without take turns in one run. It reports p50_ratio, with over without; paired_ratio, the median of
// the same of each three rounds that follow each other, which other load on the machine moves less; and
// noise_ratio, one half of the rounds without over the other: what the machine does to a ratio that is 1.
//
// D2 registers every 10 ms. Its port, to which P must connect, is one of these:
//
//   - side-channel: it accepts and never says a word, for ever new engine ids, so that P has
//     hundreds of handshakes in flight;
//   - socket: the handshake is answered, and nothing is read from the data connections any more
//     once P has a WRITE for D2.
func BenchmarkMuteDecodeEngine(b *testing.B) {
	for _, transport := range []string{TransportTCP, TransportSHM} {
		for _, port := range []string{"side-channel", "socket"} {
			b.Run(transport+"/"+port, func(b *testing.B) { benchmarkMute(b, transport, port == "socket") })
		}
	}
}

func benchmarkMute(b *testing.B, transport string, answers bool) {
	s := newMuteScene(b, transport)
	var with, without, again []time.Duration
	var paired []float64
	s.round(b) // connects, and touches memory for the first time
	b.ResetTimer()
	for i := range b.N {
		var rounds [3][]time.Duration
		for k := range 3 {
			k = (i + k) % 3
			if k != 1 {
				rounds[k] = s.round(b)
				continue
			}
			d2 := s.hostile(b, answers)
			rounds[k] = s.round(b)
			s.leave(b, d2)
		}
		without, with, again = append(without, rounds[0]...), append(with, rounds[1]...), append(again, rounds[2]...)
		paired = append(paired, ratio(quantile(rounds[1], 0.5), quantile(slices.Concat(rounds[0], rounds[2]), 0.5)))
	}
	b.StopTimer()
	b.ReportMetric(ratio(quantile(without, 0.5), quantile(again, 0.5)), "noise_ratio")
	all := slices.Concat(without, again)
	b.ReportMetric(ratio(quantile(with, 0.5), quantile(all, 0.5)), "p50_ratio")
	slices.Sort(paired)
	b.ReportMetric(paired[len(paired)/2], "paired_ratio")
	b.ReportMetric(ratio(quantile(with, 0.95), quantile(all, 0.95)), "p95_ratio")
	b.ReportMetric(float64(quantile(all, 0.5))/1e6, "without-ms")
	b.ReportMetric(0, "ns/op") // of three rounds and what is between them: it says nothing
	settle(b, s.p)
	settle(b, s.d)
}

// quantile sorts the values and gives the one of which the part q is below.
func quantile(v []time.Duration, q float64) time.Duration {
	slices.Sort(v)
	return v[min(int(q*float64(len(v))), len(v)-1)]
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

// muteScene is P, which serves peers by every transport, and D1, and what P's worker tells.
type muteScene struct {
	pair
	transport  string
	agent      agent.Agent // P's
	handshakes atomic.Int64
	serial     int
}

func newMuteScene(b *testing.B, transport string) *muteScene {
	s := &muteScene{transport: transport}
	s.p = newEngine(b, func(c *Config) {
		c.Role, c.NoPrefixCache, c.NumBlocks, c.Lease = connector.Producer, true, 1024, 5*time.Second
		c.Events = event.SinkFunc(func(e event.Event) {
			switch e.(type) {
			case event.HandshakeStarted:
				s.handshakes.Add(1)
			case event.HandshakeFinished:
				s.handshakes.Add(-1)
			}
		})
		c.newAgent = func(c Config) (_ agent.Agent, err error) {
			c.newAgent = nil
			s.agent, err = newAgent(c)
			return s.agent, err
		}
	})
	s.d = newEngine(b, func(c *Config) { c.Role, c.NoPrefixCache, c.Transport = connector.Consumer, true, transport })
	return s
}

// round is D1's requests, one after the other, and how long each took from both legs to the last token.
func (s *muteScene) round(b *testing.B) []time.Duration {
	took := make([]time.Duration, 0, muteRequests)
	for range muteRequests {
		s.serial++
		prefill, decode := s.legs(fmt.Sprint("d1-", s.serial), prompt(mutePrompt, s.serial), muteAnswer)
		decode.IgnoreEOS = true
		began := time.Now()
		d, p := submit1(b, s.d, decode), submit1(b, s.p, prefill)
		a := read(b, d)
		took = append(took, time.Since(began))
		if a.Err != nil || len(a.Tokens) != muteAnswer || a.Transfer.Transport != s.transport {
			b.Fatalf("D1: %+v", a.Output)
		}
		if a := read(b, p); a.Err != nil {
			b.Fatalf("P: %v", a.Err)
		}
	}
	return took
}

func (s *muteScene) stats() worker.Stats { return s.p.parts.worker.(*worker.Worker).Stats() }

// await waits until P's worker is as it must become.
func (s *muteScene) await(b *testing.B, what string, ok func(worker.Stats) bool) {
	b.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(s.stats()); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("%s: P stays %+v with %d handshakes", what, s.stats(), s.handshakes.Load())
		}
	}
}

// muteD2 is the hostile decode engine.
type muteD2 struct {
	agent  *tcp.Agent
	to     agent.PeerID // P
	port   *mutePort    // side channel, or relay before the agent
	side   *peer.Listener
	engine kv.EngineID
	at     *net.TCPAddr // of the side channel
	grant  agent.GrantID
	blocks kv.BlockIDs // for a whole prompt
	fresh  bool        // each registration names another engine
	serial kv.Generation
	before worker.Stats // P's

	stop context.CancelFunc
	done sync.WaitGroup
}

// hostile starts a D2 and returns when it is as bad as it gets: P holds KV for it and waits for it.
func (s *muteScene) hostile(b *testing.B, answers bool) *muteD2 {
	s.serial++
	id, text := fmt.Sprint("mute-", s.serial), prompt(muteHeld, s.serial)
	prefill, _ := s.legs(id, text, 1)
	if a := generate(b, s.p, prefill); a.Err != nil {
		b.Fatal(a.Err)
	}
	x := &muteD2{engine: kv.EngineID(id), fresh: !answers, before: s.stats()}
	if answers {
		x.answering(b, s.agent.Name())
	} else {
		x.silent(b)
	}
	x.connect(b, s)
	if answers {
		// The first registration makes P connect; the WRITE comes when nothing is read any more.
		must(b, x.register(&wire.PushReg{RequestID: "cmpl-first-0-bbbbbbbb", TransferID: "xfer-first"}))
		eventually(b, s.p, func(Stats) bool { return s.handshakes.Load() == 0 && s.p.parts.peers() == 2 })
		x.port.stalled.Store(true)
	}
	must(b, x.register(&wire.PushReg{RequestID: kv.RequestID("cmpl-" + id + "-0-bbbbbbbb"), TransferID: kv.TransferID("xfer-" + id),
		Extension: &wire.PushRegExtension{PromptDigest: core.Digest(text, core.Keys{})}}))
	s.await(b, "hostile", func(w worker.Stats) bool {
		return w.Matched > x.before.Matched && (answers && w.InFlight == 1 || !answers && s.handshakes.Load() > 0)
	})
	var ctx context.Context
	ctx, x.stop = context.WithCancel(context.Background())
	x.done.Go(func() { x.again(b, ctx) })
	return x
}

// silent makes a side channel that never answers, and an agent.
func (x *muteD2) silent(b *testing.B) {
	x.port = newMutePort(b)
	x.port.serve("")
	x.at = x.port.Addr().(*net.TCPAddr)
	var err error
	x.agent, err = tcp.New(tcp.Config{})
	must(b, err)
	x.blocks = kv.BlockIDs{make([]kv.BlockID, (muteHeld+15)/16)}
}

// answering makes an agent behind a relay, a cache that P may write, and a side channel that tells of both.
func (x *muteD2) answering(b *testing.B, p agent.Name) {
	cfg := Config{EngineID: x.engine, Model: tiny(), NumBlocks: 160}.withDefaults()
	x.port = newMutePort(b)
	var err error
	x.agent, err = tcp.New(tcp.Config{Advertise: []string{x.port.Addr().String()}})
	must(b, err)
	x.port.serve(x.agent.Addr().String())
	mem, err := x.agent.Alloc(model.CacheBytes(cfg.Model.Config(), cfg.BlockSize, cfg.NumBlocks))
	must(b, err)
	x.grant, err = x.agent.Grant(agent.GrantSpec{Peer: p, Ranges: []kv.Descriptor{{Addr: mem.Addr(), Length: uint64(len(mem.Bytes()))}}})
	must(b, err)
	cache, err := model.NewCache(cfg.Model.Config(), model.CacheShape{BlockSize: cfg.BlockSize, NumBlocks: cfg.NumBlocks}, mem.Bytes())
	must(b, err)
	ln, err := peer.Listen("127.0.0.1:0")
	must(b, err)
	x.at = ln.Addr().(*net.TCPAddr)
	x.side, err = peer.NewListener(ln, peer.ListenerConfig{})
	must(b, err)
	_, _, err = (&parts{cache: cache, listener: x.side}).announce(cfg, x.agent)
	must(b, err)
	x.blocks = kv.BlockIDs{nil}
	for i := range kv.BlockID((muteHeld + 15) / 16) {
		x.blocks[0] = append(x.blocks[0], i)
	}
}

// connect connects the agent with P's, by which registrations travel.
func (x *muteD2) connect(b *testing.B, s *muteScene) {
	x.done.Go(func() {
		for range x.agent.Events() {
		}
	})
	p, err := x.agent.AddPeer(b.Context(), agent.PeerInfo{Offers: s.agent.Offers()})
	must(b, err)
	x.to = p.ID
}

// register sends a registration, of which the caller gives what is not always the same.
func (x *muteD2) register(r *wire.PushReg) error {
	x.serial++
	r.DecodeEngineID, r.DecodeHost, r.DecodePort, r.DecodeTPSize = x.engine, x.at.IP.String(), x.at.Port, 1
	if r.LocalBlockIDs = x.blocks; x.fresh && x.serial > 1 {
		r.DecodeEngineID = kv.EngineID(fmt.Sprint(x.engine, "-", x.serial))
	}
	if r.Extension == nil {
		r.Extension = &wire.PushRegExtension{}
	}
	r.Extension.Grant, r.Extension.NumTokens, r.Extension.Generation = x.grant, muteHeld, x.serial
	msg, err := wire.AppendPushReg(nil, r)
	if err != nil {
		return err
	}
	return x.agent.Notify(x.to, msg)
}

// again registers until it is stopped.
func (x *muteD2) again(b *testing.B, ctx context.Context) {
	tick := time.NewTicker(muteEvery)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := x.register(&wire.PushReg{RequestID: kv.RequestID(fmt.Sprintf("cmpl-again%d-0-bbbbbbbb", n)), TransferID: kv.TransferID(fmt.Sprint("xfer-again", n))})
		if err != nil {
			b.Errorf("D2: %v", err)
			return
		}
	}
}

// leave proves that D2 was hostile to the end of the round, ends it, and waits until P is rid of it.
func (s *muteScene) leave(b *testing.B, x *muteD2) {
	x.stop()
	now := s.stats()
	switch {
	case now.RegistrationsReceived-x.before.RegistrationsReceived < uint64(muteRequests)+3:
		b.Errorf("P got %d registrations, D1's included", now.RegistrationsReceived-x.before.RegistrationsReceived)
	case x.fresh && (s.handshakes.Load() < 2 || x.port.accepted.Load() < 2):
		b.Errorf("P had %d handshakes in flight with D2, which accepted %d", s.handshakes.Load(), x.port.accepted.Load())
	case !x.fresh && now.InFlight == 0:
		b.Errorf("no WRITE for D2 is under way: %+v", now)
	}
	must(b, x.agent.Close())
	x.port.close()
	if x.side != nil {
		must(b, x.side.Close())
	}
	x.done.Wait()
	s.await(b, "afterwards", func(w worker.Stats) bool {
		return w.InFlight == 0 && w.Waiting == 0 && s.handshakes.Load() == 0
	})
}

func must(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// mutePort is a port that accepts whoever comes and never answers, or relays to another address until it
// is stalled: then it reads nothing more of what clients send.
type mutePort struct {
	net.Listener
	stalled  atomic.Bool
	accepted atomic.Int64
	running  sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		conns  []net.Conn
	}
}

func newMutePort(b *testing.B) *mutePort {
	small := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	}}
	ln, err := small.Listen(context.Background(), "tcp", "127.0.0.1:0")
	must(b, err)
	p := &mutePort{Listener: ln}
	b.Cleanup(p.close)
	return p
}

// serve begins to accept, and to relay to an address unless it is empty.
func (p *mutePort) serve(to string) {
	p.running.Go(func() { p.accept(to) })
}

func (p *mutePort) accept(to string) {
	for {
		c, err := p.Accept()
		if err != nil {
			return
		}
		p.accepted.Add(1)
		if !p.keep(c) || to == "" {
			continue
		}
		up, err := net.Dial("tcp", to)
		if err != nil || !p.keep(up) {
			_ = c.Close()
			continue
		}
		p.running.Go(func() { _, _ = io.Copy(c, up) })
		p.running.Go(func() { _, _ = io.Copy(up, gate{c, p}) })
	}
}

// keep remembers a connection to close.
func (p *mutePort) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		_ = c.Close()
		return false
	}
	p.mu.conns = append(p.mu.conns, c)
	return true
}

// close resets all connections, which tells their clients at once. It may be called again.
func (p *mutePort) close() {
	_ = p.Close()
	p.mu.Lock()
	p.mu.closed = true
	for _, c := range p.mu.conns {
		if t, ok := c.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = c.Close()
	}
	p.mu.conns = nil
	p.mu.Unlock()
	p.running.Wait()
}

var errStalled = errors.New("nothing is read any more")

// gate reads a connection until its port is stalled; what is read already when that happens is lost.
type gate struct {
	net.Conn
	port *mutePort
}

// Read ends with an error that stops the relaying of this direction, and leaves the connection open.
func (g gate) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	if g.port.stalled.Load() {
		return 0, errStalled
	}
	return n, err
}
