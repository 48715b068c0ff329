package p2p

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// between is a tier that calls after each portion, on the goroutine that serves them.
type between struct {
	tier.Secondary
	after func([]core.Key)
}

type betweenHost struct {
	tier.Host
	after func([]core.Key)
}

func (b *between) Start(h tier.Host) error { return b.Secondary.Start(&betweenHost{h, b.after}) }

func (h *betweenHost) Serve(keys []core.Key, most int) []core.Served {
	out := h.Host.Serve(keys, most)
	h.after(slices.Clone(keys))
	return out
}

// Between two portions of a long lookup the Manager's lock is free, and another peer has its turn: its lookup, which
// comes after the long one has begun, is answered after one more portion.
func TestLongLookupHoldsNobodyUp(t *testing.T) {
	f := local.New(local.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ag, err := f.Agent(agent.Name(ln.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	var a *node
	long, other := keys(0, 12), keys(20, 21)
	begun := make(chan struct{})
	var served [][]core.Key // of a's loop, until it has answered
	after := func(ks []core.Key) {
		free := make(chan struct{})
		go func() {
			defer close(free)
			a.m.Empty()
		}()
		select {
		case <-free:
		case <-time.After(patience):
			t.Error("the lock is not free between two portions")
		}
		served = append(served, ks)
		if slices.Equal(ks, long[:2]) { // the other's lookup comes now
			close(begun)
			for end := time.Now().Add(patience); len(a.tier.messages) == 0 && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
		}
	}
	wrap := func(s tier.Secondary) tier.Secondary { return &between{s, after} }
	a = nodeBehind(t, ln.Addr().String(), ag, func(c *Config) {
		c.Listener, c.Session.Portion, c.Session.PeerPins = ln, 2, testSlots
	}, wrap)
	b, c := newNode(t, f, nil), newNode(t, f, nil)
	a.have(append(keys(0, 12), other...))
	for _, n := range []*node{b, c} { // they meet
		n.begin(tier.Request{ID: "meet", Source: a.source("meet-" + n.name)})
		n.expect("meet", keys(40, 41), "-")
	}
	c.begin(tier.Request{ID: "other", Source: a.source("other")})
	b.begin(tier.Request{ID: "long", Source: a.source("long")})
	b.m.Lookup("long", long)
	<-begun
	c.expect("other", other, "+")
	b.expect("long", long, "++++++++++++")
	for _, n := range []*node{b, c} {
		n.m.Finish("meet")
		n.m.Finish("long")
		n.m.Finish("other")
	}
	a.quiet()
	a.close()
	want := [][]core.Key{keys(40, 41), keys(40, 41), long[:2], long[2:4], other, long[4:6], long[6:8], long[8:10], long[10:]}
	if d := cmp.Diff(want, served); d != "" {
		t.Errorf("served: %s", d)
	}
}

// Each peer has its turn after the others, however many lookups it has.
func TestTurns(t *testing.T) {
	var q turns
	for i, p := range []session.PeerID{"a", "a", "a", "b", "c", "b"} {
		q.add(session.Serve{Peer: p, Lookup: uint64(i)})
	}
	q.drop(session.Forgo{Peer: "a", Lookup: 1})
	q.drop(session.Forgo{Peer: "c", Lookup: 4})
	q.drop(session.Forgo{Peer: "d", Lookup: 9})
	var got []uint64
	for q.any() {
		s, _ := q.next()
		got = append(got, s.Lookup)
	}
	if d := cmp.Diff([]uint64{0, 3, 2, 5}, got); d != "" {
		t.Error(d)
	}
	if _, ok := q.next(); ok || len(q.waiting) > 0 {
		t.Errorf("left: %+v", q)
	}
}
