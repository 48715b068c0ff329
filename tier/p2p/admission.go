package p2p

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// admissions is the book of the peers in the agent. It belongs to the loop.
//
// An agent knows a peer by its name, and who is added under a name takes the place of whoever had it. Names
// are what peers say of themselves, so a session gets into the agent only under a name that no other
// session holds: else it could end the other's transfers by coming and its peer by going. A name is
// held from before AddPeer until RemovePeer, and as long as an AddPeer that was given up still runs.
type admissions struct {
	l       *loop
	running map[kv.Generation]*admission
	names   map[agent.Name]kv.Generation
	ids     map[kv.Generation]agent.PeerID
	waiting []session.Admit // for a name that an AddPeer which was given up still holds
}

// admission is an AddPeer that has not returned.
type admission struct {
	cancel  context.CancelFunc
	givenUp bool
}

func newAdmissions(l *loop) *admissions {
	return &admissions{l: l, running: map[kv.Generation]*admission{}, names: map[agent.Name]kv.Generation{}, ids: map[kv.Generation]agent.PeerID{}}
}

// begin admits a peer, refuses it, or lets it wait until its name is free.
func (b *admissions) begin(a session.Admit) {
	info := peerInfo(a.Connect)
	names := b.namesOf(info)
	for _, n := range names {
		gen, held := b.names[n]
		if !held {
			continue
		}
		if r := b.running[gen]; r != nil && r.givenUp {
			b.waiting = append(b.waiting, a)
			return
		}
		b.l.next = append(b.l.next, session.Admitted{Peer: a.Peer, Gen: a.Gen, Err: fmt.Errorf("its agent %.64q is another session's peer", n)})
		return
	}
	for _, n := range names {
		b.names[n] = a.Gen
	}
	ctx, cancel := context.WithCancel(b.l.t.ctx)
	b.running[a.Gen] = &admission{cancel: cancel}
	b.l.t.admit(ctx, a, info)
}

// namesOf is whom AddPeer might add. Agents that cannot say are given the offers themselves.
func (b *admissions) namesOf(info agent.PeerInfo) []agent.Name {
	var names []agent.Name
	if n, ok := b.l.t.cfg.Agent.(agent.Namer); ok {
		names = n.PeerNames(info)
	} else {
		for _, o := range info.Offers {
			names = append(names, agent.Name(o.Transport+"\x00"+string(o.Blob)))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// returned: AddPeer has.
func (b *admissions) returned(ev session.Admitted) {
	r := b.running[ev.Gen]
	if r == nil {
		return // it was refused without one
	}
	r.cancel()
	delete(b.running, ev.Gen)
	if ev.Err != nil {
		b.release(ev.Gen)
		return
	}
	old, taken := b.names[ev.Agent.Name]
	if id, in := b.ids[old]; taken && in && old != ev.Gen { // by an agent that is no Namer: the earlier peer is gone
		b.l.next = append(b.l.next, session.AgentLost{Agent: id})
	}
	b.names[ev.Agent.Name] = ev.Gen
	b.ids[ev.Gen] = ev.Agent
}

// dismiss gives an admission up, or removes an admitted peer.
func (b *admissions) dismiss(a session.Dismiss) {
	b.waiting = slices.DeleteFunc(b.waiting, func(w session.Admit) bool { return w.Gen == a.Gen })
	if r := b.running[a.Gen]; r != nil {
		r.givenUp = true
		r.cancel()
	}
	if a.Agent != (agent.PeerID{}) {
		b.l.t.cfg.Agent.RemovePeer(a.Agent)
		b.release(a.Gen)
	}
}

// release frees a session's names, and admits who waits for one.
func (b *admissions) release(gen kv.Generation) {
	for n, g := range b.names {
		if g == gen {
			delete(b.names, n)
		}
	}
	delete(b.ids, gen)
	again := b.waiting
	b.waiting = nil
	for _, a := range again {
		b.begin(a)
	}
}

func (b *admissions) cancelAll() {
	for _, r := range b.running {
		r.cancel()
	}
}

// admit adds a peer to the agent: at once where that is cheap, else on a goroutine of its own.
func (t *Tier) admit(ctx context.Context, a session.Admit, info agent.PeerInfo) {
	do := func() session.Admitted {
		p, err := t.cfg.Agent.AddPeer(ctx, info)
		return session.Admitted{Peer: a.Peer, Gen: a.Gen, Agent: p.ID, Transport: p.Transport, Err: err}
	}
	if t.cfg.Agent.Capabilities().CheapAdmission {
		t.loop.next = append(t.loop.next, do())
		return
	}
	t.running.Add(1)
	go func() {
		defer t.running.Done()
		ctx, cancel := context.WithTimeout(ctx, admitTimeout)
		defer cancel()
		if t.admission != nil {
			select {
			case t.admission <- struct{}{}:
				defer func() { <-t.admission }()
			case <-ctx.Done():
				t.post(session.Admitted{Peer: a.Peer, Gen: a.Gen, Err: context.Cause(ctx)})
				return
			}
		}
		t.post(do())
	}()
}
