package fault

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
	"github.com/kvferry/kvferry/kv"
)

// ErrInjected is the cause of faults that a rule gives no other for.
var ErrInjected = errors.New("injected fault")

// Options of a wrapper.
type Options struct {
	// Limits are those of the inner agent: the wrapper queues events under the same ones.
	Limits agent.Limits
	// Seed of rules with a Chance.
	Seed uint64
	// After calls f once, d from now, unless stop is called before; not from within After.
	// Default: time.AfterFunc.
	After func(d time.Duration, f func()) (stop func())
	// Now is the clock that belongs to After. Default: time.Now.
	Now func() time.Time
}

// Agent is a wrapped agent. Its methods may be called from any goroutine. They block as the inner
// agent's do, and AddPeer as its rules say.
type Agent struct {
	agent.Agent // the inner one: Name, Capabilities, Offers, memory, lists, grants
	opts        Options
	events      *events.Queue
	pumped      chan struct{} // closed when the inner agent's events have ended
	closing     chan struct{}
	closer      sync.Once
	err         error // of Close

	mu struct {
		sync.Mutex
		rules  []*active
		rand   *rand.Rand
		closed bool

		last  agent.TransferID
		outer map[agent.TransferID]*transfer // by the id that the user knows
		inner map[agent.TransferID]*transfer // by the inner agent's id
		lists map[agent.ListID]agent.PeerID  // whose a remote list is
		peers map[agent.PeerID]*peer
		timer map[*timer]struct{}
	}
}

var _ agent.Agent = (*Agent)(nil)
var _ agent.Namer = (*Agent)(nil)

// Wrap takes over an agent: its events are read by the wrapper alone, and Close closes it.
func Wrap(inner agent.Agent, opts Options) *Agent {
	if opts.After == nil {
		opts.After = func(d time.Duration, f func()) func() {
			t := time.AfterFunc(d, f)
			return func() { t.Stop() }
		}
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	opts.Limits = opts.Limits.WithDefaults()
	a := &Agent{
		Agent: inner, opts: opts, events: events.New(opts.Limits),
		pumped: make(chan struct{}), closing: make(chan struct{}),
	}
	a.mu.rand = rand.New(rand.NewPCG(opts.Seed, 0))
	a.mu.outer = map[agent.TransferID]*transfer{}
	a.mu.inner = map[agent.TransferID]*transfer{}
	a.mu.lists = map[agent.ListID]agent.PeerID{}
	a.mu.peers = map[agent.PeerID]*peer{}
	a.mu.timer = map[*timer]struct{}{}
	go a.pump()
	return a
}

// Inner is the wrapped agent.
func (a *Agent) Inner() agent.Agent { return a.Agent }

// Add adds rules behind those that are there. It panics if a rule's action does not apply at its
// point, which is a mistake of the test.
func (a *Agent) Add(rules ...Rule) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range rules {
		if err := r.validate(); err != nil {
			panic(err)
		}
		a.mu.rules = append(a.mu.rules, &active{Rule: r})
	}
}

// Clear removes all rules. What they have begun goes on.
func (a *Agent) Clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.rules = nil
}

// timer is a pending fault.
type timer struct{ stop func() }

// later runs f under mu, d from now, unless the agent closes before. The caller holds mu.
func (a *Agent) later(d time.Duration, f func()) *timer {
	t := &timer{stop: func() {}}
	if a.mu.closed {
		return t // what is held back now is released or lost with the agent
	}
	a.mu.timer[t] = struct{}{}
	t.stop = a.opts.After(d, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if _, pending := a.mu.timer[t]; pending {
			delete(a.mu.timer, t)
			f()
		}
	})
	return t
}

// drop ends a timer. The caller holds mu.
func (a *Agent) drop(t *timer) {
	if t != nil {
		delete(a.mu.timer, t)
		t.stop()
	}
}

// AddPeer is Agent.AddPeer.
func (a *Agent) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	a.mu.Lock()
	r := a.decide(Occasion{Point: OnAddPeer})
	a.mu.Unlock()
	if r != nil {
		fail := func(err error) (agent.Peer, error) {
			return agent.Peer{}, &agent.PeerError{Phase: "dial", Err: err}
		}
		switch r.Do {
		case Fail:
			return fail(r.cause())
		case Delay, Stall:
			var over chan struct{}
			if r.Do == Delay {
				over = make(chan struct{})
				defer a.opts.After(r.Delay, func() { close(over) })()
			}
			select {
			case <-over:
			case <-ctx.Done():
				return fail(ctx.Err())
			case <-a.closing:
				return agent.Peer{}, agent.ErrClosed
			}
		}
	}
	p, err := a.Agent.AddPeer(ctx, info)
	if err != nil {
		return p, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.replace(p.ID)
	a.peer(p.ID, false)
	return p, nil
}

// PeerNames is Namer.PeerNames: the inner agent's.
func (a *Agent) PeerNames(info agent.PeerInfo) []agent.Name {
	if n, ok := a.Agent.(agent.Namer); ok {
		return n.PeerNames(info)
	}
	return nil
}

// replace ends what is held back for older generations of a peer. The caller holds mu.
func (a *Agent) replace(id agent.PeerID) {
	for old, p := range a.mu.peers {
		if old.Name == id.Name && old != id && !p.inbound {
			a.forget(p, agent.OutcomePeerLost, errRemoved)
		}
	}
}

// RemovePeer is Agent.RemovePeer.
func (a *Agent) RemovePeer(id agent.PeerID) {
	a.Agent.RemovePeer(id)
	a.mu.Lock()
	defer a.mu.Unlock()
	if p := a.mu.peers[id]; p != nil {
		a.forget(p, agent.OutcomePeerLost, errRemoved)
	}
}

// Prepare is Agent.Prepare.
func (a *Agent) Prepare(owner agent.PeerID, descs []kv.Descriptor) (agent.ListID, error) {
	id, err := a.Agent.Prepare(owner, descs)
	if err == nil && owner != agent.Local {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.mu.lists[id] = owner
	}
	return id, err
}

// Release is Agent.Release.
func (a *Agent) Release(id agent.ListID) {
	a.Agent.Release(id)
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.mu.lists, id)
}

// Notify is Agent.Notify.
func (a *Agent) Notify(id agent.PeerID, msg []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return agent.ErrClosed
	}
	p := a.mu.peers[id]
	r := a.decide(Occasion{Point: OnNotify, Peer: id.Name, Msg: msg})
	if r == nil || p == nil {
		err := a.Agent.Notify(id, msg)
		if p != nil {
			p.passed(&p.outgoing)
		}
		return err
	}
	msg = slices.Clone(msg)
	send := func() { _ = a.Agent.Notify(id, msg) }
	switch r.Do {
	case Fail:
		return &agent.PeerError{Peer: id.Name, Phase: "notify", Err: r.cause()}
	case Drop:
	case Delay:
		a.later(r.Delay, send)
	case Duplicate:
		send()
		return a.Agent.Notify(id, msg)
	case Reorder:
		p.hold(&p.outgoing, r.Delay, send)
	case Cut:
		a.cut(p, r.cause())
		return &agent.PeerError{Peer: id.Name, Phase: "notify", Err: r.cause()}
	}
	return nil
}

// Events is Agent.Events.
func (a *Agent) Events() <-chan agent.Event { return a.events.Events() }

// Close is Agent.Close.
func (a *Agent) Close() error {
	a.closer.Do(func() {
		a.mu.Lock()
		a.mu.closed = true
		for t := range a.mu.timer {
			a.drop(t)
		}
		for _, t := range a.ordered() {
			t.release(agent.OutcomeClosed, agent.ErrClosed)
		}
		a.mu.Unlock()
		close(a.closing)
		a.err = a.Agent.Close()
		<-a.pumped
		a.events.Close()
	})
	return a.err
}
