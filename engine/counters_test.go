package engine

import (
	"context"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/fault"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/metrics"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// countedPair is a pair whose events are counted and whose agents can be made to fail.
type countedPair struct {
	pair
	fabric  *local.Fabric
	metrics map[connector.Role]*metrics.Metrics
	agents  map[connector.Role]*fault.Agent
}

func newCountedPair(t *testing.T, mode kv.TransferMode, change func(*Config)) countedPair {
	c := countedPair{fabric: local.New(local.Config{}), metrics: map[connector.Role]*metrics.Metrics{}, agents: map[connector.Role]*fault.Agent{}}
	c.pair = newPair(t, func(cfg *Config) {
		cfg.Mode, cfg.NumBlocks = mode, 64
		role := cfg.Role
		c.metrics[role] = metrics.New(metrics.Config{Model: "m", Mode: mode})
		cfg.Events = event.Tee(c.metrics[role], event.SinkFunc(func(e event.Event) {
			if e, ok := e.(event.NotificationFailed); ok {
				t.Logf("%s: %s to %s: %v", role, e.What, e.Peer, e.Err)
			}
		}))
		cfg.newAgent = func(cfg Config) (agent.Agent, error) {
			a, err := c.fabric.Agent(agent.Name(cfg.EngineID))
			if err != nil {
				return nil, err
			}
			c.agents[role] = fault.Wrap(a, fault.Options{})
			return c.agents[role], nil
		}
		if change != nil {
			change(cfg)
		}
	})
	return c
}

// moved are counters and by how much.
type moved map[string]float64

// failures are the failure counters of an engine: kvferry's by kind, the stock ones by name; and its KV bytes and
// the transfers that it has posted.
func failures(t *testing.T, c prometheus.Collector) moved {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := moved{}
	for _, f := range families {
		name, own := strings.CutPrefix(f.GetName(), "kvferry_connector_")
		stock, isStock := strings.CutPrefix(strings.TrimSuffix(f.GetName(), "_total"), "vllm:nixl_num_")
		for _, m := range f.GetMetric() {
			switch {
			case own && (name == "failures_total" || name == "bytes_total" || name == "transfers_total"):
				for _, l := range m.GetLabel() {
					if l.GetName() == "kind" || l.GetName() == "direction" || l.GetValue() == "posted" {
						out[l.GetValue()] = m.GetCounter().GetValue()
					}
				}
			case isStock && m.GetCounter() != nil:
				out["stock "+stock] = m.GetCounter().GetValue()
			}
		}
	}
	return out
}

func (c countedPair) failures(t *testing.T) (p, d moved) {
	t.Helper()
	return failures(t, c.metrics[connector.Producer]), failures(t, c.metrics[connector.Consumer])
}

func (m moved) since(before moved) moved {
	out := moved{}
	for k, v := range m {
		if v != before[k] {
			out[k] = v - before[k]
		}
	}
	return out
}

// What each fault moves. kvferry's own counters count a fault once in each engine that it concerns; the
// stock ones, next to them, as stock engines do (their failed_transfers is a sum).
var (
	nothing       = moved{}
	handshake     = moved{"handshake": 1, "stock failed_transfers": 1}
	transfer      = moved{"transfer": 1, "stock failed_transfers": 1}
	notification  = moved{"notification": 1, "stock failed_notifications": 1, "stock failed_transfers": 1}
	expired       = moved{"lease_expired": 1, "stock kv_expired_reqs": 1}
	received      = moved{"receive": 1} // KV did not come, and D has seen no cause of its own
	stray         = moved{"notification_dropped": 1}
	lateStray     = moved{"notification_dropped": 1, "stock notifications_after_expiry": 1}
	both          = []kv.TransferMode{kv.Push, kv.Pull}
	pushOnly      = []kv.TransferMode{kv.Push}
	pullOnly      = []kv.TransferMode{kv.Pull}
	lease         = func(c *Config) { c.Lease = shortLease }
	secondSilence = func(c *Config) { c.TransferSilence = time.Second }
)

// Each fault moves one failure counter, by one, in each engine that it concerns (in failures_total; the
// stock counters follow their own rules), and no bytes are counted of what did not arrive.
func TestOneFaultOneCounter(t *testing.T) {
	p := prompt(70, 9)
	fails := func(phase connector.Phase) func(*testing.T, answer) {
		return func(t *testing.T, a answer) {
			if a.Err == nil || a.Err.Phase != string(phase) {
				t.Errorf("D answers %v (%v), want an error in phase %s", a.Tokens, a.Err, phase)
			}
		}
	}
	works := func(t *testing.T, a answer) { checkAnswer(t, "D", a, expect(t, p, 3, model.Sampling{})) }
	// sent runs both legs with a rule for an agent, and checks D's answer.
	sent := func(role connector.Role, rule fault.Rule, check func(*testing.T, answer)) func(*testing.T, countedPair) {
		return func(t *testing.T, c countedPair) {
			c.agents[role].Add(rule)
			_, d := c.handOff(t, "r", p, 3)
			check(t, d)
		}
	}
	poster := map[kv.TransferMode]connector.Role{kv.Push: connector.Producer, kv.Pull: connector.Consumer}
	posted := func(do fault.Action) func(*testing.T, countedPair) {
		return func(t *testing.T, c countedPair) {
			sent(poster[c.p.cfg.Mode], fault.Rule{Match: fault.Match{On: fault.OnPost}, Do: do, Times: 1}, fails(connector.PhaseTransfer))(t, c)
		}
	}
	says := func(text string) func(fault.Occasion) bool {
		return func(o fault.Occasion) bool { return strings.Contains(string(o.Msg), text) }
	}
	for _, c := range []struct {
		name         string
		modes        []kv.TransferMode
		change       func(*Config)
		before       func(*testing.T, countedPair) any // what must be over before counters are read
		run          func(*testing.T, countedPair)
		after        func(*testing.T, countedPair, any)
		p, d         moved           // in push, and in pull unless that is below
		pPull, dPull moved           // in pull
		repeats      map[string]bool // counters of what is tried again
		may          []string        // counters of a message that may cross another on its way
		bytes        bool            // KV arrives
	}{
		{name: "none", modes: both, run: func(t *testing.T, c countedPair) { _, d := c.handOff(t, "r", p, 3); works(t, d) }, bytes: true, p: nothing, d: nothing},
		{name: "D leaves", modes: both, run: func(t *testing.T, c countedPair) {
			_, leg := c.begin(t, "r", p, 3)
			_, decode := leg()
			s := submit1(t, c.d, decode)
			s.Close()
			read(t, s)
		}, bytes: true, p: nothing, d: nothing, may: []string{"notification_dropped", "stock notifications_after_expiry"}}, // a completion
		{name: "D leaves during the transfer", modes: both, run: func(t *testing.T, c countedPair) {
			role := poster[c.p.cfg.Mode]
			c.agents[role].Add(fault.Rule{Match: fault.Match{On: fault.OnPost}, Do: fault.Drop, Times: 1})
			_, leg := c.begin(t, "r", p, 3)
			_, decode := leg()
			s := submit1(t, c.d, decode)
			eventually(t, c.d, func(Stats) bool { return failures(t, c.metrics[role])["posted"] == 1 })
			s.Close()
			read(t, s)
		}, p: nothing, d: nothing},
		{name: "D cannot reach P", modes: both, p: nothing, d: handshake, run: func(t *testing.T, c countedPair) {
			if c.p.cfg.Mode == kv.Push {
				_, decode := c.legs("r", p, 3)
				decode.Params.RemoteEngineID = "another"
				fails(connector.PhaseHandshake)(t, generate(t, c.d, decode))
				return
			}
			decode := c.prefilled(t, "r", p, 3)
			wrong, params := decode, *decode.Params
			params.RemoteEngineID = "another"
			wrong.ID, wrong.Params = "wrong-bbbbbbbb", &params
			fails(connector.PhaseHandshake)(t, generate(t, c.d, wrong))
			works(t, generate(t, c.d, decode)) // so that P's lease has its D
		}, bytes: true},
		{name: "P cannot reach D", modes: both, p: handshake, d: received, repeats: map[string]bool{"handshake": true, "stock failed_transfers": true},
			change: func(c *Config) {
				c.Lease = 3 * time.Second
				if c.Role == connector.Consumer {
					c.AdvertiseHost = "127.0.0.2" // where nobody listens
				}
			},
			run: func(t *testing.T, c countedPair) {
				_, d := c.handOff(t, "r", p, 3)
				fails(connector.PhaseWait)(t, d)
			}},
		{name: "a transfer stands still", modes: both, change: secondSilence, run: posted(fault.Drop), p: transfer, d: received, pPull: nothing, dPull: transfer},
		{name: "a transfer is not taken", modes: both, run: posted(fault.Fail), p: transfer, d: received, pPull: nothing, dPull: transfer},
		{name: "no D comes", modes: both, change: lease, run: func(t *testing.T, c countedPair) {
			_, leg := c.begin(t, "r", p, 3)
			leg()
			settle(t, c.p)
		}, p: expired, d: nothing},
		{name: "no prefill comes", modes: pushOnly, change: func(c *Config) { c.Lease = 2 * shortLease }, run: func(t *testing.T, c countedPair) {
			_, decode := c.legs("r", p, 3)
			fails(connector.PhasePrefill)(t, generate(t, c.d, decode))
		}, p: nothing, d: received},
		{name: "registration timeout", modes: pushOnly, change: func(c *Config) {
			if c.Role == connector.Consumer { // P's own ends what waits there
				c.RegistrationTimeout = time.Second
			}
		}, run: func(t *testing.T, c countedPair) {
			_, decode := c.legs("r", p, 3)
			fails(connector.PhaseWait)(t, generate(t, c.d, decode))
		}, p: nothing, d: received},
		{name: "the prefill is aborted", modes: pushOnly, run: func(t *testing.T, c countedPair) {
			prefill, decode := c.legs("r", prompt(900, 9), 3)
			d := submit1(t, c.d, decode)
			s := submit1(t, c.p, prefill)
			s.Close()
			read(t, s)
			fails(connector.PhasePrefill)(t, read(t, d))
		}, p: nothing, d: received},
		{name: "the prompts differ", modes: pushOnly, run: func(t *testing.T, c countedPair) {
			prefill, decode := c.legs("r", p, 3)
			decode.Prompt = prompt(70, 10)
			var legs sync.WaitGroup
			legs.Go(func() { generate(t, c.p, prefill) })
			fails(connector.PhaseRegistration)(t, generate(t, c.d, decode))
			legs.Wait()
			_, again := c.legs("r", p, 3)
			again.ID = "cmpl-r-0-cccccccc"
			works(t, generate(t, c.d, again))
		}, p: nothing, d: received, bytes: true},
		{name: "a claim is refused", modes: pullOnly, run: func(t *testing.T, c countedPair) {
			decode := c.prefilled(t, "r", p, 3)
			wrong, params := decode, *decode.Params
			params.Lease--
			wrong.ID, wrong.Params = "wrong-bbbbbbbb", &params
			fails(connector.PhaseLease)(t, generate(t, c.d, wrong))
			works(t, generate(t, c.d, decode))
		}, p: nothing, d: received, bytes: true},
		{name: "KV has expired when it is read", modes: pullOnly, change: lease, before: func(t *testing.T, c countedPair) any {
			decode := c.prefilled(t, "r", p, 3)
			settle(t, c.p)
			return decode
		}, after: func(t *testing.T, c countedPair, decode any) {
			fails(connector.PhaseLease)(t, generate(t, c.d, decode.(Request)))
		}, p: nothing, d: received},
		{name: "D is done after the lease", modes: pullOnly, change: lease, before: func(t *testing.T, c countedPair) any {
			whole := p[:65]
			generate(t, c.d, Request{ID: "warm-cache", Prompt: whole, MaxTokens: 1}) // so that D needs nothing
			decode := c.prefilled(t, "r", whole, 1)
			settle(t, c.p)
			return decode
		}, after: func(t *testing.T, c countedPair, decode any) {
			if a := generate(t, c.d, decode.(Request)); a.Err != nil {
				t.Error(a.Err)
			}
			eventually(t, c.d, func(Stats) bool {
				p, _ := c.failures(t)
				return p["stock notifications_after_expiry"] > 0
			})
		}, p: lateStray, d: nothing},
		{name: "the registration cannot be sent", modes: pushOnly, change: lease,
			run: func(t *testing.T, c countedPair) {
				c.agents[connector.Consumer].Add(fault.Rule{Match: fault.Match{On: fault.OnNotify, Where: says("PUSH_REG")}, Do: fault.Fail, Times: 1})
				_, decode := c.legs("r", p, 3)
				fails(connector.PhaseRegistration)(t, generate(t, c.d, decode))
			}, p: nothing, d: notification},
		{name: "the claim cannot be sent", modes: pullOnly, change: func(c *Config) { c.Lease = 6 * time.Second },
			run: sent(connector.Consumer, fault.Rule{Match: fault.Match{On: fault.OnNotify, Where: says("\xa4kind\xa5claim")}, Do: fault.Fail, Times: 1}, works),
			p:   nothing, d: notification, bytes: true},
		{name: "the registration or claim is lost", modes: both, change: func(c *Config) { c.Lease = 6 * time.Second },
			run: sent(connector.Consumer, fault.Rule{Match: fault.Match{On: fault.OnNotify}, Do: fault.Drop, Times: 1}, works),
			p:   nothing, d: nothing, bytes: true},
		{name: "the completion is lost", modes: pushOnly, change: func(c *Config) { c.Lease = 3 * time.Second },
			run: sent(connector.Consumer, fault.Rule{Match: fault.Match{On: fault.OnNotification, Prefix: "cmpl-r-0-bbbbbbbb"}, Do: fault.Drop, Times: 1}, fails(connector.PhaseTransfer)),
			p:   nothing, d: received, bytes: true},
		{name: "the completion is lost", modes: pullOnly, change: func(c *Config) { c.Lease = 2 * time.Second },
			run: sent(connector.Producer, fault.Rule{Match: fault.Match{On: fault.OnNotification, Where: says("\xa4kind\xa4read")}, Do: fault.Drop, Times: 1}, works),
			p:   expired, d: nothing, bytes: true},
		{name: "a message of nobody", modes: both, run: func(t *testing.T, c countedPair) {
			stranger, err := c.fabric.Agent("stranger")
			if err != nil {
				t.Fatal(err)
			}
			defer stranger.Close()
			to, err := stranger.AddPeer(context.Background(), agent.PeerInfo{Offers: c.agents[connector.Producer].Offers()})
			if err != nil {
				t.Fatal(err)
			}
			if err := stranger.Notify(to.ID, []byte("\xff\x00")); err != nil {
				t.Fatal(err)
			}
			eventually(t, c.p, func(Stats) bool {
				p, _ := c.failures(t)
				return p["notification_dropped"] > 0
			})
		}, p: stray, d: nothing},
	} {
		for _, mode := range c.modes {
			t.Run(c.name+"/"+string(mode), func(t *testing.T) {
				t.Parallel()
				x := newCountedPair(t, mode, c.change)
				var state any
				if c.before != nil {
					state = c.before(t, x)
				}
				p0, d0 := x.failures(t)
				if c.run != nil {
					c.run(t, x)
				} else {
					c.after(t, x, state)
				}
				settle(t, x.p)
				settle(t, x.d)
				p1, d1 := x.failures(t)
				wantP, wantD := c.p, c.d
				if mode == kv.Pull && c.pPull != nil {
					wantP = c.pPull
				}
				if mode == kv.Pull && c.dPull != nil {
					wantD = c.dPull
				}
				for _, k := range c.may {
					p1[k], d1[k] = p0[k], d0[k]
				}
				checkMoved(t, "P", p1.since(p0), wantP, c.repeats, c.bytes)
				checkMoved(t, "D", d1.since(d0), wantD, c.repeats, c.bytes)
			})
		}
	}
}

func checkMoved(t *testing.T, who string, got, want moved, repeats map[string]bool, bytes bool) {
	t.Helper()
	delete(got, "posted")
	for _, direction := range []string{"sent", "received"} {
		if got[direction] != 0 && !bytes {
			t.Errorf("%s counts %v bytes %s", who, got[direction], direction)
		}
		delete(got, direction)
	}
	for k := range repeats {
		if got[k] > 1 {
			got[k] = 1
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("%s: moved %v, want %v", who, got, want)
	}
}
