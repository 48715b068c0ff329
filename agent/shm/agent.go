package shm

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/kv"
)

// Config describes an agent. The zero Config is usable.
type Config struct {
	// Name is the agent's name. Default: random. It must be new for every incarnation.
	Name agent.Name
	// Limits of the agent; zero fields mean the defaults.
	Limits agent.Limits

	// hold delays what passes the sockets, for tests of stopped processes.
	hold func(done <-chan struct{})
}

// Validate reports what is wrong with a Config.
func (c Config) Validate() error {
	if c.Name != "" && !validName(c.Name) {
		return fmt.Errorf("agent name %q: 1 to %d printable characters are wanted", c.Name, maxName)
	}
	return nil
}

// Agent is an agent.Agent for peers on this host. Its methods may be called from any goroutine.
// AddPeer, Close, Free and Deregister may block, each as the interface says.
type Agent struct {
	name     agent.Name
	front    *front.Front
	control  *control
	leases   leases
	pool     pool
	workers  *workers
	listener *net.UnixListener
	offer    []byte
	born     time.Time
	hold     func(done <-chan struct{})
	borrowed atomic.Bool // some memory was registered that peers cannot map

	goroutines sync.WaitGroup
	closing    chan struct{} // closed when Close begins
	closer     sync.Once
	closeErr   error

	mu struct {
		sync.Mutex
		closed       bool
		generations  kv.Generation
		peers        map[agent.Name]*conn // added by us
		inbound      map[agent.PeerID]*conn
		greeting     []*net.UnixConn            // in their hello, oldest first
		dialing      map[*net.UnixConn]struct{} // ours, in their hello
		lastTransfer agent.TransferID
		transfers    map[agent.TransferID]*transfer
	}
}

var _ agent.Agent = (*Agent)(nil)
var _ agent.Namer = (*Agent)(nil)

// New makes an agent and begins to listen on a random abstract unix socket.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Name == "" {
		cfg.Name = agent.Name("shm-" + randomHex())
	}
	host, err := thisHost()
	if err != nil {
		return nil, err
	}
	limits := cfg.Limits.WithDefaults()
	page, err := newControl(limits.Transfers + limits.Grants)
	if err != nil {
		return nil, fmt.Errorf("control page: %w", err)
	}
	o := offer{host: host, name: cfg.Name, socket: "kvferry-" + randomHex()}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + o.socket, Net: "unix"})
	if err != nil {
		_ = page.seg.Unmap()
		return nil, fmt.Errorf("listen: %w", err)
	}
	a := &Agent{
		name: cfg.Name, front: front.New(limits, rand.Reader), control: page, workers: newWorkers(),
		listener: l, offer: o.encode(), born: time.Now(), hold: cfg.hold, closing: make(chan struct{}),
	}
	a.leases.control = page
	a.leases.mu.open = map[agent.GrantID]lease{}
	a.mu.peers = map[agent.Name]*conn{}
	a.mu.inbound = map[agent.PeerID]*conn{}
	a.mu.dialing = map[*net.UnixConn]struct{}{}
	a.mu.transfers = map[agent.TransferID]*transfer{}
	a.goroutines.Add(1)
	go a.accept()
	return a, nil
}

func randomHex() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Name is Agent.Name.
func (a *Agent) Name() agent.Name { return a.name }

// Capabilities is Agent.Capabilities.
func (a *Agent) Capabilities() agent.Capabilities {
	return agent.Capabilities{Revocable: true, ParallelAdmission: true, TellsArrivals: true}
}

// Offers is Agent.Offers.
func (a *Agent) Offers() []agent.Offer {
	return []agent.Offer{{Transport: Transport, Blob: a.offer}}
}

// Events is Agent.Events.
func (a *Agent) Events() <-chan agent.Event { return a.front.Events.Events() }

// pass is where what goes through sockets can be held up by a test.
func (a *Agent) pass(done <-chan struct{}) {
	if a.hold != nil {
		a.hold(done)
	}
}

// Prepare is Agent.Prepare.
func (a *Agent) Prepare(owner agent.PeerID, descs []kv.Descriptor) (agent.ListID, error) {
	list, err := a.front.BuildList(owner, descs)
	if err != nil {
		return 0, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.mu.peers[owner.Name]; owner != agent.Local && (c == nil || c.id != owner) {
		return 0, &agent.PeerError{Peer: owner.Name, Phase: "prepare", Err: errNotAdded}
	}
	return a.front.Lists.Insert(list)
}

var errNotAdded = errors.New("not an added peer, or no longer")

// Release is Agent.Release.
func (a *Agent) Release(id agent.ListID) { a.front.Lists.Remove(id) }

// Notify is Agent.Notify.
func (a *Agent) Notify(peer agent.PeerID, msg []byte) error {
	fail := func(err error) error { return &agent.PeerError{Peer: peer.Name, Phase: "notify", Err: err} }
	if a.front.Closed() {
		return agent.ErrClosed
	}
	if len(msg) == 0 {
		return fail(errors.New("the notification is empty"))
	}
	if limit := a.front.Limits.Notification; len(msg) > limit {
		return fail(&agent.LimitError{What: "bytes of a notification", Got: len(msg), Limit: limit})
	}
	a.mu.Lock()
	c := a.mu.peers[peer.Name]
	a.mu.Unlock()
	if c == nil || c.id != peer || c.dead() {
		return fail(errNotAdded)
	}
	if err := c.notify(msg); err != nil {
		return fail(err)
	}
	return nil
}

// Grant is Agent.Grant.
func (a *Agent) Grant(spec agent.GrantSpec) (agent.GrantID, error) { return a.front.Grant(spec) }

// GrantAs is Grant under an id that the caller chose, which must be unguessable and not in use: for
// whoever gives one permission through several backends.
func (a *Agent) GrantAs(id agent.GrantID, spec agent.GrantSpec) error {
	return a.front.GrantAs(id, spec)
}

// Revoke is Agent.Revoke.
func (a *Agent) Revoke(id agent.GrantID) {
	a.front.Grants.Revoke(id)
	a.leases.revoked(id)
}

// RemovePeer is Agent.RemovePeer.
func (a *Agent) RemovePeer(id agent.PeerID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.mu.peers[id.Name]; c != nil && c.id == id {
		a.remove(c, agent.OutcomePeerLost, errRemoved)
	}
	if c := a.mu.inbound[id]; c != nil {
		delete(a.mu.inbound, id)
		c.share.Forget()
		c.fail(errRemoved)
	}
}

// remove ends an added peer without telling our user. The caller holds a.mu.
func (a *Agent) remove(c *conn, outcome agent.Outcome, err error) {
	a.drop(c, outcome, err)
	c.share.Forget()
	c.fail(err)
}

// drop takes an added peer out of the tables and ends its transfers. The caller holds a.mu.
func (a *Agent) drop(c *conn, outcome agent.Outcome, err error) {
	if a.mu.peers[c.id.Name] == c {
		delete(a.mu.peers, c.id.Name)
	}
	for t := range c.transfers {
		t.finish(outcome, c.peerError("transfer", err))
	}
	a.front.Lists.RemoveOwner(c.id)
}

// gone is what the reader of a connection reports when it has ended, for whatever reason.
func (a *Agent) gone(c *conn, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.inbound {
		delete(a.mu.inbound, c.id)
	} else {
		a.drop(c, agent.OutcomePeerLost, err)
	}
	c.share.Lost(c.peerError("connection", err))
}

func (c *conn) peerError(phase string, err error) error {
	return &agent.PeerError{Peer: c.id.Name, Phase: phase, Err: err}
}

// forget tells all peers of freed memory.
func (a *Agent) forget(s *segment) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.mu.peers {
		c.forget(s.id)
	}
	for _, c := range a.mu.inbound {
		c.forget(s.id)
	}
}

// Close is Agent.Close.
func (a *Agent) Close() error {
	a.closer.Do(func() {
		a.front.BeginClose()
		a.flush()
		a.leases.sweep()
		close(a.closing)
		a.stop(agent.ErrClosed)
		a.goroutines.Wait()
		a.workers.wait()
		a.closeErr = a.front.FinishClose()
		if err := a.pool.close(); a.closeErr == nil {
			a.closeErr = err
		}
		if err := a.control.seg.Unmap(); a.closeErr == nil {
			a.closeErr = err
		}
	})
	return a.closeErr
}

// flush lets queued notifications leave, within agent.FlushTimeout.
func (a *Agent) flush() {
	a.mu.Lock()
	var conns []*conn
	for _, c := range a.mu.peers {
		conns = append(conns, c)
	}
	a.mu.Unlock()
	end := time.NewTimer(agent.FlushTimeout)
	defer end.Stop()
	for _, c := range conns {
		select {
		case <-c.out.flush():
		case <-c.done:
		case <-end.C:
			return
		}
	}
}

// stop ends the listener and all connections, and with them everything posted.
func (a *Agent) stop(err error) {
	_ = a.listener.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.closed = true
	for _, sock := range a.mu.greeting {
		_ = sock.Close()
	}
	for sock := range a.mu.dialing {
		_ = sock.Close()
	}
	for _, c := range a.mu.peers {
		a.remove(c, agent.OutcomeClosed, err)
	}
	for id, c := range a.mu.inbound {
		delete(a.mu.inbound, id)
		c.share.Forget()
		c.fail(err)
	}
}

// generation is the next of this agent's counter. The caller holds a.mu.
func (a *Agent) generation() kv.Generation {
	a.mu.generations++
	return a.mu.generations
}
