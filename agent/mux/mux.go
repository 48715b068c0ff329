package mux

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
	"github.com/kvferry/kvferry/kv"
)

// Mux is an agent.Agent over several. Its methods may be called from any goroutine, and block where
// those of its backends do.
type Mux struct {
	name     agent.Name
	host     string
	setting  string
	limits   agent.Limits
	backends []backend
	offers   []agent.Offer
	queue    *events.Queue
	pumps    sync.WaitGroup
	closed   atomic.Bool
	closer   sync.Once
	closeErr error

	lists localLists
	mu    struct {
		sync.Mutex
		names  map[agent.Name]agent.PeerID   // added peers
		shares map[agent.PeerID]*events.Peer // added peers, and inbound ones that were heard of
		// adding counts AddPeers under way per backend, and early the losses seen meanwhile of
		// peers that they have not returned yet.
		adding  []int
		early   map[agent.PeerID]agent.PeerLost
		removed tombs
	}
}

var _ agent.Agent = (*Mux)(nil)
var _ agent.Namer = (*Mux)(nil)

// backend is one agent with its transport.
type backend struct {
	agent.Agent
	transport string
	sameHost  func(agent.Offer) bool
}

// New makes a Mux. When it fails, the backends remain the caller's.
func New(cfg Config) (*Mux, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	limits := cfg.Limits.WithDefaults()
	m := &Mux{
		name: cfg.Backends[0].Agent.Name(), host: cfg.HostID, setting: cfg.Transport, limits: limits,
		queue: events.New(limits),
	}
	if m.setting == "" {
		m.setting = Auto
	}
	for _, b := range cfg.Backends {
		o := b.Agent.Offers()[0]
		m.backends = append(m.backends, backend{Agent: b.Agent, transport: o.Transport, sameHost: b.SameHost})
		if m.setting == Auto || m.setting == o.Transport {
			m.offers = append(m.offers, o)
		}
	}
	m.lists.init(limits.Lists)
	m.mu.names = map[agent.Name]agent.PeerID{}
	m.mu.shares = map[agent.PeerID]*events.Peer{}
	m.mu.adding = make([]int, len(m.backends))
	m.mu.early = map[agent.PeerID]agent.PeerLost{}
	m.mu.removed.init(limits.Peers)
	for i := range m.backends {
		m.pumps.Go(func() { m.pump(i) })
	}
	return m, nil
}

// Name is Agent.Name: that of all backends.
func (m *Mux) Name() agent.Name { return m.name }

// Capabilities is Agent.Capabilities: what all backends have.
func (m *Mux) Capabilities() agent.Capabilities {
	all := m.backends[0].Capabilities()
	for _, b := range m.backends[1:] {
		c := b.Capabilities()
		all.Revocable = all.Revocable && c.Revocable
		all.CheapAdmission = all.CheapAdmission && c.CheapAdmission
		all.ParallelAdmission = all.ParallelAdmission && c.ParallelAdmission
		all.TellsArrivals = all.TellsArrivals && c.TellsArrivals
	}
	return all
}

// Offers is Agent.Offers: one of each transport that may be used.
func (m *Mux) Offers() []agent.Offer { return m.offers }

// Events is Agent.Events.
func (m *Mux) Events() <-chan agent.Event { return m.queue.Events() }

// classes is what ids are counted by: one class per backend, and one for lists of own memory.
func (m *Mux) classes() uint64 { return uint64(len(m.backends)) + 1 }

// upPeer is the id under which a backend's peer is known above, downPeer the way back.
func (m *Mux) upPeer(i int, id agent.PeerID) agent.PeerID {
	return agent.PeerID{Name: id.Name, Gen: kv.Generation(uint64(id.Gen)*m.classes() + uint64(i))}
}

func (m *Mux) downPeer(id agent.PeerID) (int, agent.PeerID, bool) {
	i := int(uint64(id.Gen) % m.classes())
	if i == len(m.backends) {
		return 0, agent.PeerID{}, false
	}
	return i, agent.PeerID{Name: id.Name, Gen: kv.Generation(uint64(id.Gen) / m.classes())}, true
}

func (m *Mux) up(i int, id uint64) uint64 { return id*m.classes() + uint64(i) }

// down is the backend of an id, or len(backends) for what belongs to none, and the id there.
func (m *Mux) down(id uint64) (int, uint64) { return int(id % m.classes()), id / m.classes() }

// Post is Agent.Post.
func (m *Mux) Post(t agent.Transfer) (agent.TransferID, error) {
	if m.closed.Load() {
		return 0, agent.ErrClosed
	}
	i, remote := m.down(uint64(t.Remote))
	if i == len(m.backends) {
		return 0, &agent.PostError{Op: t.Op, Reason: fmt.Sprintf("list %d is not a prepared list of a peer", t.Remote)}
	}
	local, ok := m.local(t.Local, i)
	if !ok {
		return 0, &agent.PostError{Op: t.Op, Reason: fmt.Sprintf("list %d is not a prepared list of this agent's memory", t.Local)}
	}
	if !m.queue.Reserve() {
		return 0, m.orClosed(agent.ErrBusy)
	}
	t.Local, t.Remote = local, agent.ListID(remote)
	id, err := m.backends[i].Post(t)
	if err != nil {
		m.queue.Unreserve()
		return 0, err
	}
	return agent.TransferID(m.up(i, uint64(id))), nil
}

func (m *Mux) orClosed(err error) error {
	if m.closed.Load() {
		return agent.ErrClosed
	}
	return err
}

// Cancel is Agent.Cancel.
func (m *Mux) Cancel(id agent.TransferID) {
	if i, down := m.down(uint64(id)); i < len(m.backends) {
		m.backends[i].Cancel(agent.TransferID(down))
	}
}

// Notify is Agent.Notify.
func (m *Mux) Notify(peer agent.PeerID, msg []byte) error {
	i, id, ok := m.downPeer(peer)
	if !ok {
		return &agent.PeerError{Peer: peer.Name, Phase: "notify", Err: errors.New("not an added peer, or no longer")}
	}
	return m.backends[i].Notify(id, msg)
}

// Grant is Agent.Grant: one id in all backends.
func (m *Mux) Grant(spec agent.GrantSpec) (agent.GrantID, error) {
	if _, ok := m.backends[0].Agent.(Granter); !ok && len(m.backends) == 1 {
		return m.backends[0].Grant(spec)
	}
	var id agent.GrantID
	_, _ = rand.Read(id[:]) // never fails
	for _, b := range m.backends {
		g, ok := b.Agent.(Granter)
		if !ok {
			continue // it has no grants to refuse without
		}
		if err := g.GrantAs(id, spec); err != nil {
			m.Revoke(id)
			return agent.GrantID{}, err
		}
	}
	return id, nil
}

// Revoke is Agent.Revoke: exact if all backends' is.
func (m *Mux) Revoke(id agent.GrantID) {
	for _, b := range m.backends {
		b.Revoke(id)
	}
}

// Close is Agent.Close.
func (m *Mux) Close() error {
	m.closer.Do(func() {
		m.closed.Store(true)
		errs := make([]error, len(m.backends))
		var wg sync.WaitGroup
		for i, b := range m.backends {
			wg.Go(func() { errs[i] = b.Close() })
		}
		wg.Wait()
		m.pumps.Wait() // their channels are closed
		m.queue.Close()
		m.closeErr = errors.Join(errs...)
	})
	return m.closeErr
}

// Alloc is Agent.Alloc: the first backend's memory, which the others register.
func (m *Mux) Alloc(length int) (agent.Memory, error) {
	mem, err := m.backends[0].Alloc(length)
	if err != nil {
		return nil, err
	}
	rest, err := m.register(m.backends[1:], mem.Addr(), length, agent.DRAM, "the agent")
	if err != nil {
		return nil, errors.Join(err, mem.Free(context.Background())) // nothing uses it
	}
	return &allocated{Memory: mem, rest: rest}, nil
}

// Register is Agent.Register.
func (m *Mux) Register(addr uint64, length int, kind agent.MemoryKind, owner string) (agent.Registration, error) {
	r, err := m.register(m.backends, addr, length, kind, owner)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// register lends memory to some backends, all or none.
func (m *Mux) register(to []backend, addr uint64, length int, kind agent.MemoryKind, owner string) (registrations, error) {
	var rs registrations
	for _, b := range to {
		r, err := b.Register(addr, length, kind, owner)
		if err != nil {
			return nil, errors.Join(err, rs.Deregister(context.Background())) // nothing uses it
		}
		rs = append(rs, r)
	}
	return rs, nil
}

// registrations are one memory's in several backends.
type registrations []agent.Registration

// Deregister is Registration.Deregister.
func (rs registrations) Deregister(ctx context.Context) error {
	// All refuse new transfers before any is waited for.
	ended, cancel := context.WithCancel(ctx)
	cancel()
	for _, r := range rs {
		_ = r.Deregister(ended)
	}
	for _, r := range rs {
		if err := r.Deregister(ctx); err != nil {
			return err
		}
	}
	return nil
}

// allocated is a Memory of the first backend that the others have registered.
type allocated struct {
	agent.Memory
	rest registrations
}

// Free is Memory.Free.
func (a *allocated) Free(ctx context.Context) error {
	if err := a.rest.Deregister(ctx); err != nil {
		return err
	}
	return a.Memory.Free(ctx)
}
