package shm

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/memory"
	"github.com/kvferry/kvferry/kv"
)

// duo is two agents with memory, p having added d.
type duo struct {
	t    testing.TB
	p, d *Agent
	peer agent.PeerID
	evs  collector
}

func newDuo(t testing.TB) *duo {
	x := &duo{t: t, p: newAgent(t, Config{}), d: newAgent(t, Config{})}
	t.Cleanup(func() { x.p.Close(); x.d.Close() })
	peer, err := x.p.AddPeer(context.Background(), agent.PeerInfo{Offers: x.d.Offers()})
	must(t, err)
	x.peer, x.evs = peer.ID, collector{t, x.p.Events()}
	return x
}

// move posts one transfer of whole ranges under a grant of its own, and waits for its end.
func (x *duo) move(op agent.Op, local, remote kv.Descriptor) agent.Result {
	x.t.Helper()
	g, err := x.d.Grant(agent.GrantSpec{Peer: x.p.Name(), Access: agent.Access(op), Ranges: []kv.Descriptor{remote}})
	must(x.t, err)
	defer x.d.Revoke(g)
	x.post(op, local, remote, g)
	r := next[agent.Result](x.evs)
	next[agent.Stopped](x.evs)
	return r
}

func (x *duo) post(op agent.Op, local, remote kv.Descriptor, g agent.GrantID) {
	x.t.Helper()
	l, err := x.p.Prepare(agent.Local, []kv.Descriptor{local})
	must(x.t, err)
	r, err := x.p.Prepare(x.peer, []kv.Descriptor{remote})
	must(x.t, err)
	_, err = x.p.Post(agent.Transfer{
		Op: op, Local: l, LocalIdx: []uint32{0}, Remote: r, RemoteIdx: []uint32{0}, Grant: g, Silence: time.Minute,
	})
	must(x.t, err)
	x.p.Release(l)
	x.p.Release(r)
}

func whole(m agent.Memory) kv.Descriptor {
	return kv.Descriptor{Addr: m.Addr(), Length: uint64(len(m.Bytes()))}
}

// The owner of memory revokes a READ in its middle and at once uses the memory for something else:
// what counts as read is what was there before.
func TestReadIsNeverTorn(t *testing.T) {
	x := newDuo(t)
	pm, err := x.p.Alloc(childBytes)
	must(t, err)
	dm, err := x.d.Alloc(childBytes)
	must(t, err)
	want := make([]byte, childBytes)
	fillBytes(want, 3)
	outcomes := map[agent.Outcome]int{}
	for round := range 40 {
		copy(dm.Bytes(), want)
		clear(pm.Bytes())
		g, err := x.d.Grant(agent.GrantSpec{Peer: x.p.Name(), Access: agent.AccessRead, Ranges: []kv.Descriptor{whole(dm)}})
		must(t, err)
		x.post(agent.Read, whole(pm), whole(dm), g)
		at := round * childBytes / 41
		for i := 0; pm.Bytes()[at] == 0 && pm.Bytes()[at+1] == 0 && i < 1e7; i++ {
			// until some part of it is read
		}
		x.d.Revoke(g)
		clear(dm.Bytes())
		r := next[agent.Result](x.evs)
		next[agent.Stopped](x.evs)
		outcomes[r.Outcome]++
		if r.Outcome == agent.OutcomeDone && !bytes.Equal(pm.Bytes(), want) {
			t.Fatalf("round %d: done, but torn", round)
		}
		if r.Outcome != agent.OutcomeDone && r.Outcome != agent.OutcomeFailed {
			t.Fatalf("round %d: %v (%v)", round, r.Outcome, r.Err)
		}
	}
	t.Log(outcomes)
}

// Memory that peers cannot map is a source all the same, for a WRITE and for a READ.
func TestBorrowedSources(t *testing.T) {
	x := newDuo(t)
	const size = 3<<20 + 5
	own := map[*Agent]agent.Memory{}
	lent := map[*Agent]*memory.Segment{}
	for _, a := range []*Agent{x.p, x.d} {
		m, err := a.Alloc(size)
		must(t, err)
		own[a] = m
		seg, err := memory.Map(size)
		must(t, err)
		defer seg.Unmap()
		reg, err := a.Register(seg.Addr(), size, agent.DRAM, "the test")
		must(t, err)
		defer func() { must(t, reg.Deregister(context.Background())) }()
		lent[a] = seg
	}
	at := func(s *memory.Segment) kv.Descriptor { return kv.Descriptor{Addr: s.Addr(), Length: size} }
	for range 3 {
		maps, fds := mapsOf(t), fdsOf(t)
		fillBytes(lent[x.p].Bytes(), 1)
		if r := x.move(agent.Write, at(lent[x.p]), whole(own[x.d])); r.Outcome != agent.OutcomeDone || r.Bytes != size {
			t.Fatal(r)
		}
		if !bytes.Equal(lent[x.p].Bytes(), own[x.d].Bytes()) {
			t.Error("the WRITE out of borrowed memory did not arrive")
		}
		fillBytes(lent[x.d].Bytes(), 2)
		if r := x.move(agent.Read, whole(own[x.p]), at(lent[x.d])); r.Outcome != agent.OutcomeDone {
			t.Fatal(r)
		}
		if !bytes.Equal(lent[x.d].Bytes(), own[x.p].Bytes()) {
			t.Error("the READ out of borrowed memory did not arrive")
		}
		settled(t, "staged mappings", func() bool { return mapsOf(t) == maps && fdsOf(t) == fds })
	}
	x.d.mu.Lock()
	defer x.d.mu.Unlock()
	for _, c := range x.d.mu.inbound {
		c.jobs.Lock()
		if c.jobs.bytes != 0 || c.jobs.cost != 0 || len(c.jobs.byID) != 0 {
			t.Errorf("left: %d staged bytes, cost %d, %d jobs", c.jobs.bytes, c.jobs.cost, len(c.jobs.byID))
		}
		c.jobs.Unlock()
	}
}

// Transfers too large to be copied twice say so.
func TestBorrowedLimit(t *testing.T) {
	x := newDuo(t)
	seg, err := memory.Map(maxStaged + 4096)
	must(t, err)
	defer seg.Unmap()
	_, err = x.p.Register(seg.Addr(), maxStaged+4096, agent.DRAM, "the test")
	must(t, err)
	l, err := x.p.Prepare(agent.Local, []kv.Descriptor{{Addr: seg.Addr(), Length: maxStaged + 4096}})
	must(t, err)
	r, err := x.p.Prepare(x.peer, []kv.Descriptor{{Addr: 1 << 20, Length: maxStaged + 4096}})
	must(t, err)
	_, err = x.p.Post(agent.Transfer{Local: l, LocalIdx: []uint32{0}, Remote: r, RemoteIdx: []uint32{0}, Silence: time.Second})
	var le *agent.LimitError
	if !errors.As(err, &le) {
		t.Error(err)
	}
}

// Memory that comes and goes, and peers that come and go, leave nothing behind: no mapping, no
// descriptor, no word.
func TestNothingIsLeftBehind(t *testing.T) {
	x := newDuo(t)
	round := func() {
		pm, err := x.p.Alloc(256 << 10)
		must(t, err)
		dm, err := x.d.Alloc(256 << 10)
		must(t, err)
		fillBytes(pm.Bytes(), 9)
		for _, op := range []agent.Op{agent.Write, agent.Read} {
			if r := x.move(op, whole(pm), whole(dm)); r.Outcome != agent.OutcomeDone {
				t.Fatal(r)
			}
		}
		if !bytes.Equal(pm.Bytes(), dm.Bytes()) {
			t.Fatal("the bytes did not arrive")
		}
		must(t, pm.Free(context.Background()))
		must(t, dm.Free(context.Background()))
	}
	round()
	settled(t, "first mappings", func() bool { return mapsOf(t) == 4 }) // four views of two control pages
	fds := fdsOf(t)
	for range 30 {
		round()
	}
	settled(t, "mappings", func() bool { return mapsOf(t) == 4 })
	settled(t, "descriptors", func() bool { return fdsOf(t) == fds })
	for range 30 {
		peer, err := x.p.AddPeer(t.Context(), agent.PeerInfo{Offers: x.d.Offers()})
		must(t, err)
		x.peer = peer.ID
		round()
	}
	settled(t, "mappings", func() bool { return mapsOf(t) == 4 })
	settled(t, "descriptors", func() bool { return fdsOf(t) == fds })
	for _, a := range []*Agent{x.p, x.d} {
		a.control.mu.Lock()
		if a.control.mu.next > 2 || len(a.control.mu.free) != a.control.mu.next {
			t.Errorf("%d words were ever in use, %d are free", a.control.mu.next, len(a.control.mu.free))
		}
		a.control.mu.Unlock()
	}
	must(t, x.p.Close())
	must(t, x.d.Close())
	if n := mapsOf(t); n != 0 {
		t.Errorf("%d mappings after Close", n)
	}
}
