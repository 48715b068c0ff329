package agenttest

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// A writer and a reader that never stop lose their grants again and again; from the moment Revoke
// returns, memory stands still.
func revokeIsExact(s *suite) {
	x := s.pair(32, 32<<10)
	for round := range 15 {
		for _, op := range []agent.Op{agent.Write, agent.Read} {
			g := x.d.grant(x.p, agent.Access(op), x.dDesc...)
			var ids []agent.TransferID
			for range 6 {
				ids = append(ids, x.p.post(x.transfer(op, g)))
			}
			if round%3 != 0 {
				x.p.result(ids[round%len(ids)])
			}
			x.d.Revoke(g)
			x.d.Revoke(g)
			before := bytes.Clone(x.dm.Bytes())
			fill(x.pm.Bytes(), uint64(round)+500)
			last := x.p.post(x.transfer(op, g))
			for _, id := range append(ids, last) {
				if r := x.p.ended(id); r.Outcome != agent.OutcomeDone && r.Outcome != agent.OutcomeFailed {
					s.Fatalf("ended as %v (%v)", r.Outcome, r.Err)
				}
			}
			if x.p.result(last).Outcome != agent.OutcomeFailed {
				s.Fatal("a transfer after Revoke was not refused")
			}
			if !bytes.Equal(before, x.dm.Bytes()) {
				s.Fatalf("round %d: memory changed after Revoke", round)
			}
		}
	}
}

// One large transfer is cut short by Revoke in its middle: it fails, nothing moves afterwards, and
// the notification does not come.
func revokeDuringTransfer(s *suite) {
	x := s.pair(16, 1<<20)
	for round := range 5 {
		g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
		clear(x.dm.Bytes())
		tr := x.transfer(agent.Write, g)
		tr.Notif = []byte{byte('a' + round)}
		id := x.p.post(tr)
		last := x.dm.Bytes()[len(x.dm.Bytes())-1<<20:]
		settle() // on some rounds and machines it is done by then; never wrong
		x.d.Revoke(g)
		before := bytes.Clone(x.dm.Bytes())
		r := x.p.ended(id)
		if !bytes.Equal(before, x.dm.Bytes()) {
			s.Fatal("memory changed after Revoke")
		}
		// The reverse may be: all bytes are there when the grant ends, and nobody has said so yet.
		if r.Outcome == agent.OutcomeDone && !bytes.Equal(x.dm.Bytes(), x.pm.Bytes()) {
			s.Fatalf("ended as done (%v) with memory that is not whole (last block begins with %d)", r.Err, last[0])
		}
		if r.Outcome != agent.OutcomeDone && x.d.wasNotified(string(tr.Notif)) {
			s.Fatal("notified of a transfer that was cut short")
		}
	}
}

// A writer that stops in the middle does not hold up Revoke, and its late bytes go nowhere.
func revokeDoesNotWaitForPeer(s *suite) {
	x := s.pair(16, 1<<20)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	tr := x.transfer(agent.Write, g)
	tr.Silence = patience
	id := x.p.post(tr)
	resume := s.net.Stall(s.T, x.p.Agent)
	done := make(chan struct{})
	go func() { x.d.Revoke(g); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		s.Fatal("Revoke waits for a stalled writer")
	}
	before := bytes.Clone(x.dm.Bytes())
	resume()
	x.p.ended(id)
	if !bytes.Equal(before, x.dm.Bytes()) {
		s.Error("memory changed after Revoke")
	}
}

// Whatever is not exactly granted is refused, and no byte moves.
func grantsAreObeyed(s *suite) {
	x := s.pair(8, 4096)
	stranger := s.add()
	middle := x.dDesc[2:6]
	ok := x.d.grant(x.p, agent.AccessWrite, middle...)
	okRead := x.d.grant(x.p, agent.AccessRead, middle...)
	revoked := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	x.d.Revoke(revoked)
	guess := ok
	guess[15]++
	base := x.dm.Addr()
	at := func(off, n int) kv.Descriptor {
		return kv.Descriptor{Addr: base + uint64(off), Length: uint64(n)}
	}
	gap := x.d.grant(x.p, agent.AccessWrite, at(0, 4096), at(8192, 4096))
	for _, c := range []struct {
		name  string
		op    agent.Op
		grant agent.GrantID
		to    kv.Descriptor
	}{
		{"none", agent.Write, agent.GrantID{}, middle[0]},
		{"guessed", agent.Write, guess, middle[0]},
		{"revoked", agent.Write, revoked, middle[0]},
		{"another peer's", agent.Write, x.d.grant(stranger, agent.AccessWrite, x.dDesc...), middle[0]},
		{"read, used to write", agent.Write, okRead, middle[0]},
		{"write, used to read", agent.Read, ok, middle[0]},
		{"one byte before", agent.Write, ok, at(2*4096-1, 4096)},
		{"one byte beyond", agent.Write, ok, at(5*4096+1, 4096)},
		{"one byte beyond, read", agent.Read, okRead, at(5*4096+1, 4096)},
		{"beside it", agent.Write, ok, x.dDesc[0]},
		{"over a gap", agent.Write, gap, at(2048, 8192)},
		{"another process's address", agent.Write, ok, kv.Descriptor{Addr: 4096, Length: 4096}},
		{"the end of the address space", agent.Write, ok, kv.Descriptor{Addr: ^uint64(0) - 4096, Length: 4096}},
	} {
		before, mine := bytes.Clone(x.dm.Bytes()), bytes.Clone(x.pm.Bytes())
		// The good range goes first: the bad one must be found before any byte of it moves.
		list := x.p.list(x.p.peers[x.d].ID, kv.Descriptor{Addr: middle[3].Addr, Length: c.to.Length}, c.to)
		if c.name == "over a gap" || c.to.Length != 4096 {
			list = x.p.list(x.p.peers[x.d].ID, at(0, int(c.to.Length)), c.to)
		}
		local := x.p.list(agent.Local, kv.Descriptor{Addr: x.pm.Addr(), Length: c.to.Length})
		id := x.p.post(agent.Transfer{
			Op: c.op, Local: local, LocalIdx: []uint32{0, 0}, Remote: list, RemoteIdx: []uint32{0, 1},
			Grant: c.grant, Notif: []byte("refused"), Silence: long,
		})
		x.p.expect(id, agent.OutcomeFailed)
		if !bytes.Equal(before, x.dm.Bytes()) || !bytes.Equal(mine, x.pm.Bytes()) {
			s.Errorf("%s: bytes moved", c.name)
		}
	}
	if x.d.wasNotified("refused") {
		s.Error("notified of a refused transfer")
	}
	// A grant made for a peer that is not there yet serves it once it comes, and neighbours in
	// one grant are one range.
	late := x.d.grant(stranger, agent.AccessWrite, at(0, 100), at(100, 100))
	peer := stranger.connect(x.d)
	sm := stranger.alloc(200)
	stranger.expect(stranger.post(agent.Transfer{
		Local:  stranger.list(agent.Local, kv.Descriptor{Addr: sm.Addr(), Length: 200}),
		Remote: stranger.list(peer.ID, at(0, 200)), LocalIdx: []uint32{0}, RemoteIdx: []uint32{0},
		Grant: late, Silence: long,
	}), agent.OutcomeDone)

	for name, spec := range map[string]agent.GrantSpec{
		"no peer":              {Ranges: middle},
		"no ranges":            {Peer: "x"},
		"beyond the memory":    {Peer: "x", Ranges: []kv.Descriptor{at(7*4096+1, 4096)}},
		"unregistered":         {Peer: "x", Ranges: []kv.Descriptor{{Addr: 4096, Length: 1}}},
		"over the address end": {Peer: "x", Ranges: []kv.Descriptor{{Addr: ^uint64(0), Length: 2}}},
	} {
		if _, err := x.d.Grant(spec); err == nil {
			s.Errorf("grant with %s was given", name)
		}
	}
	x.d.Revoke(agent.GrantID{})
}

// Freed memory takes its grants with it.
func freedMemoryIsNotReached(s *suite) {
	x := s.pair(4, 4096)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	x.p.expect(x.p.post(x.transfer(agent.Write, g)), agent.OutcomeDone)
	s.mustFree(x.d, x.dm)
	x.p.expect(x.p.post(x.transfer(agent.Write, g)), agent.OutcomeFailed)
	if _, err := x.d.Grant(agent.GrantSpec{Peer: "x", Ranges: x.dDesc}); err == nil {
		s.Error("a grant on freed memory was given")
	}
}

// Local memory is not given back while a transfer uses it.
func deregisterWaitsForStopped(s *suite) {
	x := s.pair(16, 1<<20)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	resume := s.net.Stall(s.T, x.d.Agent)
	id := x.p.post(x.transfer(agent.Write, g))
	ctx, cancel := context.WithTimeout(context.Background(), silence)
	defer cancel()
	if err := x.pm.Free(ctx); !errors.Is(err, context.DeadlineExceeded) {
		s.Fatalf("memory in use was freed: %v", err)
	}
	if _, err := x.p.Post(x.transfer(agent.Write, g)); err == nil {
		s.Error("a transfer on memory that is being freed was accepted")
	}
	if _, err := x.p.Prepare(agent.Local, x.pBlocks); err == nil {
		s.Error("a list on memory that is being freed was accepted")
	}
	freed := make(chan error, 1)
	go func() { freed <- x.pm.Free(context.Background()) }()
	select {
	case err := <-freed:
		s.Fatalf("freed before Stopped: %v", err)
	case <-time.After(silence):
	}
	x.p.Cancel(id)
	resume()
	select {
	case err := <-freed:
		s.must(err)
	case <-time.After(patience):
		s.Fatal("memory is not freed after the transfer ended")
	}
	x.p.ended(id)
}

// mustFree frees memory that nothing uses.
func (s *suite) mustFree(n *node, m agent.Memory) {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := m.Free(ctx); err != nil {
		s.Fatalf("%s: free: %v", n.Name(), err)
	}
}
