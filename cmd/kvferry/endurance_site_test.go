package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/engine/api"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/proxy"
	"github.com/kvferry/kvferry/proxy/core"
)

const (
	// enduranceLease makes heartbeats of a second, the shortest there are, so that what a lease or three
	// heartbeats bring home comes home within the run.
	enduranceLease = 6 * time.Second
	// endurancePark is how long loads may wait for each other's blocks in pools that are meant to be too small.
	endurancePark = 5 * time.Second
	// enduranceBlocks are the pools of P and D: a few requests fill one, so that running ones are
	// preempted while KV of others is on its way.
	endurancePrefillBlocks, enduranceDecodeBlocks = 56, 44
)

// enduranceSite is two prefill engines, two decode engines, a router and a single engine to compare
// with, all in this process. The first of each two chooses its transport, which is shared memory with each other;
// the second has TCP behind a relay that can be cut.
type enduranceSite struct {
	mode            kv.TransferMode
	prefill, decode [2]*host
	single          *host
	router          *proxy.Router
	routerURL       string
	closers         []func()
}

func newEnduranceSite(mode kv.TransferMode) (s *enduranceSite, err error) {
	s = &enduranceSite{mode: mode}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	for i := range 2 {
		cfg := engine.Config{Mode: mode, Role: connector.Producer, NumBlocks: endurancePrefillBlocks, MaxBatchTokens: 64, MaxRunning: 8,
			Threads: 1, Lease: enduranceLease, ParkTimeout: endurancePark, MaxQueue: 4096}
		if s.prefill[i], err = s.start(fmt.Sprintf("prefill%d", i), cfg, i == 1); err != nil {
			return s, err
		}
		cfg.Role, cfg.NumBlocks = connector.Consumer, enduranceDecodeBlocks
		if i == 1 {
			cfg.LoadFailurePolicy = kv.RecomputeOnLoadFailure
		}
		if s.decode[i], err = s.start(fmt.Sprintf("decode%d", i), cfg, i == 1); err != nil {
			return s, err
		}
	}
	if s.single, err = s.start("single", engine.Config{NumBlocks: 2048, Threads: 1, MaxQueue: 4096}, false); err != nil {
		return s, err
	}
	cfg := proxy.Config{DecodePolicy: inPairs{&core.RoundRobin{}, new(int)}}
	for i := range 2 {
		cfg.Prefill = append(cfg.Prefill, proxy.Target{URL: s.prefill[i].url})
		cfg.Decode = append(cfg.Decode, proxy.Target{URL: s.decode[i].url})
	}
	if s.router, err = proxy.New(cfg); err != nil {
		return s, err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return s, err
	}
	s.routerURL = "http://" + ln.Addr().String()
	s.serve(ln, s.router.Server(), s.router.Close)
	return s, nil
}

func (s *enduranceSite) engines() []*host {
	return []*host{s.prefill[0], s.prefill[1], s.decode[0], s.decode[1]}
}

// serve runs a server until the site is closed; then is called when it has ended.
func (s *enduranceSite) serve(ln net.Listener, srv *http.Server, then func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(ln)
	}()
	s.closers = append(s.closers, func() {
		_ = srv.Close()
		<-done
		then()
	})
}

// close ends everything, the router first.
func (s *enduranceSite) close() {
	for i := len(s.closers) - 1; i >= 0; i-- {
		s.closers[i]()
	}
	s.closers = nil
}

// inPairs takes each engine twice in turn, so that every prefill engine meets every decode engine.
type inPairs struct {
	turns *core.RoundRobin
	n     *int
}

// Pick is core.Policy's.
func (p inPairs) Pick(candidates []core.Candidate) int {
	pick := p.turns.Pick(candidates)
	if *p.n++; *p.n%2 == 0 && len(candidates) > 1 {
		pick = p.turns.Pick(candidates)
	}
	return pick
}

// host is one engine and its HTTP address, which outlives the engine: it can be ended and started again.
// One goroutine starts and ends it.
type host struct {
	name  string
	url   string
	cfg   engine.Config
	relay *relay
	lives []*life
	turn  atomic.Pointer[life]
}

// life is one engine of a host, from its start to its end.
type life struct {
	*engine.Engine
	http   http.Handler
	ledger *ledger
}

func (s *enduranceSite) start(name string, cfg engine.Config, relayed bool) (*host, error) {
	h := &host{name: name, cfg: cfg}
	if relayed {
		h.cfg.Transport = engine.TransportTCP
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		h.cfg.AgentListen = port
		if h.relay, err = newRelay(); err != nil {
			return nil, err
		}
		h.relay.run(port)
		h.cfg.AgentAdvertise = h.relay.addr
		s.closers = append(s.closers, h.relay.close)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	h.url = "http://" + ln.Addr().String()
	s.serve(ln, &http.Server{Handler: h}, func() { h.end() })
	return h, h.begin("")
}

// freePort is a HOST:PORT of this machine that nobody listened at a moment ago.
func freePort() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}

// begin starts the host's next engine; an empty id means a new one.
func (h *host) begin(id kv.EngineID) error {
	l := &life{ledger: newLedger(h.name)}
	cfg := h.cfg
	cfg.EngineID, cfg.Events = id, l.ledger
	e, err := engine.New(cfg)
	if err != nil {
		return fmt.Errorf("%s: %w", h.name, err)
	}
	l.Engine = e
	srv, err := api.New(api.Config{Engine: e})
	if err != nil {
		return errors.Join(err, e.Close(context.Background()))
	}
	l.http = srv
	h.lives = append(h.lives, l)
	h.turn.Store(l)
	return nil
}

// end kills the engine: nothing is waited for.
func (h *host) end() {
	l := h.turn.Swap(nil)
	if l == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = l.Close(ctx)
}

func (h *host) engine() *life { return h.turn.Load() }

// ServeHTTP gives a request to the engine that lives.
func (h *host) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if l := h.engine(); l != nil {
		l.http.ServeHTTP(w, req)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusServiceUnavailable)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": h.name + " is down", "type": "down", "code": "down"}})
}

// fault is what the run does to a site beside its requests.
type enduranceFault struct {
	what string
	at   int // with this request
	do   func(*enduranceSite) error
}

// enduranceFaults are those of n requests, in turn: each engine dies and comes back, under a new id and under
// its own; connections are cut and held; prefix caches are emptied.
func enduranceFaults(n int) []enduranceFault {
	restart := func(h func(*enduranceSite) *host, keep bool) func(*enduranceSite) error {
		return func(s *enduranceSite) error {
			id := kv.EngineID("")
			if keep {
				id = h(s).engine().Coordinates().EngineID
			}
			h(s).end()
			return h(s).begin(id)
		}
	}
	relays := func(s *enduranceSite, do func(*relay)) {
		do(s.prefill[1].relay)
		do(s.decode[1].relay)
	}
	p := func(i int) func(*enduranceSite) *host { return func(s *enduranceSite) *host { return s.prefill[i] } }
	d := func(i int) func(*enduranceSite) *host { return func(s *enduranceSite) *host { return s.decode[i] } }
	kinds := []enduranceFault{
		{what: "kill prefill0", do: restart(p(0), false)},
		{what: "cut connections", do: func(s *enduranceSite) error {
			relays(s, func(r *relay) { r.cut(false) })
			return nil
		}},
		{what: "kill decode1", do: restart(d(1), false)},
		{what: "empty caches", do: func(s *enduranceSite) error {
			var all sync.WaitGroup
			for _, h := range s.engines() {
				all.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					defer cancel()
					_, _ = h.engine().ResetPrefixCache(ctx, true) // or it was busy all the time
				})
			}
			all.Wait()
			return nil
		}},
		{what: "kill prefill1, same id", do: restart(p(1), true)},
		{what: "hold connections", do: func(s *enduranceSite) error {
			relays(s, (*relay).hold)
			time.Sleep(1500 * time.Millisecond)
			relays(s, (*relay).release)
			return nil
		}},
		{what: "kill decode0, same id", do: restart(d(0), true)},
	}
	out := make([]enduranceFault, n/300+2)
	for i := range out {
		out[i] = kinds[i%len(kinds)]
		out[i].at = (i + 1) * n / (len(out) + 2)
	}
	return out
}
