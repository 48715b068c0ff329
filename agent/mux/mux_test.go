package mux

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/agenttest"
	"github.com/kvferry/kvferry/agent/local"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cable is a transport of a test: a fabric of local agents under a name of its own, whose agents
// share grant ids made elsewhere.
type cable struct {
	transport string
	fabric    *local.Fabric
	mu        struct {
		sync.Mutex
		grants map[agent.GrantID]agent.GrantID // the fabric's own, by the given one
		names  []agent.Name
	}
}

func newCable(transport string) *cable {
	c := &cable{transport: transport, fabric: local.New(local.Config{})}
	c.mu.grants = map[agent.GrantID]agent.GrantID{}
	return c
}

// end is an agent on a cable.
type end struct {
	*local.Agent
	c      *cable
	offers []agent.Offer
}

func (c *cable) end(t testing.TB, name agent.Name, limits agent.Limits) *end {
	t.Helper()
	a, err := c.fabric.AgentWithLimits(name, limits)
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.names = append(c.mu.names, name)
	return &end{Agent: a, c: c, offers: []agent.Offer{{Transport: c.transport, Blob: []byte(name)}}}
}

func (e *end) Offers() []agent.Offer { return e.offers }

func (e *end) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	var down agent.PeerInfo
	for _, o := range info.Offers {
		if o.Transport == e.c.transport {
			down.Offers = append(down.Offers, agent.Offer{Transport: local.Transport, Blob: o.Blob})
		}
	}
	return e.Agent.AddPeer(ctx, down)
}

func (e *end) PeerNames(info agent.PeerInfo) (names []agent.Name) {
	for _, o := range info.Offers {
		if o.Transport == e.c.transport {
			names = append(names, agent.Name(o.Blob))
		}
	}
	return names
}

func (e *end) GrantAs(id agent.GrantID, spec agent.GrantSpec) error {
	own, err := e.Agent.Grant(spec)
	if err != nil {
		return err
	}
	e.c.mu.Lock()
	defer e.c.mu.Unlock()
	e.c.mu.grants[id] = own
	return nil
}

func (e *end) Revoke(id agent.GrantID) {
	e.c.mu.Lock()
	own := e.c.mu.grants[id]
	e.c.mu.Unlock()
	e.Agent.Revoke(own)
}

func (e *end) Post(t agent.Transfer) (agent.TransferID, error) {
	e.c.mu.Lock()
	t.Grant = e.c.mu.grants[t.Grant]
	e.c.mu.Unlock()
	return e.Agent.Post(t)
}

// net is some cables and the muxes on all of them.
type net struct {
	cables []*cable
	n      int
}

func newNet(transports ...string) *net {
	w := &net{}
	for _, t := range transports {
		w.cables = append(w.cables, newCable(t))
	}
	return w
}

func (w *net) config(t testing.TB, limits agent.Limits) Config {
	t.Helper()
	w.n++
	cfg := Config{Limits: limits}
	for _, c := range w.cables {
		cfg.Backends = append(cfg.Backends, Backend{Agent: c.end(t, agent.Name(fmt.Sprintf("agent-%d", w.n)), limits)})
	}
	return cfg
}

func (w *net) mux(t testing.TB, cfg Config) *Mux {
	t.Helper()
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestConformance(t *testing.T) {
	for name, c := range map[string]struct {
		transports []string
		setting    string
	}{
		"one":    {[]string{"red"}, Auto},
		"first":  {[]string{"red", "blue"}, Auto},
		"second": {[]string{"red", "blue"}, "blue"},
		"third":  {[]string{"red", "blue", "green"}, "green"},
	} {
		t.Run(name, func(t *testing.T) {
			agenttest.Run(t, func(testing.TB) agenttest.Net {
				w := newNet(c.transports...)
				return agenttest.Net{
					New: func(t testing.TB, limits agent.Limits) agent.Agent {
						cfg := w.config(t, limits)
						cfg.Transport = c.setting
						return w.mux(t, cfg)
					},
					Stall: func(_ testing.TB, a agent.Agent) func() {
						for _, c := range w.cables {
							c.others(a.Name(), c.fabric.Partition)
						}
						return func() {
							for _, c := range w.cables {
								c.others(a.Name(), c.fabric.Heal)
							}
						}
					},
					Kill: func(_ testing.TB, a agent.Agent) {
						for _, c := range w.cables {
							c.others(a.Name(), c.fabric.Cut) // before Kill revokes its grants
							c.fabric.Kill(a.Name())
							c.others(a.Name(), c.fabric.Heal)
						}
					},
				}
			}, agenttest.Options{Bubble: true})
		})
	}
}

// others calls do for a and every other agent.
func (c *cable) others(a agent.Name, do func(a, b agent.Name)) {
	c.mu.Lock()
	names := slices.Clone(c.mu.names)
	c.mu.Unlock()
	for _, b := range names {
		if b != a {
			do(a, b)
		}
	}
}
