package peer

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// Config is what a Table needs. The zero value of every field but Agent and Hash has a meaning.
type Config struct {
	// Agent admits the peers. The Table owns the peers that it adds, not the agent. Required.
	Agent agent.Agent
	// Self is our own engine id: a handshake with it is refused, and a peer address that leads
	// back to us is named as such. Empty: unknown.
	Self kv.EngineID
	// Hash is our compatibility hash, 64 lower-case hexadecimal digits. Required.
	Hash string
	// EnforceHash refuses peers with another hash (enforce_handshake_compat of stock, which has it
	// on by default). The zero value does not.
	EnforceHash bool
	// Contents names what decides a block's bytes beside its sizes, as our metadata's attention backend
	// does. A kvferry peer that names another is refused even if the hash is not enforced: sizes cannot
	// tell, and its KV would be taken for ours. Empty: unknown.
	Contents string
	// LocalFactors describes what went into Hash, for people: it is quoted in a refusal.
	LocalFactors string
	// NearHashes are the hashes of engines that differ from ours in one setting, each with what to tell
	// people of a peer that has it: a hash that differs says nothing by itself.
	NearHashes map[string]string
	// Dial opens the side channel's connection. nil: net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// QueryTimeout bounds the dial, each question and each admission. 0: DefaultQueryTimeout.
	QueryTimeout time.Duration
	// HandshakeTimeout bounds a handshake as a whole. 0: DefaultHandshakeTimeout.
	HandshakeTimeout time.Duration
	// TTL is how long a peer without use stays. 0: DefaultTTL; below 0: for ever. (engine_ttl of
	// stock says "for ever" with 0 too; who reads that setting translates.)
	TTL time.Duration
	// MaxParallel bounds active handshakes, MaxPeers connected engines. 0: the defaults.
	MaxParallel int
	MaxPeers    int
	// Clock is our monotonic clock in seconds, for ClockSample. nil: Now.
	Clock func() float64
	// Events takes HandshakeStarted, HandshakeFinished and PeerGone. nil: event.Discard.
	Events event.Sink
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Agent == nil:
		return errors.New("peer table: no agent")
	case !isHash(c.Hash):
		return fmt.Errorf("peer table: compatibility hash %q is not 64 lower-case hexadecimal digits", c.Hash)
	case c.QueryTimeout < 0 || c.HandshakeTimeout < 0:
		return errors.New("peer table: a timeout is negative")
	case c.MaxParallel < 0 || c.MaxPeers < 0:
		return errors.New("peer table: a bound is negative")
	}
	return nil
}

func isHash(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(s) == 64
}

func (c Config) withDefaults() Config {
	if c.Dial == nil {
		c.Dial = (&net.Dialer{}).DialContext
	}
	if c.Clock == nil {
		c.Clock = Now
	}
	if c.Events == nil {
		c.Events = event.Discard
	}
	setDefault(&c.QueryTimeout, DefaultQueryTimeout)
	setDefault(&c.HandshakeTimeout, DefaultHandshakeTimeout)
	setDefault(&c.TTL, DefaultTTL)
	setDefault(&c.MaxParallel, DefaultMaxParallel)
	setDefault(&c.MaxPeers, DefaultMaxPeers)
	return c
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Table holds the connected peers of one rank and runs the handshakes that connect them. Its
// methods may be called from any goroutine and do not block, except Close.
type Table struct {
	cfg       Config
	ctx       context.Context // ends at Close
	cancel    context.CancelFunc
	running   sync.WaitGroup // flights
	admission chan struct{}  // cap 1; nil when the agent admits several peers at once

	mu struct {
		sync.Mutex
		closed    bool
		lastGen   kv.Generation
		engines   map[kv.EngineID]*entry
		owners    map[agent.Name]*entry // which engine a connected agent belongs to
		idle      list.List             // entries without pins, least recently used first
		flights   map[flightKey]*flight
		serial    uint64 // of the last flight
		shares    shares
		slots     slots
		admitting map[kv.EngineID]*flight // whose turn it is to add agents
	}
}

// entry is one connected engine; guarded by Table.mu.
type entry struct {
	conn  *Connected
	addrs []address // under which it was reached, newest last
	pins  int
	used  time.Time
	elem  *list.Element // in Table.mu.idle while pins == 0
}

// NewTable makes an empty table.
func NewTable(cfg Config) (*Table, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	t := &Table{cfg: cfg.withDefaults()}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.mu.shares, t.mu.slots = newShares(), newSlots(t.cfg.MaxParallel)
	if !cfg.Agent.Capabilities().ParallelAdmission {
		t.admission = make(chan struct{}, 1)
	}
	t.mu.engines = make(map[kv.EngineID]*entry)
	t.mu.owners = make(map[agent.Name]*entry)
	t.mu.flights = make(map[flightKey]*flight)
	t.mu.admitting = make(map[kv.EngineID]*flight)
	return t, nil
}

// Ensure returns the target's engine if it is connected at the target's address with all of the
// target's ranks; done is never called then. Otherwise it returns nil, and done is called exactly
// once, from another goroutine, when the handshake ends that this caller started or joined: with
// the peer, or with an error (*HandshakeError, or ErrClosed). done must not block, and must not
// call Close; it may call every other method.
//
// Ensure counts as use of the peer.
func (t *Table) Ensure(target Target, done func(*Connected, error)) *Connected {
	key := flightKey{engine: target.Engine, addr: target.address()}
	t.mu.Lock()
	gone := t.evictStale(time.Now())
	c := t.connected(key, target.Ranks)
	var err error
	if c == nil {
		err = t.join(key, target, done)
	}
	t.mu.Unlock()
	t.bury(gone)
	if err != nil {
		go done(nil, err)
	}
	return c
}

// connected finds what satisfies a target and notes its use. Call with mu held.
func (t *Table) connected(key flightKey, ranks []kv.Rank) *Connected {
	e := t.mu.engines[key.engine]
	if e == nil || len(ranks) == 0 || !slices.Contains(e.addrs, key.addr) {
		return nil
	}
	for _, r := range ranks {
		if _, ok := e.conn.Rank(r); !ok {
			return nil
		}
	}
	t.touch(e)
	return e.conn
}

// join makes done wait for the flight to the target, which it starts if there is none. Call with mu
// held.
func (t *Table) join(key flightKey, target Target, done func(*Connected, error)) error {
	refuse := func(err error) error {
		return &HandshakeError{Engine: target.Engine, Addr: key.addr.String(), Phase: PhaseTarget, Waiters: 1, Err: err}
	}
	if t.mu.closed {
		return ErrClosed
	}
	if err := target.validate(t.cfg.Self); err != nil {
		return refuse(err)
	}
	f := t.mu.flights[key]
	who := target.tenant()
	if f != nil && len(f.waiters) >= maxWaiters {
		return refuse(&agent.LimitError{What: "requests waiting for a handshake", Got: len(f.waiters) + 1, Limit: maxWaiters})
	}
	if f == nil || f.who.by != "" && who.by == "" {
		if err := t.place(who); err != nil {
			return refuse(err)
		}
	}
	target.Ranks = slices.Clone(target.Ranks)
	if f == nil {
		t.mu.serial++
		f = &flight{key: key, target: target, who: who, serial: t.mu.serial, began: time.Now(), ended: make(chan struct{})}
		f.ctx, f.evict = context.WithCancelCause(t.ctx)
		t.mu.flights[key] = f
		t.mu.shares.add(f)
		t.running.Add(1)
		go t.fly(f)
	} else if f.who != who && (who.by == "" || f.who.by != "" && t.mu.shares.of[who] < t.mu.shares.of[f.who]) {
		t.mu.shares.remove(f) // whoever has more right to it
		f.who = who
		t.mu.shares.add(f)
	}
	f.waiters = append(f.waiters, waiter{target: target, done: done})
	return nil
}

// place lets one more handshake of a tenant begin, if need be at the cost of another. Call with mu held.
func (t *Table) place(who tenant) error {
	s := &t.mu.shares
	if s.taken(who) < who.places() {
		return nil
	}
	f := s.victim(who, time.Now())
	if f == nil {
		return &agent.LimitError{What: "handshakes in flight", Got: s.taken(who) + 1, Limit: who.places()}
	}
	s.remove(f)
	delete(t.mu.flights, f.key)
	f.evict(errEvicted)
	return nil
}

// Lookup returns a connected engine or nil. It starts nothing and does not count as use.
func (t *Table) Lookup(engine kv.EngineID) *Connected {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.mu.engines[engine]; e != nil {
		return e.conn
	}
	return nil
}

// Pin says that work is in flight with this generation of the engine: it will not be evicted until
// as many Unpins. It reports false, and pins nothing, when that generation is gone.
func (t *Table) Pin(engine kv.EngineID, gen kv.Generation) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.generation(engine, gen)
	if e == nil {
		return false
	}
	t.pin(e)
	return true
}

// Unpin ends one Pin that reported true, and counts as use. When the generation is gone by now, it
// does nothing.
func (t *Table) Unpin(engine kv.EngineID, gen kv.Generation) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.generation(engine, gen); e != nil {
		t.unpin(e)
	}
}

// Lost says that an agent reported agent.PeerLost for a peer that was not inbound. The generation
// of the engine that it belongs to is gone, with the agents of all its ranks, whatever is pinned;
// the next Ensure shakes hands anew. An id that the table does not know is ignored. A handshake
// that has just added this peer fails.
func (t *Table) Lost(id agent.PeerID, err error) {
	t.mu.Lock()
	var gone []departure
	if e := t.mu.owners[id.Name]; e != nil && e.conn.hasAgent(id) {
		gone = t.remove(e, fmt.Sprintf("lost: %v", err))
	} else {
		for _, f := range t.mu.admitting {
			f.noteLoss(id, err)
		}
	}
	t.mu.Unlock()
	t.bury(gone)
}

// Drop removes a generation of an engine for a reason of the caller's, e.g. a geometry that does not
// fit. A generation that is gone is ignored.
func (t *Table) Drop(engine kv.EngineID, gen kv.Generation, reason string) {
	t.mu.Lock()
	var gone []departure
	if e := t.generation(engine, gen); e != nil {
		gone = t.remove(e, reason)
	}
	t.mu.Unlock()
	t.bury(gone)
}

// Close cancels every handshake, ends their waiters with ErrClosed, removes all peers from the agent
// and returns when no goroutine of the table is left. It may be called again.
func (t *Table) Close() {
	t.mu.Lock()
	t.mu.closed = true
	var gone []departure
	for _, e := range t.mu.engines {
		gone = append(gone, t.remove(e, "closed")...)
	}
	t.mu.Unlock()
	t.cancel()
	t.bury(gone)
	t.running.Wait()
}
