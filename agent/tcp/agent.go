package tcp

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
	"github.com/kvferry/kvferry/kv"
)

// Agent is one TCP agent. Its methods may be called from any goroutine.
type Agent struct {
	cfg      Config
	name     agent.Name
	front    *front.Front
	listener *net.TCPListener
	offers   []agent.Offer
	closer   sync.Once
	closeErr error
	running  sync.WaitGroup // all goroutines
	ctx      context.Context
	stop     context.CancelFunc // ends dialing

	mu struct {
		sync.Mutex
		closed       bool
		generation   kv.Generation
		lastTransfer agent.TransferID
		peers        map[agent.Name]*link
		sessions     map[frame.Session]*session
		pending      []*conn // accepted, no Hello yet, oldest first
		transfers    map[agent.TransferID]*outgoing
	}
}

var _ agent.Agent = (*Agent)(nil)
var _ agent.Namer = (*Agent)(nil)

// New starts an agent: it listens from now on.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	l, err := net.Listen("tcp", cfg.Listen)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("tcp agent: %s is in use by another program; choose another port: %w", cfg.Listen, syscall.EADDRINUSE)
	case err != nil:
		return nil, fmt.Errorf("tcp agent: %w", err)
	}
	listener := l.(*net.TCPListener)
	addrs, err := cfg.addresses(listener.Addr().(*net.TCPAddr))
	if err != nil {
		_ = l.Close()
		return nil, err
	}
	if cfg.Name == "" {
		var id [16]byte
		_, _ = rand.Read(id[:]) // never fails
		cfg.Name = agent.Name(hex.EncodeToString(id[:]))
	}
	a := &Agent{cfg: cfg, name: cfg.Name, listener: listener}
	a.front = front.New(cfg.Limits, rand.Reader)
	a.offers = []agent.Offer{{Transport: Transport, Blob: offer{a.name, addrs}.encode()}}
	a.ctx, a.stop = context.WithCancel(context.Background())
	a.mu.peers = map[agent.Name]*link{}
	a.mu.sessions = map[frame.Session]*session{}
	a.mu.transfers = map[agent.TransferID]*outgoing{}
	a.running.Add(1)
	go a.accept()
	return a, nil
}

// Name is Agent.Name.
func (a *Agent) Name() agent.Name { return a.name }

// Addr is the address that is listened on.
func (a *Agent) Addr() net.Addr { return a.listener.Addr() }

// Capabilities is Agent.Capabilities.
func (a *Agent) Capabilities() agent.Capabilities {
	return agent.Capabilities{Revocable: true, ParallelAdmission: true, TellsArrivals: true}
}

// Offers is Agent.Offers.
func (a *Agent) Offers() []agent.Offer { return a.offers }

// Alloc is Agent.Alloc.
func (a *Agent) Alloc(length int) (agent.Memory, error) { return a.front.Alloc(length) }

// Register is Agent.Register.
func (a *Agent) Register(addr uint64, length int, kind agent.MemoryKind, owner string) (agent.Registration, error) {
	return a.front.Register(addr, length, kind, owner)
}

// AddPeer is Agent.AddPeer. It dials every address of the offer in turn until one answers.
func (a *Agent) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	i := slices.IndexFunc(info.Offers, func(o agent.Offer) bool { return o.Transport == Transport })
	if i < 0 {
		return agent.Peer{}, &agent.PeerError{Phase: "offer", Err: errors.New("the peer offers no tcp transport")}
	}
	o, err := decodeOffer(info.Offers[i].Blob)
	if err != nil {
		return agent.Peer{}, &agent.PeerError{Phase: "offer", Err: err}
	}
	if o.name == a.name {
		return agent.Peer{}, &agent.PeerError{Peer: o.name, Phase: "offer", Err: errors.New("it is this agent itself")}
	}
	if err := a.admit(o.name); err != nil {
		return agent.Peer{}, err
	}
	l, err := a.dialAny(ctx, o)
	if err != nil {
		return agent.Peer{}, err
	}
	if err := a.publish(l); err != nil {
		for _, c := range l.conns() {
			_ = c.Close()
		}
		return agent.Peer{}, err
	}
	return agent.Peer{ID: l.id, Transport: Transport, Why: "both sides offer it, at " + l.addr}, nil
}

// PeerNames is Namer.PeerNames.
func (a *Agent) PeerNames(info agent.PeerInfo) (names []agent.Name) {
	for _, offered := range info.Offers {
		if o, err := decodeOffer(offered.Blob); offered.Transport == Transport && err == nil {
			names = append(names, o.name)
		}
	}
	return names
}

// admit removes an old generation and checks that there is room.
func (a *Agent) admit(name agent.Name) error {
	a.mu.Lock()
	old, closed := a.mu.peers[name], a.mu.closed
	a.mu.Unlock()
	if closed {
		return agent.ErrClosed
	}
	if old != nil {
		old.close(agent.OutcomePeerLost, old.fault("removal", errRemoved), false)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.room()
}

// room reports a full table of peers. The caller holds mu.
func (a *Agent) room() error {
	if n := len(a.mu.peers); n >= a.front.Limits.Peers {
		return &agent.LimitError{What: "added peers", Got: n + 1, Limit: a.front.Limits.Peers}
	}
	return nil
}

// publish makes a link the one of its name and starts it.
func (a *Agent) publish(l *link) error {
	for {
		a.mu.Lock()
		if a.mu.closed {
			a.mu.Unlock()
			return agent.ErrClosed
		}
		old := a.mu.peers[l.id.Name]
		if old == nil {
			break
		}
		a.mu.Unlock()
		old.close(agent.OutcomePeerLost, old.fault("removal", errRemoved), false)
	}
	err := a.room()
	if err == nil {
		a.mu.generation++
		l.id.Gen = a.mu.generation
		l.share = a.front.Events.NewPeer(l.id, false)
		a.mu.peers[l.id.Name] = l
		a.running.Add(l.mu.running)
	}
	a.mu.Unlock()
	if err == nil {
		l.start()
	}
	return err
}

// unlink forgets a link that has ended.
func (a *Agent) unlink(l *link) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.peers[l.id.Name] == l {
		delete(a.mu.peers, l.id.Name)
	}
}

// peer is an added peer's link, or nil.
func (a *Agent) peer(id agent.PeerID) *link {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.mu.peers[id.Name]; l != nil && l.id == id {
		return l
	}
	return nil
}

// RemovePeer is Agent.RemovePeer.
func (a *Agent) RemovePeer(id agent.PeerID) {
	if l := a.peer(id); l != nil {
		l.close(agent.OutcomePeerLost, l.fault("removal", errRemoved), false)
		return
	}
	a.mu.Lock()
	var found *session
	for _, s := range a.mu.sessions {
		if s.id == id {
			found = s
		}
	}
	a.mu.Unlock()
	if found != nil {
		found.close(errRemoved, false)
	}
}

// Prepare is Agent.Prepare.
func (a *Agent) Prepare(owner agent.PeerID, descs []kv.Descriptor) (agent.ListID, error) {
	list, err := a.front.BuildList(owner, descs)
	if err != nil {
		return 0, err
	}
	if owner == agent.Local {
		return a.front.Lists.Insert(list)
	}
	gone := &agent.PeerError{Peer: owner.Name, Phase: "prepare", Err: errors.New("not an added peer, or no longer")}
	l := a.peer(owner)
	if l == nil {
		return 0, gone
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.dead != nil {
		return 0, gone
	}
	return a.front.Lists.Insert(list)
}

// Release is Agent.Release.
func (a *Agent) Release(id agent.ListID) { a.front.Lists.Remove(id) }

// Post is Agent.Post.
func (a *Agent) Post(tr agent.Transfer) (agent.TransferID, error) {
	posted := time.Now()
	if a.front.Closed() {
		return 0, agent.ErrClosed
	}
	plan, err := a.front.Check(tr)
	if err != nil {
		return 0, err
	}
	l := a.peer(plan.Peer)
	if l == nil {
		plan.Release()
		return 0, &agent.PostError{Op: tr.Op, Reason: "peer " + string(plan.Peer.Name) + " is gone"}
	}
	t := &outgoing{link: l, plan: plan, posted: posted}
	if err := l.post(t); err != nil {
		plan.Release()
		return 0, err
	}
	return t.id, nil
}

// adopt names a transfer; zero if the agent is closed. Called with the link's mu held.
func (a *Agent) adopt(t *outgoing) agent.TransferID {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return 0
	}
	a.mu.lastTransfer++
	a.mu.transfers[a.mu.lastTransfer] = t
	return a.mu.lastTransfer
}

// forget drops a transfer that has stopped.
func (a *Agent) forget(id agent.TransferID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.mu.transfers, id)
}

// Cancel is Agent.Cancel.
func (a *Agent) Cancel(id agent.TransferID) {
	a.mu.Lock()
	t := a.mu.transfers[id]
	a.mu.Unlock()
	if t != nil {
		t.link.cancel(t)
	}
}

// Notify is Agent.Notify.
func (a *Agent) Notify(peer agent.PeerID, msg []byte) error {
	fail := func(err error) error { return &agent.PeerError{Peer: peer.Name, Phase: "notify", Err: err} }
	if len(msg) == 0 {
		return fail(errors.New("the notification is empty"))
	}
	if limit := a.front.Limits.Notification; len(msg) > limit {
		return fail(&agent.LimitError{What: "bytes of a notification", Got: len(msg), Limit: limit})
	}
	if a.front.Closed() {
		return agent.ErrClosed
	}
	l := a.peer(peer)
	if l == nil {
		return fail(errors.New("not an added peer, or no longer"))
	}
	return l.notify(msg)
}

// Grant is Agent.Grant.
func (a *Agent) Grant(spec agent.GrantSpec) (agent.GrantID, error) { return a.front.Grant(spec) }

// GrantAs is Grant under an id that the caller chose, which must be unguessable and not in use.
func (a *Agent) GrantAs(id agent.GrantID, spec agent.GrantSpec) error {
	return a.front.GrantAs(id, spec)
}

// Revoke is Agent.Revoke.
func (a *Agent) Revoke(id agent.GrantID) { a.front.Grants.Revoke(id) }

// Events is Agent.Events.
func (a *Agent) Events() <-chan agent.Event { return a.front.Events.Events() }

// Close is Agent.Close.
func (a *Agent) Close() error {
	a.closer.Do(func() {
		a.front.BeginClose()
		a.mu.Lock()
		a.mu.closed = true
		var links []*link
		for _, l := range a.mu.peers {
			links = append(links, l)
		}
		var sessions []*session
		for _, s := range a.mu.sessions {
			sessions = append(sessions, s)
		}
		for _, c := range a.mu.pending {
			_ = c.Close()
		}
		a.mu.Unlock()
		flush(links)
		a.stop()
		_ = a.listener.Close()
		for _, l := range links {
			l.close(agent.OutcomeClosed, agent.ErrClosed, false)
		}
		for _, s := range sessions {
			s.close(agent.ErrClosed, false)
		}
		a.running.Wait()
		a.closeErr = a.front.FinishClose()
	})
	return a.closeErr
}

// flush lets queued notifications leave, within agent.FlushTimeout.
func flush(links []*link) {
	var late atomic.Bool
	end := time.AfterFunc(agent.FlushTimeout, func() {
		late.Store(true)
		for _, l := range links {
			l.mu.Lock()
			l.mu.work.Broadcast()
			l.mu.Unlock()
		}
	})
	defer end.Stop()
	for _, l := range links {
		l.flush(&late)
	}
}
