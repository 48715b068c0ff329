package mux

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
)

// option is a backend that may serve a peer, and why it is tried where it is.
type option struct {
	backend int
	why     string
}

// options are the backends that may serve a peer, best first, or why there is none.
func (m *Mux) options(info agent.PeerInfo) ([]option, error) {
	var opts []option
	var common, elsewhere []string
	for i, b := range m.backends {
		at := slices.IndexFunc(info.Offers, func(o agent.Offer) bool { return o.Transport == b.transport })
		if at < 0 || m.setting != Auto && m.setting != b.transport {
			continue
		}
		common = append(common, b.transport)
		o := option{backend: i}
		if b.sameHost != nil {
			if !b.sameHost(info.Offers[at]) || m.host != "" && info.HostID != "" && m.host != info.HostID {
				elsewhere = append(elsewhere, b.transport)
				continue
			}
			o.why = "same host"
		}
		opts = append(opts, o)
	}
	switch {
	case len(opts) == 0 && len(elsewhere) > 0:
		return nil, fmt.Errorf("%s is all that both sides may use, and the peer is on another host", elsewhere[0])
	case len(opts) == 0 && m.setting != Auto:
		return nil, fmt.Errorf("the peer does not offer %s, which is the setting here", m.setting)
	case len(opts) == 0:
		return nil, errors.New("the peer offers no transport of this agent")
	}
	for k := range opts {
		switch {
		case m.setting != Auto:
			opts[k].why = "chosen by setting"
		case len(common) == 1:
			opts[k].why = "the only transport both sides offer"
		case opts[k].why != "":
		case len(elsewhere) > 0:
			opts[k].why = "the peer is on another host"
		default:
			opts[k].why = "first in the order of preference"
		}
	}
	return opts, nil
}

// AddPeer is Agent.AddPeer. It tries the transports that both sides have, best first.
func (m *Mux) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	if m.closed.Load() {
		return agent.Peer{}, agent.ErrClosed
	}
	opts, err := m.options(info)
	if err != nil {
		return agent.Peer{}, &agent.PeerError{Phase: "offer", Err: err}
	}
	var tried []error
	for _, o := range opts {
		p, err := m.add(ctx, o.backend, info)
		if err == nil {
			p.Why = o.why
			if len(tried) > 0 {
				p.Why = fmt.Sprintf("fallback, because %v", errors.Join(tried...))
			}
			return p, nil
		}
		var pe *agent.PeerError
		if !errors.As(err, &pe) || ctx.Err() != nil {
			return agent.Peer{}, err // of this agent, not of the transport
		}
		tried = append(tried, fmt.Errorf("%s failed: %w", m.backends[o.backend].transport, err))
	}
	return agent.Peer{}, errors.Join(tried...)
}

// add admits a peer by one backend.
func (m *Mux) add(ctx context.Context, i int, info agent.PeerInfo) (agent.Peer, error) {
	m.mu.Lock()
	m.mu.adding[i]++
	m.mu.Unlock()
	p, err := m.backends[i].AddPeer(ctx, info)
	m.mu.Lock()
	defer m.mu.Unlock()
	defer func() {
		if m.mu.adding[i]--; m.mu.adding[i] == 0 {
			for id := range m.mu.early {
				if k, _, _ := m.downPeer(id); k == i {
					delete(m.mu.early, id)
				}
			}
		}
	}()
	if err != nil {
		return agent.Peer{}, err
	}
	id := m.upPeer(i, p.ID)
	old, again := m.mu.names[id.Name]
	if again {
		m.remove(old) // also if another backend serves it
	}
	if n := len(m.mu.names); n >= m.limits.Peers {
		m.backends[i].RemovePeer(p.ID)
		return agent.Peer{}, &agent.LimitError{What: "added peers", Got: n + 1, Limit: m.limits.Peers}
	}
	share := m.queue.NewPeer(id, false)
	m.mu.names[id.Name], m.mu.shares[id] = id, share
	if lost, early := m.mu.early[id]; early {
		m.lost(id, share, lost)
	}
	return agent.Peer{ID: id, Transport: m.backends[i].transport}, nil
}

// PeerNames is Namer.PeerNames: what any of the backends can read.
func (m *Mux) PeerNames(info agent.PeerInfo) (names []agent.Name) {
	for _, b := range m.backends {
		if n, ok := b.Agent.(agent.Namer); ok {
			names = append(names, n.PeerNames(info)...)
		}
	}
	return names
}

// RemovePeer is Agent.RemovePeer.
func (m *Mux) RemovePeer(id agent.PeerID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.remove(id)
}

// remove ends a peer without telling the user. The caller holds mu.
func (m *Mux) remove(id agent.PeerID) {
	i, down, ok := m.downPeer(id)
	if !ok {
		return
	}
	m.backends[i].RemovePeer(down)
	if share := m.mu.shares[id]; share != nil {
		share.Forget()
		delete(m.mu.shares, id)
		m.mu.removed.add(id)
	}
	if m.mu.names[id.Name] == id {
		delete(m.mu.names, id.Name)
	}
}

// lost tells the user of a lost peer. The caller holds mu.
func (m *Mux) lost(id agent.PeerID, share *events.Peer, ev agent.PeerLost) {
	delete(m.mu.shares, id)
	if m.mu.names[id.Name] == id {
		delete(m.mu.names, id.Name)
	}
	share.Lost(ev.Err)
}

// pump moves one backend's events into the queue. It never blocks but for the next event.
func (m *Mux) pump(i int) {
	for ev := range m.backends[i].Events() {
		switch ev := ev.(type) {
		case agent.Result:
			ev.Transfer = agent.TransferID(m.up(i, uint64(ev.Transfer)))
			ev.Peer = m.upPeer(i, ev.Peer)
			m.queue.Result(ev)
		case agent.Stopped:
			ev.Transfer = agent.TransferID(m.up(i, uint64(ev.Transfer)))
			ev.Peer = m.upPeer(i, ev.Peer)
			m.queue.Stopped(ev)
		case agent.Notification:
			m.notification(m.upPeer(i, ev.From), ev)
		case agent.PeerLost:
			m.peerLost(i, m.upPeer(i, ev.Peer), ev)
		}
	}
}

// notification passes a notification on; a peer that goes beyond its share is lost.
func (m *Mux) notification(id agent.PeerID, ev agent.Notification) {
	m.mu.Lock()
	defer m.mu.Unlock()
	share := m.inbound(id)
	if share == nil {
		return
	}
	if err := share.Notify(ev.Msg, ev.Arrival); err != nil {
		i, down, _ := m.downPeer(id)
		m.backends[i].RemovePeer(down)
		m.mu.removed.add(id)
		m.lost(id, share, agent.PeerLost{Err: &agent.PeerError{Peer: id.Name, Phase: "connection", Err: err}})
	}
}

// inbound is the share of a peer that reached us, made when it is first heard of; nil if it was
// removed or there is no room for strangers. The caller holds mu.
func (m *Mux) inbound(id agent.PeerID) *events.Peer {
	share := m.mu.shares[id]
	switch {
	case share != nil:
	case m.mu.removed.has(id):
	case m.queue.Congested():
		i, down, _ := m.downPeer(id)
		m.backends[i].RemovePeer(down)
		m.mu.removed.add(id)
	default:
		share = m.queue.NewPeer(id, true)
		m.mu.shares[id] = share
	}
	return share
}

func (m *Mux) peerLost(i int, id agent.PeerID, ev agent.PeerLost) {
	m.mu.Lock()
	defer m.mu.Unlock()
	share := m.mu.shares[id]
	if share == nil && ev.Inbound {
		share = m.inbound(id)
	}
	switch {
	case share != nil:
		m.lost(id, share, ev)
	case !ev.Inbound && m.mu.adding[i] > 0:
		m.mu.early[id] = ev
	}
}

// tombs remembers the latest removed peers, of which some events may still be under way.
type tombs struct {
	set   map[agent.PeerID]struct{}
	order []agent.PeerID // a ring
	next  int
}

func (t *tombs) init(size int) {
	t.set = map[agent.PeerID]struct{}{}
	t.order = make([]agent.PeerID, size)
}

func (t *tombs) add(id agent.PeerID) {
	if t.has(id) {
		return
	}
	delete(t.set, t.order[t.next])
	t.order[t.next] = id
	t.set[id] = struct{}{}
	t.next = (t.next + 1) % len(t.order)
}

func (t *tombs) has(id agent.PeerID) bool {
	_, ok := t.set[id]
	return ok
}
