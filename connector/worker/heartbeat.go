package worker

import (
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// beat is the signs of life for one prefill engine. It has its own timer, which no engine step
// moves (push-mode.md lets heartbeats ride on steps; issue 3 does not).
type beat struct {
	addr     connector.PeerAddr
	ids      []kv.RequestID      // as the ledger says
	receives map[uint64]*receive // of this rank
	due      deadline.Item[any]
	// asked: the answer of a connect is awaited.
	asked bool
}

// beats is who waits for whom. No timer runs when nobody waits.
type beats struct {
	byAddr map[connector.PeerAddr]*beat
}

func (b *beats) init() { b.byAddr = make(map[connector.PeerAddr]*beat) }

// of finds or makes the entry of an engine.
func (b *beats) of(addr connector.PeerAddr) *beat {
	x := b.byAddr[addr]
	if x == nil {
		x = &beat{addr: addr, receives: make(map[uint64]*receive)}
		x.due.Value = x
		b.byAddr[addr] = x
	}
	return x
}

// settle stops an engine's beats when nobody waits for it any more.
func (b *beats) settle(m *machine, x *beat) {
	if len(x.ids) == 0 && len(x.receives) == 0 {
		m.timers.Remove(&x.due)
		delete(b.byAddr, x.addr)
	}
}

// setHeartbeats replaces the ledger's whole set. A new engine is due at once, one that stays keeps
// its time.
func (m *machine) setHeartbeats(now time.Time, groups []connector.HeartbeatGroup) {
	named := make(map[connector.PeerAddr]bool, len(groups))
	for _, g := range groups {
		b := m.beats.of(g.Peer)
		if len(b.ids) == 0 {
			m.timers.Set(&b.due, now)
		}
		b.ids = g.IDs
		named[g.Peer] = true
	}
	for addr, b := range m.beats.byAddr {
		if !named[addr] {
			b.ids = nil
			m.beats.settle(m, b)
		}
	}
}

// beatFor begins to beat for a receive. Its registration is the first sign of life.
func (m *machine) beatFor(r *receive) {
	b := m.beats.of(r.reg.Peer)
	b.receives[r.serial] = r
	if _, runs := b.due.At(); !runs {
		m.timers.Set(&b.due, m.now.Add(m.interval()))
	}
}

// drop ends the beats for a receive.
func (b *beats) drop(m *machine, r *receive) {
	if x := b.byAddr[r.reg.Peer]; x != nil {
		delete(x.receives, r.serial)
		b.settle(m, x)
	}
}

// sendHeartbeat asks for the engine, which counts as use of the connection; the message goes out
// when it is there. A handshake that outlasts the interval is waited for, not doubled, and one that
// fails is tried again next time.
func (m *machine) sendHeartbeat(now time.Time, b *beat) {
	m.timers.Set(&b.due, now.Add(m.interval()))
	if !b.asked {
		b.asked = true
		m.need(b.addr, waiter{beat: b})
	}
}

// beatConnected sends what is current now, if anybody still waits.
func (m *machine) beatConnected(b *beat, r *remote) {
	b.asked = false
	switch {
	case m.beats.byAddr[b.addr] != b || r.agent.ID.Gen == 0:
	case r.control:
		m.sendBeats(b, r)
	default:
		m.sendStockHeartbeats(b, r)
	}
}

// sendBeats names what waits and asks for the state of each registration, some at a time.
// Registrations that P has not acknowledged are sent again.
func (m *machine) sendBeats(b *beat, r *remote) {
	names := b.ids
	var refs []wire.RegistrationRef
	for _, serial := range slices.Sorted(maps.Keys(b.receives)) {
		x := b.receives[serial]
		if x.gen == 0 || x.remote.name() != r.name() {
			continue
		}
		if !x.acked && m.now.Sub(x.triedAt) >= m.interval() {
			if m.registerAgain(x, r); m.consumer.receives[serial] != x || x.quarantined != nil {
				continue
			}
		}
		refs = append(refs, refOf(x.wireID, x.gen, x.token))
	}
	to := m.correspondent(r.name())
	for first := true; first && len(b.ids)+len(b.receives) > 0 || len(names)+len(refs) > 0; first = false {
		n, k := min(len(names), maxHeartbeatIDs), min(len(refs), maxHeartbeatIDs)
		m.control(r, "beat", &wire.Beat{Seq: m.letters.next(to), From: m.us(), Names: nameable(names[:n]), Registrations: refs[:k]})
		m.stats.HeartbeatsSent++
		names, refs = names[n:], refs[k:]
	}
}

// nameable leaves out ids that no message can carry.
func nameable(ids []kv.RequestID) []kv.RequestID {
	out := make([]kv.RequestID, 0, len(ids))
	for _, id := range ids {
		if _, err := wire.AppendHeartbeat(nil, []kv.RequestID{id}); err == nil {
			out = append(out, id)
		}
	}
	return out
}

func (m *machine) sendStockHeartbeats(b *beat, r *remote) {
	for ids := b.ids; len(ids) > 0; {
		n := min(len(ids), maxHeartbeatIDs)
		if msg := heartbeat(ids[:n]); msg != nil {
			m.do(notify{r.engine, r.agent.ID, "heartbeat", msg})
			m.stats.HeartbeatsSent++
		}
		ids = ids[n:]
	}
}

// heartbeat is the message for these ids. Ids that no heartbeat can carry are left out; nil if none
// is left.
func heartbeat(ids []kv.RequestID) []byte {
	msg, err := wire.AppendHeartbeat(nil, ids)
	if err == nil {
		return msg
	}
	good := nameable(ids)
	if len(good) == 0 {
		return nil
	}
	if msg, err = wire.AppendHeartbeat(nil, good); err != nil {
		return nil
	}
	return msg
}

// stop ends all signs of life.
func (b *beats) stop(m *machine) {
	for addr, x := range b.byAddr {
		m.timers.Remove(&x.due)
		delete(b.byAddr, addr)
	}
}
