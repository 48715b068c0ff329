package local

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/kv"
)

// Agent is one party of a Fabric. Its methods may be called from any goroutine; none waits for a
// peer.
type Agent struct {
	fabric *Fabric
	name   agent.Name
	front  *front.Front
	closer sync.Once
	err    error // of Close

	// Guarded by the fabric's mu.
	dead         bool
	generations  kv.Generation
	peers        map[agent.Name]*link   // added by us
	inbound      map[agent.PeerID]*link // that added us
	lastTransfer agent.TransferID
	transfers    map[agent.TransferID]*transfer
}

var _ agent.Agent = (*Agent)(nil)
var _ agent.Namer = (*Agent)(nil)

// Name is Agent.Name.
func (a *Agent) Name() agent.Name { return a.name }

// Capabilities is Agent.Capabilities.
func (a *Agent) Capabilities() agent.Capabilities {
	return agent.Capabilities{Revocable: true, CheapAdmission: true, ParallelAdmission: true, TellsArrivals: true}
}

// Offers is Agent.Offers: the name is all that a peer of the same fabric needs.
func (a *Agent) Offers() []agent.Offer {
	return []agent.Offer{{Transport: Transport, Blob: []byte(a.name)}}
}

// Alloc is Agent.Alloc.
func (a *Agent) Alloc(length int) (agent.Memory, error) { return a.front.Alloc(length) }

// Register is Agent.Register.
func (a *Agent) Register(addr uint64, length int, kind agent.MemoryKind, owner string) (agent.Registration, error) {
	return a.front.Register(addr, length, kind, owner)
}

// AddPeer is Agent.AddPeer. It never blocks: a peer that cannot be reached is refused at once.
func (a *Agent) AddPeer(_ context.Context, info agent.PeerInfo) (agent.Peer, error) {
	i := slices.IndexFunc(info.Offers, func(o agent.Offer) bool { return o.Transport == Transport })
	if i < 0 {
		return agent.Peer{}, &agent.PeerError{Phase: "offer", Err: errors.New("the peer offers no local transport")}
	}
	name := agent.Name(info.Offers[i].Blob)
	fail := func(phase, why string) (agent.Peer, error) {
		return agent.Peer{}, &agent.PeerError{Peer: name, Phase: phase, Err: errors.New(why)}
	}
	if name == a.name {
		return fail("offer", "it is this agent itself")
	}
	f := a.fabric
	f.mu.Lock()
	defer f.mu.Unlock()
	if a.dead {
		return agent.Peer{}, agent.ErrClosed
	}
	if old := a.peers[name]; old != nil {
		a.remove(old)
	}
	if n := len(a.peers); n >= a.front.Limits.Peers {
		return agent.Peer{}, &agent.LimitError{What: "added peers", Got: n + 1, Limit: a.front.Limits.Peers}
	}
	if _, silent := f.mu.silent[pairOf(a.name, name)]; silent {
		return fail("dial", "no answer")
	}
	to := f.mu.agents[name]
	if to == nil || to.dead {
		return fail("dial", "connection refused")
	}
	if len(to.inbound) >= to.front.Limits.Peers || to.front.Events.Congested() {
		return fail("hello", "the peer takes no more connections")
	}
	l := &link{from: a, to: to, up: true, accepted: true, transfers: map[*transfer]struct{}{}}
	l.out = agent.PeerID{Name: name, Gen: a.generation()}
	l.in = agent.PeerID{Name: a.name, Gen: to.generation()}
	l.outShare = a.front.Events.NewPeer(l.out, false)
	l.inShare = to.front.Events.NewPeer(l.in, true)
	a.peers[name], to.inbound[l.in] = l, l
	return agent.Peer{ID: l.out, Transport: Transport, Why: "both agents live in this process"}, nil
}

// PeerNames is Namer.PeerNames.
func (a *Agent) PeerNames(info agent.PeerInfo) (names []agent.Name) {
	for _, o := range info.Offers {
		if o.Transport == Transport {
			names = append(names, agent.Name(o.Blob))
		}
	}
	return names
}

// RemovePeer is Agent.RemovePeer.
func (a *Agent) RemovePeer(id agent.PeerID) {
	a.fabric.mu.Lock()
	defer a.fabric.mu.Unlock()
	if l := a.peers[id.Name]; l != nil && l.out == id {
		a.remove(l)
	}
	if l := a.inbound[id]; l != nil {
		delete(a.inbound, id)
		l.accepted = false
		l.inShare.Forget()
		a.fabric.reach(a.name, l.from.name, func() { l.lose(ErrRemoved) })
	}
}

// remove ends an added peer at the user's wish.
func (a *Agent) remove(l *link) {
	if l.drop(agent.OutcomePeerLost, errors.New("the peer was removed")) {
		l.outShare.Forget()
		a.fabric.reach(a.name, l.to.name, func() { l.refused(ErrRemoved) })
	}
}

// links are all links of an agent in a fixed order. The caller holds the fabric's mu.
func (a *Agent) links() []*link {
	var ls []*link
	for _, l := range a.peers {
		ls = append(ls, l)
	}
	for _, l := range a.inbound {
		ls = append(ls, l)
	}
	slices.SortFunc(ls, func(x, y *link) int {
		return cmp.Compare(x.generationAt(a), y.generationAt(a))
	})
	return ls
}

func (l *link) generationAt(a *Agent) kv.Generation {
	if l.from == a {
		return l.out.Gen
	}
	return l.in.Gen
}

// Prepare is Agent.Prepare.
func (a *Agent) Prepare(owner agent.PeerID, descs []kv.Descriptor) (agent.ListID, error) {
	list, err := a.front.BuildList(owner, descs)
	if err != nil {
		return 0, err
	}
	a.fabric.mu.Lock()
	defer a.fabric.mu.Unlock()
	if l := a.peers[owner.Name]; owner != agent.Local && (l == nil || l.out != owner) {
		return 0, &agent.PeerError{Peer: owner.Name, Phase: "prepare", Err: errors.New("not an added peer, or no longer")}
	}
	return a.front.Lists.Insert(list)
}

// Release is Agent.Release.
func (a *Agent) Release(id agent.ListID) { a.front.Lists.Remove(id) }

// Post is Agent.Post.
func (a *Agent) Post(tr agent.Transfer) (agent.TransferID, error) {
	posted := a.fabric.cfg.Now()
	if a.front.Closed() {
		return 0, agent.ErrClosed
	}
	plan, err := a.front.Check(tr)
	if err != nil {
		return 0, err
	}
	a.fabric.mu.Lock()
	defer a.fabric.mu.Unlock()
	l := a.peers[plan.Peer.Name]
	switch {
	case a.dead:
		err = agent.ErrClosed
	case l == nil || l.out != plan.Peer:
		err = &agent.PostError{Op: tr.Op, Reason: "peer " + string(plan.Peer.Name) + " is gone"}
	case !a.front.Events.Reserve():
		err = agent.ErrBusy
	}
	if err != nil {
		plan.Release()
		return 0, err
	}
	a.lastTransfer++
	t := &transfer{id: a.lastTransfer, link: l, plan: plan, posted: posted, progress: posted}
	a.transfers[t.id] = t
	l.transfers[t] = struct{}{}
	t.watch(plan.Silence)
	l.later(a.fabric.cfg.Latency, t.begin)
	return t.id, nil
}

// Cancel is Agent.Cancel.
func (a *Agent) Cancel(id agent.TransferID) {
	a.fabric.mu.Lock()
	defer a.fabric.mu.Unlock()
	if t := a.transfers[id]; t != nil {
		t.finish(agent.OutcomeCancelled, &agent.PeerError{Peer: t.link.to.name, Phase: "transfer", Err: errCanceled})
	}
}

// Notify is Agent.Notify.
func (a *Agent) Notify(peer agent.PeerID, msg []byte) error {
	fail := func(err error) error { return &agent.PeerError{Peer: peer.Name, Phase: "notify", Err: err} }
	if len(msg) == 0 {
		return fail(errors.New("the notification is empty"))
	}
	if limit := a.front.Limits.Notification; len(msg) > limit {
		return fail(&agent.LimitError{What: "bytes of a notification", Got: len(msg), Limit: limit})
	}
	a.fabric.mu.Lock()
	defer a.fabric.mu.Unlock()
	if a.dead {
		return agent.ErrClosed
	}
	l := a.peers[peer.Name]
	if l == nil || l.out != peer {
		return fail(errors.New("not an added peer, or no longer"))
	}
	if err := l.notify(slices.Clone(msg)); err != nil {
		return fail(err)
	}
	return nil
}

// Grant is Agent.Grant.
func (a *Agent) Grant(spec agent.GrantSpec) (agent.GrantID, error) { return a.front.Grant(spec) }

// Revoke is Agent.Revoke.
func (a *Agent) Revoke(id agent.GrantID) { a.front.Grants.Revoke(id) }

// Events is Agent.Events.
func (a *Agent) Events() <-chan agent.Event { return a.front.Events.Events() }

// Close is Agent.Close.
func (a *Agent) Close() error {
	a.closer.Do(func() {
		a.end(ErrRemoved, true)
		a.err = a.front.FinishClose()
	})
	return a.err
}

// end takes the agent out of the fabric; its peers see err, after what was still under way to them if
// they are to hear it. Grants end after the links, so that a peer
// sees an agent that is gone, and not one that refuses.
func (a *Agent) end(err error, heard bool) {
	defer a.front.BeginClose()
	f := a.fabric
	f.mu.Lock()
	defer f.mu.Unlock()
	if a.dead {
		return
	}
	a.dead = true
	delete(f.mu.agents, a.name)
	for _, l := range a.links() {
		if l.from == a {
			var words [][]byte
			if heard {
				words = l.messages
			}
			l.drop(agent.OutcomeClosed, agent.ErrClosed)
			l.outShare.Forget()
			f.reach(a.name, l.to.name, func() {
				for _, msg := range words {
					if !l.accepted || !l.deliver(msg, nil) {
						return
					}
				}
				l.refused(err)
			})
		} else {
			l.accepted = false
			delete(a.inbound, l.in)
			l.inShare.Forget()
			f.reach(a.name, l.from.name, func() { l.lose(err) })
		}
	}
}
