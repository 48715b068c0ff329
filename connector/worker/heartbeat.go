package worker

import (
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// beat is the signs of life for one prefill engine. It has its own timer, which no engine step
// moves (push-mode.md lets heartbeats ride on steps; issue 3 does not).
type beat struct {
	addr connector.PeerAddr
	ids  []kv.RequestID
	due  deadline.Item[any]
	// asked: the answer of a connect is awaited.
	asked bool
}

// beats is who waits for whom. No timer runs when nobody waits.
type beats struct {
	byAddr map[connector.PeerAddr]*beat
}

func (b *beats) init() { b.byAddr = make(map[connector.PeerAddr]*beat) }

// setHeartbeats replaces the whole set. A new engine is due at once, one that stays keeps its time.
func (m *machine) setHeartbeats(now time.Time, groups []connector.HeartbeatGroup) {
	old := m.beats.byAddr
	m.beats.byAddr = make(map[connector.PeerAddr]*beat, len(groups))
	for _, g := range groups {
		b := old[g.Peer]
		if b == nil {
			b = &beat{addr: g.Peer}
			b.due.Value = b
			m.timers.Set(&b.due, now)
		}
		delete(old, g.Peer)
		b.ids = g.IDs
		m.beats.byAddr[g.Peer] = b
	}
	for _, b := range old {
		m.timers.Remove(&b.due)
	}
}

// sendHeartbeat asks for the engine, which counts as use of the connection; the message goes out
// when it is there. A handshake that outlasts the interval is waited for, not doubled, and one that
// fails is tried again next time.
func (m *machine) sendHeartbeat(now time.Time, b *beat) {
	m.timers.Set(&b.due, now.Add(connector.HeartbeatInterval(m.cfg.Lease)))
	if !b.asked {
		b.asked = true
		m.need(b.addr, waiter{beat: b})
	}
}

// beatConnected sends what is current now, if anybody still waits.
func (m *machine) beatConnected(b *beat, r *remote) {
	b.asked = false
	if m.beats.byAddr[b.addr] != b || r.agent.ID.Gen == 0 {
		return
	}
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
	var good []kv.RequestID
	for _, id := range ids {
		if _, err := wire.AppendHeartbeat(nil, []kv.RequestID{id}); err == nil {
			good = append(good, id)
		}
	}
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
