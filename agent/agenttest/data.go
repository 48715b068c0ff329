package agenttest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/memory"
	"github.com/kvferry/kvferry/kv"
)

// Random lists of descriptors of mixed lengths, random indices with repetitions of sources, both
// ways: afterwards every byte of both memories is what a plain copy would have made of it.
func scatterGather(s *suite) {
	p, d := s.add(), s.add()
	const size = 1 << 20
	pm, dm := p.alloc(size), d.alloc(size)
	peer := p.connect(d)
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 30 {
		fill(pm.Bytes(), uint64(round))
		fill(dm.Bytes(), uint64(round)+1000)
		mine, theirs := randomLists(r, pm, dm)
		local, remote := p.list(agent.Local, mine...), p.list(peer.ID, theirs...)
		tr := agent.Transfer{Op: agent.Op(round % 2), Local: local, Remote: remote, Silence: long}
		for _, i := range r.Perm(len(mine))[:1+r.IntN(len(mine))] {
			tr.LocalIdx = append(tr.LocalIdx, uint32(i))
			tr.RemoteIdx = append(tr.RemoteIdx, uint32(i))
		}
		wantP, wantD := bytes.Clone(pm.Bytes()), bytes.Clone(dm.Bytes())
		var total int64
		for _, i := range tr.LocalIdx {
			a := wantP[mine[i].Addr-pm.Addr():][:mine[i].Length]
			b := wantD[theirs[i].Addr-dm.Addr():][:theirs[i].Length]
			if tr.Op == agent.Write {
				copy(b, a)
			} else {
				copy(a, b)
			}
			total += int64(len(a))
		}
		tr.Grant = d.grant(p, agent.Access(tr.Op), theirs...)
		res := p.expect(p.post(tr), agent.OutcomeDone)
		if res.Bytes != total || res.Descs != len(tr.LocalIdx) || res.Peer != peer.ID {
			s.Errorf("round %d: result says %d bytes, %d pairs, peer %v; want %d, %d, %v",
				round, res.Bytes, res.Descs, res.Peer, total, len(tr.LocalIdx), peer.ID)
		}
		if !bytes.Equal(pm.Bytes(), wantP) || !bytes.Equal(dm.Bytes(), wantD) {
			s.Fatalf("round %d (op %d): memory is not what a copy makes", round, tr.Op)
		}
		d.Revoke(tr.Grant)
		p.Release(local)
		p.Release(remote)
	}
}

// randomLists are pairwise equally long descriptors, in random order on each side, disjoint.
func randomLists(r *rand.Rand, pm, dm agent.Memory) (mine, theirs []kv.Descriptor) {
	n := 1 + r.IntN(200)
	var lens []uint64
	for range n {
		l := uint64(1 + r.IntN(64))
		if r.IntN(10) == 0 {
			l = uint64(1 + r.IntN(20000))
		}
		lens = append(lens, l)
	}
	place := func(m agent.Memory) []kv.Descriptor {
		out := make([]kv.Descriptor, n)
		at := uint64(0)
		for _, i := range r.Perm(n) {
			at += uint64(r.IntN(3)) // sometimes neighbours touch
			if at+lens[i] > uint64(len(m.Bytes())) {
				lens[i] = 1
			}
			out[i] = kv.Descriptor{Addr: m.Addr() + at, Length: lens[i]}
			at += lens[i]
		}
		return out
	}
	place(pm) // settles the lengths that fit
	place(dm)
	return place(pm), place(dm)
}

// Memory that somebody else has mapped and lent serves as well as the agent's own.
func borrowedMemory(s *suite) {
	p, d := s.add(), s.add()
	seg, err := memory.Map(8192)
	s.must(err)
	defer seg.Unmap()
	reg, err := p.Register(seg.Addr(), 8192, agent.DRAM, "the test")
	s.must(err)
	if _, err := p.Register(seg.Addr()+4096, 8192, agent.DRAM, "another"); err == nil {
		s.Error("overlapping memory was registered")
	}
	fill(seg.Bytes(), 5)
	dm := d.alloc(8192)
	for i, b := range dm.Bytes() {
		if b != 0 {
			s.Fatalf("byte %d of new memory is %d", i, b)
		}
	}
	peer := p.connect(d)
	whole := kv.Descriptor{Addr: dm.Addr(), Length: 8192}
	tr := agent.Transfer{
		Local: p.list(agent.Local, kv.Descriptor{Addr: seg.Addr(), Length: 8192}), LocalIdx: []uint32{0},
		Remote: p.list(peer.ID, whole), RemoteIdx: []uint32{0},
		Grant: d.grant(p, agent.AccessWrite, whole), Silence: long,
	}
	p.expect(p.post(tr), agent.OutcomeDone)
	if !bytes.Equal(seg.Bytes(), dm.Bytes()) {
		s.Error("the bytes did not arrive")
	}
	s.must(reg.Deregister(context.Background()))
	if _, err := p.Post(tr); err == nil {
		s.Error("a transfer from deregistered memory was accepted")
	}
	reg, err = p.Register(seg.Addr(), 8192, agent.DRAM, "the test again")
	s.must(err)
	if _, err := p.Post(tr); err == nil {
		s.Error("a list from before the memory was deregistered is accepted")
	}
	s.must(reg.Deregister(context.Background()))
}

// When a notification is read, the bytes it belongs to are in place, whatever else is under way.
func notificationAfterData(s *suite) {
	x := s.pair(64, 16<<10)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	for round := range 20 {
		fill(x.pm.Bytes(), uint64(round)+77)
		msg := fmt.Sprintf("round %d", round)
		tr := x.transfer(agent.Write, g)
		tr.Notif = []byte(msg)
		id := x.p.post(tr)
		n := x.d.notified(msg)
		if !bytes.Equal(x.pm.Bytes(), x.dm.Bytes()) {
			s.Fatalf("round %d: notified before the bytes were in place", round)
		}
		switch {
		case n.Arrival != nil && n.Arrival.Bytes != int64(len(x.dm.Bytes())):
			s.Errorf("arrival of %d bytes", n.Arrival.Bytes)
		case n.Arrival == nil && x.d.Capabilities().TellsArrivals:
			s.Error("the arrival is not told")
		}
		if n.From.Name != x.p.Name() || n.From.Gen == 0 {
			s.Errorf("notification from %v", n.From)
		}
		x.p.expect(id, agent.OutcomeDone)
	}
}

// A READ with a notification tells the peer that it has been read.
func readNotifies(s *suite) {
	x := s.pair(4, 4096)
	fill(x.dm.Bytes(), 9)
	tr := x.transfer(agent.Read, x.d.grant(x.p, agent.AccessRead, x.dDesc...))
	tr.Notif = []byte("read")
	id := x.p.post(tr)
	x.d.notified("read")
	x.p.expect(id, agent.OutcomeDone)
	if !bytes.Equal(x.pm.Bytes(), x.dm.Bytes()) {
		s.Error("the bytes were not read")
	}
}

// Notifications alone come in the order they were sent, whatever transfers run beside them.
func notificationsInOrder(s *suite) {
	x := s.pair(16, 64<<10)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	const n = 500
	var ids []agent.TransferID
	for i := range n {
		if i%100 == 0 {
			ids = append(ids, x.p.post(x.transfer(agent.Write, g)))
		}
		s.must(x.p.Notify(x.p.peers[x.d].ID, fmt.Appendf(nil, "m%d", i)))
	}
	x.d.notified(fmt.Sprintf("m%d", n-1))
	var got []string
	for _, ev := range x.d.all() {
		if m, ok := ev.(agent.Notification); ok {
			got = append(got, string(m.Msg))
		}
	}
	for i := range n {
		if got[i] != fmt.Sprintf("m%d", i) {
			s.Fatalf("message %d is %s", i, got[i])
		}
	}
	for _, id := range ids {
		x.p.expect(id, agent.OutcomeDone)
	}
	if err := x.p.Notify(x.p.peers[x.d].ID, nil); err == nil {
		s.Error("an empty notification was sent")
	}
}

// Several peers post to one, in both directions, at once, and admit and remove another beside it; all of it is
// right in the end.
func manyAtOnce(s *suite) {
	d, other := s.add(), s.add()
	const peers, rounds = 4, 8
	var wg sync.WaitGroup
	pairs := make([]*pair, peers)
	for i := range pairs {
		pairs[i] = s.pairOf(s.add(), d, 32, 8<<10)
		fill(pairs[i].pm.Bytes(), uint64(i)+50)
	}
	for i, x := range pairs {
		w, r := d.grant(x.p, agent.AccessWrite, x.dDesc...), d.grant(x.p, agent.AccessRead, x.dDesc...)
		// The lower half of the blocks is written, the upper half read.
		wg.Go(func() {
			half := uint32(len(x.dDesc) / 2)
			idx := all(int(half))
			var upper []uint32
			for _, k := range idx {
				upper = append(upper, k+half)
			}
			for round := range rounds {
				tw := x.transfer(agent.Write, w)
				tw.LocalIdx, tw.RemoteIdx = idx, slices.Clone(idx)
				tw.Notif = fmt.Appendf(nil, "%d/%d", i, round)
				tr := x.transfer(agent.Read, r)
				tr.LocalIdx, tr.RemoteIdx = upper, slices.Clone(upper)
				for _, t := range []agent.Transfer{tw, tr} {
					id, err := x.p.Post(t)
					if err != nil {
						s.Error(err)
						return
					}
					x.p.mark(id)
				}
			}
		})
	}
	for _, n := range []*node{pairs[0].p, d} {
		wg.Go(func() {
			for range rounds {
				p, err := n.AddPeer(context.Background(), agent.PeerInfo{Offers: other.Offers()})
				if err != nil {
					s.Error(err)
					return
				}
				n.RemovePeer(p.ID)
			}
		})
	}
	wg.Wait()
	for i, x := range pairs {
		x.p.mu.Lock()
		ids := slices.Collect(keys(x.p.mu.posted))
		x.p.mu.Unlock()
		for _, id := range ids {
			x.p.expect(id, agent.OutcomeDone)
		}
		x.d.notified(fmt.Sprintf("%d/%d", i, rounds-1))
		if !bytes.Equal(x.pm.Bytes(), x.dm.Bytes()) {
			s.Errorf("pair %d: memories differ", i)
		}
	}
}

func keys(m map[agent.TransferID]bool) func(func(agent.TransferID) bool) {
	return func(yield func(agent.TransferID) bool) {
		for id := range m {
			if !yield(id) {
				return
			}
		}
	}
}
