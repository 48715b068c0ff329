package agenttest

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// Whatever is wrong with a transfer or a list is found before anything starts.
func hostileIndices(s *suite) {
	x := s.pair(4, 4096)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	odd := x.p.list(agent.Local, kv.Descriptor{Addr: x.pm.Addr(), Length: 100})
	before := bytes.Clone(x.dm.Bytes())
	for name, spoil := range map[string]func(*agent.Transfer){
		"local index out of range":  func(t *agent.Transfer) { t.LocalIdx[3] = 4 },
		"remote index out of range": func(t *agent.Transfer) { t.RemoteIdx[0] = 1<<32 - 1 },
		"counts differ":             func(t *agent.Transfer) { t.RemoteIdx = t.RemoteIdx[:3] },
		"no indices":                func(t *agent.Transfer) { t.LocalIdx, t.RemoteIdx = nil, nil },
		"lengths differ":            func(t *agent.Transfer) { t.Local, t.LocalIdx = odd, []uint32{0, 0, 0, 0} },
		"no local list":             func(t *agent.Transfer) { t.Local = 0 },
		"unknown remote list":       func(t *agent.Transfer) { t.Remote = 1 << 60 },
		"lists swapped":             func(t *agent.Transfer) { t.Local, t.Remote = t.Remote, t.Local },
		"local list as remote":      func(t *agent.Transfer) { t.Remote = t.Local },
		"no bound of silence":       func(t *agent.Transfer) { t.Silence = 0 },
		"negative silence":          func(t *agent.Transfer) { t.Silence = -time.Second },
		"empty notification":        func(t *agent.Transfer) { t.Notif = []byte{} },
		"unknown operation":         func(t *agent.Transfer) { t.Op = 7 },
	} {
		tr := x.transfer(agent.Write, g)
		spoil(&tr)
		var pe *agent.PostError
		if _, err := x.p.Post(tr); !errors.As(err, &pe) {
			s.Errorf("%s: %v", name, err)
		}
	}
	peer := x.p.peers[x.d].ID
	for name, l := range map[string]struct {
		owner agent.PeerID
		descs []kv.Descriptor
	}{
		"empty":               {agent.Local, nil},
		"unregistered":        {agent.Local, []kv.Descriptor{{Addr: 4096, Length: 1}}},
		"beyond its memory":   {agent.Local, []kv.Descriptor{{Addr: x.pm.Addr() + 3*4096, Length: 4097}}},
		"no length":           {agent.Local, []kv.Descriptor{{Addr: x.pm.Addr()}}},
		"wraps around":        {peer, []kv.Descriptor{{Addr: ^uint64(0) - 1, Length: 5}}},
		"no length, remote":   {peer, []kv.Descriptor{{Addr: 1}}},
		"peer's as ours":      {agent.Local, x.dDesc},
		"unknown generation":  {agent.PeerID{Name: peer.Name, Gen: peer.Gen + 99}, x.dDesc},
		"huge length, remote": {peer, []kv.Descriptor{{Addr: 1, Length: 1 << 62}}},
	} {
		if id, err := x.p.Prepare(l.owner, l.descs); err == nil && name != "peer's as ours" {
			s.Errorf("list %s: accepted as %d", name, id)
		}
	}
	// The caller's slices are read during the call only.
	tr := x.transfer(agent.Write, g)
	id := x.p.post(tr)
	clear(tr.LocalIdx)
	clear(tr.RemoteIdx)
	x.p.Release(x.remote)
	x.p.Release(x.remote)
	x.p.Release(0)
	x.p.expect(id, agent.OutcomeDone)
	if !bytes.Equal(x.pm.Bytes(), x.dm.Bytes()) || bytes.Equal(before, x.dm.Bytes()) {
		s.Error("the transfer did not move what was posted")
	}
}

// Everything kept is bounded, and what is beyond says so.
func limitsHold(s *suite) {
	p := s.addWith(agent.Limits{
		Lists: 3, ListDescs: 8, Grants: 2, GrantRanges: 8, Registrations: 2, Notification: 32, Peers: 1,
	}, true)
	d, e := s.add(), s.add()
	x := s.pairOf(p, d, 8, 4096)
	limited := func(what string, err error) {
		s.Helper()
		var le *agent.LimitError
		if !errors.As(err, &le) {
			s.Errorf("%s: %v is not a limit", what, err)
		}
	}
	peer := p.peers[d].ID
	_, err := p.Prepare(peer, append(x.dDesc[:8:8], x.dDesc[0]))
	limited("a long list", err)
	_, err = p.Prepare(peer, x.dDesc)
	s.must(err)
	_, err = p.Prepare(peer, x.dDesc)
	limited("a fourth list", err)
	_, err = p.Alloc(-1)
	limited("negative memory", err)
	_, err = p.Alloc(4096)
	s.must(err)
	_, err = p.Alloc(4096)
	limited("a third registration", err)
	for range 2 {
		p.grant(d, agent.AccessRead, x.pBlocks...)
	}
	_, err = p.Grant(agent.GrantSpec{Peer: d.Name(), Ranges: x.pBlocks})
	limited("a third grant", err)
	_, err = p.Grant(agent.GrantSpec{Peer: d.Name(), Ranges: append(x.pBlocks[:8:8], x.pBlocks[0])})
	limited("a grant of many ranges", err)
	limited("a long notification", p.Notify(peer, make([]byte, 33)))
	tr := x.transfer(agent.Write, agent.GrantID{})
	tr.Notif = make([]byte, 33)
	_, err = p.Post(tr)
	limited("a long attached notification", err)
	tr = x.transfer(agent.Write, agent.GrantID{})
	tr.LocalIdx, tr.RemoteIdx = make([]uint32, 9), make([]uint32, 9)
	_, err = p.Post(tr)
	limited("a transfer of many pairs", err)
	_, err = p.tryConnect(e)
	limited("a second peer", err)
	// The same peer again is no second one.
	_, err = p.tryConnect(d)
	s.must(err)
}

// Beyond the transfers in flight Post says busy, and after a Stopped has been read it goes on.
func busyThenFree(s *suite) {
	p := s.addWith(agent.Limits{Transfers: 4}, true)
	x := s.pairOf(p, s.add(), 16, 1<<20)
	g := x.d.grant(p, agent.AccessWrite, x.dDesc...)
	resume := s.net.Stall(s.T, x.d.Agent)
	var ids []agent.TransferID
	for range 4 {
		ids = append(ids, p.post(x.transfer(agent.Write, g)))
	}
	if _, err := p.Post(x.transfer(agent.Write, g)); !errors.Is(err, agent.ErrBusy) {
		s.Fatalf("a fifth transfer: %v", err)
	}
	resume()
	for i := range 20 {
		p.ended(ids[i])
		ids = append(ids, p.post(x.transfer(agent.Write, g)))
	}
	for _, id := range ids {
		p.expect(id, agent.OutcomeDone)
	}
}

// Close waits for no reader: one that calls Close itself finds everything owed in the channel.
func closeByTheReader(s *suite) {
	p := s.addWith(agent.Limits{Transfers: 8}, false)
	x := s.pairOf(p, s.add(), 16, 1<<20)
	g := x.d.grant(p, agent.AccessWrite, x.dDesc...)
	s.net.Stall(s.T, x.d.Agent)
	var ids []agent.TransferID
	for range 8 {
		ids = append(ids, p.post(x.transfer(agent.Write, g)))
	}
	p.close() // the reader begins only afterwards
	for _, id := range ids {
		p.expect(id, agent.OutcomeClosed)
	}
}

// A closed agent says so, has closed its channel, and its peers have noticed.
func closedAgent(s *suite) {
	x := s.pair(4, 4096)
	x.d.connect(x.p)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	peer := x.p.peers[x.d].ID
	m := x.pm
	tr := x.transfer(agent.Write, g)
	x.p.close()
	s.must(x.p.Close())
	if _, open := <-x.p.Events(); open {
		s.Error("the channel is open")
	}
	x.d.lost(x.p.Name(), true)
	x.d.lost(x.p.Name(), false)
	check := func(what string, err error) {
		s.Helper()
		if !errors.Is(err, agent.ErrClosed) {
			s.Errorf("%s of a closed agent: %v", what, err)
		}
	}
	_, err := x.p.Alloc(4096)
	check("Alloc", err)
	_, err = x.p.Register(1<<40, 4096, agent.DRAM, "x")
	check("Register", err)
	_, err = x.p.tryConnect(x.d)
	check("AddPeer", err)
	_, err = x.p.Prepare(peer, x.dDesc)
	check("Prepare", err)
	_, err = x.p.Post(tr)
	check("Post", err)
	check("Notify", x.p.Notify(peer, []byte("m")))
	_, err = x.p.Grant(agent.GrantSpec{Peer: "x", Ranges: x.pBlocks})
	check("Grant", err)
	x.p.RemovePeer(peer)
	x.p.Cancel(1)
	x.p.Release(1)
	x.p.Revoke(agent.GrantID{})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := m.Free(ctx); err != nil {
		s.Errorf("Free after Close: %v", err)
	}
}
