package peer

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/agent"
)

// hold returns the connected entry that the findings are about, pinned so that it stays while more
// of its ranks are added; nil if what is connected is another incarnation, or nothing.
func (t *Table) hold(f *flight, found *findings) *entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.mu.engines[f.key.engine]
	if e == nil || e.conn.root != found.root.digest {
		return nil
	}
	for _, a := range found.ranks {
		if rp, ok := e.conn.Rank(a.rank); ok && rp.digest != a.digest {
			return nil
		}
	}
	t.pin(e)
	return e
}

// letGo ends hold.
func (t *Table) letGo(e *entry) {
	if e == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.engines[e.conn.Engine] == e {
		t.unpin(e)
	}
}

// admit adds the agents of those ranks that old does not have.
func (t *Table) admit(ctx context.Context, f *flight, found *findings, old *entry) error {
	for _, a := range found.ranks {
		if old != nil && t.has(old, a) {
			continue
		}
		p, err := t.addPeer(ctx, a.info)
		if err != nil {
			return &phaseError{phase: PhaseAdmit, rank: a.rank, err: err}
		}
		i := slices.IndexFunc(f.added, func(r RankPeer) bool { return r.Agent.ID.Name == p.ID.Name })
		f.added = append(f.added, RankPeer{Rank: a.rank, Agent: p, Meta: a.meta, Regions: a.regions, digest: a.digest})
		t.bury(t.displace(p.ID))
		if i >= 0 {
			return &phaseError{phase: PhaseRanks, rank: a.rank, err: &RankMismatchError{A: f.added[i].Rank, B: a.rank,
				What: "agent (each rank must have its own)", ValueA: string(p.ID.Name), ValueB: string(p.ID.Name)}}
		}
	}
	return nil
}

func (t *Table) has(e *entry, a answer) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := e.conn.Rank(a.rank)
	return ok
}

// addPeer admits one agent, one at a time if the agent wants it so.
func (t *Table) addPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	ctx, cancel := t.patience(ctx, "not admitted")
	defer cancel()
	if t.admission != nil {
		select {
		case t.admission <- struct{}{}:
			defer func() { <-t.admission }()
		case <-ctx.Done():
			return agent.Peer{}, context.Cause(ctx)
		}
	}
	return t.cfg.Agent.AddPeer(ctx, info)
}

// displace removes the generation whose agent was replaced by adding id, as the agent has ended that
// agent's transfers: an engine that came back, or two engines that claim one agent.
func (t *Table) displace(id agent.PeerID) []departure {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.mu.owners[id.Name]
	if e == nil || e.conn.hasAgent(id) {
		return nil
	}
	return t.remove(e, fmt.Sprintf("replaced: its agent %s was admitted anew", id.Name))
}

// publish makes the peer visible and ends the flight in one step, so that nobody sees neither.
func (t *Table) publish(f *flight, found *findings, old *entry) (*Connected, []departure, []waiter, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.stillThere(f, old); err != nil {
		return nil, nil, nil, err
	}
	if old != nil {
		t.grow(old, f, found)
		return old.conn, nil, t.land(f), nil
	}
	var gone []departure
	if e := t.mu.engines[f.key.engine]; e != nil {
		gone = t.remove(e, "replaced: another incarnation of the engine answered at "+f.key.addr.String())
	}
	more, ok := t.makeRoom()
	if gone = append(gone, more...); !ok {
		return nil, nil, nil, &phaseError{phase: PhaseAdmit, err: &agent.LimitError{
			What: "connected engines, all with work in flight", Got: len(t.mu.engines) + 1, Limit: t.cfg.MaxPeers}}
	}
	t.mu.lastGen++
	c := &Connected{Engine: f.key.engine, Gen: t.mu.lastGen, Addr: f.key.addr.String(), Ranks: f.added, Clock: found.clock, root: found.root.digest}
	t.insert(&entry{conn: c, addrs: []address{f.key.addr}})
	return c, gone, t.land(f), nil
}

// stillThere reports what ended a flight's agents before they were published. Call with mu held.
func (t *Table) stillThere(f *flight, old *entry) error {
	if t.mu.closed {
		return ErrClosed
	}
	if old != nil && t.mu.engines[f.key.engine] != old {
		return &phaseError{phase: PhaseLost, err: errGoneMeanwhile}
	}
	if f.tooMany {
		return &phaseError{phase: PhaseLost, err: &agent.LimitError{What: "losses during a handshake", Got: maxEarlyLosses + 1, Limit: maxEarlyLosses}}
	}
	for i := range f.added {
		if err, ok := f.losses[f.added[i].Agent.ID]; ok {
			return &phaseError{phase: PhaseLost, rank: f.added[i].Rank, err: fmt.Errorf("its agent was lost: %w", err)}
		}
	}
	return nil
}

// grow adds an address and perhaps ranks to a generation. Call with mu held.
func (t *Table) grow(e *entry, f *flight, found *findings) {
	e.know(f.key.addr)
	if len(f.added) == 0 {
		return
	}
	c := *e.conn
	c.Ranks = append(slices.Clip(c.Ranks), f.added...)
	c.Clock = found.clock
	e.conn = &c
	t.claim(e)
}
