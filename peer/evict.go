package peer

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// The methods of this file are called with Table.mu held, except bury.

// departure is a generation that has left the table and still has to leave the agent.
type departure struct {
	conn   *Connected
	reason string
}

// generation finds an engine if it is still connected under gen.
func (t *Table) generation(engine kv.EngineID, gen kv.Generation) *entry {
	if e := t.mu.engines[engine]; e != nil && e.conn.Gen == gen {
		return e
	}
	return nil
}

// insert adds an entry as most recently used.
func (t *Table) insert(e *entry) {
	t.mu.engines[e.conn.Engine] = e
	t.claim(e)
	e.used = time.Now()
	e.elem = t.mu.idle.PushBack(e)
}

// claim notes whose agents an entry's ranks are.
func (t *Table) claim(e *entry) {
	for i := range e.conn.Ranks {
		t.mu.owners[e.conn.Ranks[i].Agent.ID.Name] = e
	}
}

// remove takes an entry out of the table. The caller buries it after releasing mu.
func (t *Table) remove(e *entry, reason string) []departure {
	delete(t.mu.engines, e.conn.Engine)
	for i := range e.conn.Ranks {
		if name := e.conn.Ranks[i].Agent.ID.Name; t.mu.owners[name] == e {
			delete(t.mu.owners, name)
		}
	}
	if e.elem != nil {
		t.mu.idle.Remove(e.elem)
		e.elem = nil
	}
	return []departure{{conn: e.conn, reason: reason}}
}

func (t *Table) touch(e *entry) {
	e.used = time.Now()
	if e.elem != nil {
		t.mu.idle.MoveToBack(e.elem)
	}
}

func (t *Table) pin(e *entry) {
	e.pins++
	if e.elem != nil {
		t.mu.idle.Remove(e.elem)
		e.elem = nil
	}
}

func (t *Table) unpin(e *entry) {
	if e.pins == 0 {
		panic("peer: more Unpins than Pins")
	}
	e.pins--
	e.used = time.Now()
	if e.pins == 0 {
		e.elem = t.mu.idle.PushBack(e)
	}
}

// evictStale removes every peer that was not used for TTL and has no work in flight.
func (t *Table) evictStale(now time.Time) []departure {
	var gone []departure
	for t.cfg.TTL > 0 {
		front := t.mu.idle.Front()
		if front == nil || now.Sub(front.Value.(*entry).used) <= t.cfg.TTL {
			break
		}
		gone = append(gone, t.remove(front.Value.(*entry), "evicted: not used for "+t.cfg.TTL.String())...)
	}
	return gone
}

// makeRoom evicts the least recently used peer if the table is full, and reports whether there is
// room now.
func (t *Table) makeRoom() ([]departure, bool) {
	if len(t.mu.engines) < t.cfg.MaxPeers {
		return nil, true
	}
	front := t.mu.idle.Front()
	if front == nil {
		return nil, false
	}
	return t.remove(front.Value.(*entry), "evicted: the table is full and it was not used for longest"), true
}

// know adds an address under which an entry is reached.
func (e *entry) know(a address) {
	if slices.Contains(e.addrs, a) {
		return
	}
	if len(e.addrs) >= maxAddrs {
		e.addrs = e.addrs[1:]
	}
	e.addrs = append(slices.Clip(e.addrs), a)
}

// bury removes departed peers from the agent and tells of it. Call without mu.
func (t *Table) bury(gone []departure) {
	for _, d := range gone {
		for i := range d.conn.Ranks {
			t.cfg.Agent.RemovePeer(d.conn.Ranks[i].Agent.ID)
		}
		t.cfg.Events.Emit(event.PeerGone{Engine: d.conn.Engine, Gen: d.conn.Gen, Reason: d.reason})
	}
}
