package peer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// flightKey names a handshake: there is one in flight per engine and address.
type flightKey struct {
	engine kv.EngineID
	addr   address
}

// flight is one handshake in flight. Its goroutine owns it; the fields under "mu" are guarded by
// Table.mu.
type flight struct {
	key    flightKey
	target Target // of the caller who started it
	serial uint64
	began  time.Time
	ctx    context.Context // ends at Close, at its own end, or by evict
	evict  context.CancelCauseFunc
	ended  chan struct{}
	added  []RankPeer // admitted so far, to be removed on failure

	// mu
	who     tenant
	waiters []waiter
	losses  map[agent.PeerID]error // of agents not known to the table while this one adds some
	tooMany bool                   // losses is full
}

type waiter struct {
	target Target
	done   func(*Connected, error)
}

// fly is the flight's goroutine.
func (t *Table) fly(f *flight) {
	defer t.running.Done()
	started := time.Now()
	defer f.evict(nil)
	ctx, cancel := context.WithTimeoutCause(f.ctx, t.cfg.HandshakeTimeout,
		fmt.Errorf("it took longer than %v in all", t.cfg.HandshakeTimeout))
	defer cancel()
	addr := f.key.addr.String()
	t.cfg.Events.Emit(event.HandshakeStarted{Engine: f.key.engine, Addr: addr})

	c, gone, waiters, err := t.shake(ctx, f)
	if err != nil {
		for i := range f.added {
			t.cfg.Agent.RemovePeer(f.added[i].Agent.ID)
		}
		waiters = t.retire(f)
		err = f.failure(err, t.ctx, len(waiters))
	}
	close(f.ended)
	t.bury(gone)
	fin := event.HandshakeFinished{Engine: f.key.engine, Addr: addr, Took: time.Since(started), Waiters: len(waiters), Err: err}
	if c != nil {
		fin.Gen, fin.Transport, fin.Why = c.Gen, c.Ranks[0].Agent.Transport, c.Ranks[0].Agent.Why
	}
	t.cfg.Events.Emit(fin)
	for _, w := range waiters {
		t.release(w, c, err)
	}
}

// release tells one waiter. One who needs ranks that the flight did not ask for goes on with a
// flight of its own.
func (t *Table) release(w waiter, c *Connected, err error) {
	if err == nil && !covers(c, w.target.Ranks) {
		if c = t.Ensure(w.target, w.done); c == nil {
			return
		}
	}
	w.done(c, err)
}

func covers(c *Connected, ranks []kv.Rank) bool {
	return !slices.ContainsFunc(ranks, func(r kv.Rank) bool { _, ok := c.Rank(r); return !ok })
}

// shake does the handshake. On success it has published the peer and ended the flight.
func (t *Table) shake(ctx context.Context, f *flight) (*Connected, []departure, []waiter, error) {
	release, err := t.takeSlot(ctx, f)
	if err != nil {
		return nil, nil, nil, &phaseError{phase: PhaseQueue, err: err}
	}
	defer release()
	found, err := t.interview(ctx, f)
	if err != nil {
		return nil, nil, nil, err
	}
	if err := t.takeTurn(ctx, f); err != nil {
		return nil, nil, nil, &phaseError{phase: PhaseQueue, err: err}
	}
	defer t.endTurn(f)
	old := t.hold(f, found)
	defer t.letGo(old)
	if err := t.admit(ctx, f, found, old); err != nil {
		return nil, nil, nil, err
	}
	return t.publish(f, found, old)
}

// takeSlot waits for one of MaxParallel slots. The slot is given back by release, or after
// slotPatience without it.
func (t *Table) takeSlot(ctx context.Context, f *flight) (release func(), err error) {
	t.mu.Lock()
	w := t.mu.slots.wait(f.who)
	t.mu.Unlock()
	giveBack := sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.mu.slots.done(w)
	})
	select {
	case <-w.ready:
	case <-ctx.Done():
		giveBack()
		return nil, context.Cause(ctx)
	}
	patience := time.AfterFunc(slotPatience, giveBack)
	return func() { patience.Stop(); giveBack() }, nil
}

// takeTurn waits until no other flight to the same engine adds agents.
func (t *Table) takeTurn(ctx context.Context, f *flight) error {
	for {
		t.mu.Lock()
		other := t.mu.admitting[f.key.engine]
		if other == nil {
			t.mu.admitting[f.key.engine] = f
			t.mu.Unlock()
			return nil
		}
		t.mu.Unlock()
		select {
		case <-other.ended:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (t *Table) endTurn(f *flight) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.admitting[f.key.engine] == f {
		delete(t.mu.admitting, f.key.engine)
	}
}

// retire ends a flight that failed and takes its waiters.
func (t *Table) retire(f *flight) []waiter {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.land(f)
}

// land ends a flight and takes its waiters. Call with mu held.
func (t *Table) land(f *flight) []waiter {
	if t.mu.flights[f.key] == f {
		delete(t.mu.flights, f.key)
	}
	t.mu.shares.remove(f)
	return f.waiters
}

// noteLoss remembers an agent peer that was lost, perhaps one that this flight has just added. Call
// with Table.mu held.
func (f *flight) noteLoss(id agent.PeerID, err error) {
	if len(f.losses) >= maxEarlyLosses {
		f.tooMany = true
		return
	}
	if f.losses == nil {
		f.losses = make(map[agent.PeerID]error)
	}
	f.losses[id] = err
}

// failure makes the error that all waiters get.
func (f *flight) failure(err error, table context.Context, waiters int) error {
	if table.Err() != nil || errors.Is(err, ErrClosed) {
		return ErrClosed
	}
	e := &HandshakeError{Engine: f.key.engine, Addr: f.key.addr.String(), Waiters: waiters, Err: err}
	var at *phaseError
	if context.Cause(f.ctx) == errEvicted {
		e.Phase, e.Err = PhaseQueue, errEvicted
	} else if errors.As(err, &at) {
		e.Phase, e.Rank, e.Err = at.phase, at.rank, at.err
	}
	return e
}
