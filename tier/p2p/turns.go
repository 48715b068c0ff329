package p2p

import (
	"slices"

	"github.com/kvferry/kvferry/tier/p2p/session"
)

// turns is the portions of peers' lookups that wait to be looked up. Each peer has its turn after the others,
// however many it has asked. A peer has at most one portion of each lookup here, so the session's bounds are
// its. The loop's goroutine owns it.
type turns struct {
	order   []session.PeerID // those with something, next first
	waiting map[session.PeerID][]session.Serve
}

func (t *turns) add(a session.Serve) {
	if t.waiting == nil {
		t.waiting = map[session.PeerID][]session.Serve{}
	}
	if len(t.waiting[a.Peer]) == 0 {
		t.order = append(t.order, a.Peer)
	}
	t.waiting[a.Peer] = append(t.waiting[a.Peer], a)
}

func (t *turns) any() bool { return len(t.order) > 0 }

// next takes the portion whose turn it is.
func (t *turns) next() (session.Serve, bool) {
	if len(t.order) == 0 {
		return session.Serve{}, false
	}
	p := t.order[0]
	t.order = t.order[1:]
	a := t.waiting[p][0]
	if t.waiting[p] = t.waiting[p][1:]; len(t.waiting[p]) > 0 {
		t.order = append(t.order, p)
	} else {
		delete(t.waiting, p)
	}
	return a, true
}

// drop forgets a portion that nobody waits for any more.
func (t *turns) drop(a session.Forgo) {
	t.waiting[a.Peer] = slices.DeleteFunc(t.waiting[a.Peer], func(s session.Serve) bool { return s.Lookup == a.Lookup })
	if len(t.waiting[a.Peer]) == 0 {
		delete(t.waiting, a.Peer)
		t.order = slices.DeleteFunc(t.order, func(p session.PeerID) bool { return p == a.Peer })
	}
}
