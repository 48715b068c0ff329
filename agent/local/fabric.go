package local

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/kv"
)

// Transport is the name of this backend in an agent.Offer.
const Transport = "local"

// ErrReset is the cause of peer losses made by Cut and Kill.
var ErrReset = errors.New("connection reset by peer")

// ErrRemoved is what a peer sees that the other side has removed or closed.
var ErrRemoved = errors.New("connection closed by peer")

// Config describes the network and the clock. The zero Config is an immediate network on real time.
type Config struct {
	// Latency is the time of one way between two agents.
	Latency time.Duration
	// Bandwidth is bytes per second from one agent to another, shared by their transfers; 0 means
	// without bound.
	Bandwidth float64
	// Chunk is how many bytes are copied in one step; default 1 MiB. A Revoke waits for one step
	// at most.
	Chunk int
	// Limits of each agent; zero fields mean the defaults.
	Limits agent.Limits

	// After calls f once, d from now, unless stop is called before; not from within After.
	// Default: time.AfterFunc.
	After func(d time.Duration, f func()) (stop func())
	// Now is the clock that belongs to After. Default: time.Now.
	Now func() time.Time
	// Rand gives grant ids. Default: crypto/rand. A simulation gives a seeded one.
	Rand io.Reader
}

func (c Config) withDefaults() Config {
	if c.Chunk <= 0 {
		c.Chunk = 1 << 20
	}
	if c.After == nil {
		c.After = func(d time.Duration, f func()) func() {
			t := time.AfterFunc(d, f)
			return func() { t.Stop() }
		}
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Rand == nil {
		c.Rand = rand.Reader
	}
	c.Limits = c.Limits.WithDefaults()
	return c
}

// pair is two agents without an order.
type pair struct{ a, b agent.Name }

func pairOf(a, b agent.Name) pair {
	if a > b {
		a, b = b, a
	}
	return pair{a, b}
}

// Fabric is what connects agents. Its mutex guards the peers, links and transfers of all of them.
type Fabric struct {
	cfg Config
	mu  struct {
		sync.Mutex
		agents map[agent.Name]*Agent
		// silent holds the partitioned pairs, and what waits for each to heal, in order.
		silent map[pair][]func()
	}
}

// New makes an empty fabric.
func New(cfg Config) *Fabric {
	f := &Fabric{cfg: cfg.withDefaults()}
	f.mu.agents = map[agent.Name]*Agent{}
	f.mu.silent = map[pair][]func(){}
	return f
}

// Agent adds an agent. A name may be used again once its holder is closed or killed.
func (f *Fabric) Agent(name agent.Name) (*Agent, error) {
	return f.AgentWithLimits(name, f.cfg.Limits)
}

// AgentWithLimits adds an agent with limits of its own.
func (f *Fabric) AgentWithLimits(name agent.Name, limits agent.Limits) (*Agent, error) {
	if name == "" {
		return nil, errors.New("local agent without a name")
	}
	a := &Agent{fabric: f, name: name, front: front.New(limits, f.cfg.Rand)}
	a.peers = map[agent.Name]*link{}
	a.inbound = map[agent.PeerID]*link{}
	a.transfers = map[agent.TransferID]*transfer{}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.agents[name] != nil {
		return nil, fmt.Errorf("local agent %s exists already", name)
	}
	f.mu.agents[name] = a
	return a, nil
}

// Kill ends an agent as a dying process would: its peers see a reset, its memory is not touched any
// more. Its own user finds its transfers ended and its methods failing; Close still frees the
// memory. An unknown name is ignored.
func (f *Fabric) Kill(name agent.Name) {
	f.mu.Lock()
	a := f.mu.agents[name]
	f.mu.Unlock()
	if a != nil {
		a.end(ErrReset, false)
	}
}

// Partition stalls everything between two agents, both ways, until Heal. Nobody is told.
func (f *Fabric) Partition(a, b agent.Name) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, already := f.mu.silent[pairOf(a, b)]; !already {
		f.mu.silent[pairOf(a, b)] = nil
	}
}

// Heal ends a partition: what waited goes on, in order.
func (f *Fabric) Heal(a, b agent.Name) {
	f.mu.Lock()
	defer f.mu.Unlock()
	waiting := f.mu.silent[pairOf(a, b)]
	delete(f.mu.silent, pairOf(a, b))
	for _, fn := range waiting {
		fn()
	}
}

// Cut resets the connections of two agents, whether partitioned or not; both are told.
func (f *Fabric) Cut(a, b agent.Name) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range []agent.Name{a, b} {
		x := f.mu.agents[name]
		if x == nil {
			continue
		}
		for _, l := range x.links() {
			if pairOf(l.from.name, l.to.name) == pairOf(a, b) {
				l.lose(ErrReset)
				l.refused(ErrReset)
			}
		}
	}
}

// reach calls fn now, or when the two are no longer partitioned. The caller holds mu.
func (f *Fabric) reach(a, b agent.Name, fn func()) {
	if waiting, silent := f.mu.silent[pairOf(a, b)]; silent {
		f.mu.silent[pairOf(a, b)] = append(waiting, fn)
		return
	}
	fn()
}

// generation is the next of one agent's counter. The caller holds the fabric's mu.
func (a *Agent) generation() kv.Generation {
	a.generations++
	return a.generations
}
