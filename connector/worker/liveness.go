package worker

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/wire"
)

// pulse is what D hears of one P agent that understands control messages, while something of it is
// awaited: an answer to a beat, a completion, a failure, an acknowledgement. An agent's name is public,
// so that a message counts only if it names something of ours that is under way, which strangers do not
// know.
type pulse struct {
	name     agent.Name
	receives map[uint64]*receive // registered and not ended; those in quarantine too
	began    time.Time
	heard    time.Time
	spoke    bool                  // something was heard
	due      time.Time             // what the timer is set to
	via      map[agent.PeerID]bool // connections under its name by which we were reached; true: its own, as a message has proved
	outLost  bool                  // ours to it was lost
	silence  deadline.Item[any]
}

// silenceBound is how long P may be silent.
func (m *machine) silenceBound() time.Duration {
	return time.Duration(m.cfg.SilentBeats) * m.interval()
}

// patience is how long P may be silent: three heartbeats. Before its first word P has to shake hands with us,
// each step of which has a deadline of its own and is no silence.
func (m *machine) patience(p *pulse) time.Duration {
	if p.spoke {
		return m.silenceBound()
	}
	return max(m.silenceBound(), m.cfg.QueryTimeout+m.interval())
}

// wait sets the timer of a pulse.
func (m *machine) await(p *pulse, until time.Time) {
	p.due = until
	m.timers.Set(&p.silence, until)
}

// shaking is until when P may be shaking hands with us: whoever asks our side channel may be P, whose next word
// or question comes a step later at most, and ends with the handshake's own deadline.
func (m *machine) shaking(p *pulse) time.Time {
	if p.spoke {
		return time.Time{}
	}
	until, last := m.outside.asked.Add(m.cfg.QueryTimeout+m.interval()), p.began.Add(m.cfg.HandshakeTimeout+m.interval())
	if last.Before(until) {
		return last
	}
	return until
}

// listen begins to wait for an agent's signs of life.
func (m *machine) listen(r *receive) {
	name := r.remote.name()
	p := m.consumer.pulses[name]
	if p == nil {
		p = &pulse{name: name, receives: make(map[uint64]*receive), via: make(map[agent.PeerID]bool), heard: m.now}
		p.silence.Value = p
		m.consumer.pulses[name] = p
	}
	p.receives[r.serial] = r
	if _, runs := p.silence.At(); !runs && r.remote.control {
		p.heard = m.now
		if !p.spoke {
			p.began = m.now
		}
		m.await(p, m.now.Add(m.patience(p)))
	}
}

// unlisten ends the wait of one receive; the timer ends with the last that is not in quarantine.
func (m *machine) unlisten(r *receive, forGood bool) {
	if r.remote == nil {
		return
	}
	p := m.consumer.pulses[r.remote.name()]
	if p == nil || p.receives[r.serial] == nil {
		return
	}
	if forGood {
		delete(p.receives, r.serial)
	}
	for _, x := range p.receives {
		if x.quarantined == nil {
			return
		}
	}
	m.timers.Remove(&p.silence)
	if len(p.receives) == 0 {
		delete(m.consumer.pulses, p.name)
	}
}

// reached notes a connection by which somebody has reached us under an agent's name.
func (m *machine) reached(from agent.PeerID) {
	p := m.consumer.pulses[from.Name]
	if p == nil || m.added(from) {
		return
	}
	if _, known := p.via[from]; !known && len(p.via) < maxConnections {
		p.via[from] = false
	}
}

// hear notes a sign of life, and that this is the agent's own connection: the message names something of
// ours that is under way.
func (m *machine) hear(from agent.PeerID) {
	p := m.consumer.pulses[from.Name]
	if p == nil {
		return
	}
	p.heard, p.spoke = m.now, true
	if _, runs := p.silence.At(); runs {
		m.await(p, m.now.Add(m.silenceBound()))
	}
	if m.added(from) {
		return
	}
	if _, known := p.via[from]; !known && len(p.via) >= maxConnections {
		for id, own := range p.via {
			if !own {
				delete(p.via, id)
				break
			}
		}
	}
	p.via[from] = true
}

// added tells whether a connection is the one that we made.
func (m *machine) added(id agent.PeerID) bool {
	r := m.named[id.Name]
	return r != nil && r.agent.ID == id
}

// pulseSilent ends what waits for an agent that has been silent for too long. If this timer itself
// comes late, it was we who did not run (stopped, or the machine slept), and what P said meanwhile
// may lie unread: P gets one more beat.
func (m *machine) pulseSilent(p *pulse) {
	if m.now.Sub(p.due) >= m.interval() {
		m.await(p, m.now.Add(m.interval()))
		for _, r := range p.inOrder() {
			if b := m.beats.byAddr[r.reg.Peer]; b != nil {
				m.timers.Set(&b.due, m.now)
			}
		}
		return
	}
	if until := m.shaking(p); until.After(m.now) {
		m.await(p, until)
		return
	}
	bound, told := m.silenceBound(), fmt.Sprintf("%d heartbeats", m.cfg.SilentBeats)
	if !p.spoke && m.now.Sub(p.heard) > bound {
		bound, told = m.now.Sub(p.heard), "it has not said a word since it was asked, nor shaken hands with us"
	}
	for _, r := range p.inOrder() {
		if r.quarantined == nil {
			m.stats.PeersSilent++
			m.failReceive(r, connector.PhaseWait, fmt.Sprintf(
				"nothing was heard of its prefill engine for %v (%s): check that engine %q runs, is not stopped, and can reach %s",
				bound.Round(time.Millisecond), told, r.reg.Peer.Engine, m.whereWeAre()))
		}
	}
	// Whoever needs the engine next shakes hands anew: it may have restarted without a word, and a
	// connection that says nothing is worth nothing.
	if r := m.named[p.name]; r != nil {
		m.do(lost{r.agent.ID, fmt.Errorf("nothing was heard of it for %v", bound.Round(time.Millisecond))})
		m.forgetRemote(r)
	}
}

func (p *pulse) inOrder() []*receive {
	return slices.SortedFunc(maps.Values(p.receives), func(a, b *receive) int { return cmp.Compare(a.serial, b.serial) })
}

// onStates takes P's answers about our registrations.
func (m *machine) onStates(from agent.PeerID, s *wire.States) {
	for _, a := range s.Answers {
		r := m.consumer.byWireID[a.ID]
		if r == nil || r.gen != a.Generation || r.remote.name() != from.Name {
			continue // it has ended since
		}
		if !same(r.token, a.Token) {
			m.forged(from.Name, "state", a.ID)
			continue
		}
		m.hear(from)
		if r.quarantined != nil {
			continue
		}
		m.onState(r, s, a.State)
	}
}

// onState takes one answer. Answers may come late and in any order: what ends a receive must answer
// a beat that was sent after what it contradicts.
func (m *machine) onState(r *receive, s *wire.States, state wire.RequestState) {
	seq := s.Seq
	if state == wire.StateUnknown {
		if r.acked && seq > r.ackedAt {
			m.endFailed(r, connector.PhaseWait, fmt.Sprintf(
				"engine %q forgot the request that it had acknowledged; it may have restarted", r.reg.Peer.Engine), false)
		}
		return
	}
	if !r.acked {
		r.acked, r.ackedAt = true, m.correspondent(r.remote.name()).seq
	}
	changed := r.state != state
	r.state = state
	switch state {
	case wire.StateUnmatched:
		switch {
		case changed:
			r.unmatchedAt = m.now
		case m.now.Sub(r.unmatchedAt) >= m.cfg.Lease:
			m.failReceive(r, connector.PhasePrefill, fmt.Sprintf(
				"engine %q lives, but no prefill request of it arrived there within %v: check that the router sends the prefill leg to the engine that it names to the decode leg",
				r.reg.Peer.Engine, m.cfg.Lease))
		}
	case wire.StateQueued, wire.StateRunning:
		// A worker answers also when its engine hangs in a step; then the count stands still, and R ends it.
		if changed || s.Steps == 0 || s.Steps != r.steps {
			r.steps = s.Steps
			m.progress(r, changed)
		}
	case wire.StateWriting:
		m.progress(r, changed)
	case wire.StateFinished:
		if changed { // an agent that never has room must not keep D for ever
			m.progress(r, true)
		}
	case wire.StateSent:
		switch {
		case seq == 0:
		case r.sentAtSeq == 0:
			r.sentAtSeq = m.correspondent(r.remote.name()).seq
		case seq > r.sentAtSeq:
			m.endFailed(r, connector.PhaseTransfer, fmt.Sprintf("engine %q has written it, but its completion never came", r.reg.Peer.Engine), false)
		}
	}
}

// progress tells the ledger that P works on a request, now and then.
func (m *machine) progress(r *receive, changed bool) {
	if !changed && m.now.Sub(r.progressed) < m.timeout()/4 {
		return
	}
	r.progressed = m.now
	m.timers.Set(&r.silence, m.now.Add(m.timeout()+backstop))
	m.do(reportProgress{r.reg.ID})
}
