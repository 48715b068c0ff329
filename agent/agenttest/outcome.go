package agenttest

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/agent"
)

func outcomeDone(s *suite) {
	x := s.pair(4, 4096)
	r := x.p.expect(x.p.post(x.transfer(agent.Write, x.d.grant(x.p, agent.AccessWrite, x.dDesc...))), agent.OutcomeDone)
	if r.Took < 0 || r.Post < 0 || r.Post > r.Took {
		s.Errorf("times: posted after %v, took %v", r.Post, r.Took)
	}
	if r.Bytes != 4*4096 || r.Descs != 4 {
		s.Errorf("%d bytes in %d pairs", r.Bytes, r.Descs)
	}
}

// A refused transfer fails with a cause that names the peer, and without its notification.
func outcomeFailed(s *suite) {
	x := s.pair(4, 4096)
	for _, op := range []agent.Op{agent.Write, agent.Read} {
		tr := x.transfer(op, agent.GrantID{1})
		tr.Notif = []byte("must not come")
		r := x.p.expect(x.p.post(tr), agent.OutcomeFailed)
		var pe *agent.PeerError
		if !errors.As(r.Err, &pe) || pe.Peer != x.d.Name() {
			s.Errorf("op %d: cause %v does not name the peer", op, r.Err)
		}
		if r.Bytes != 0 {
			s.Errorf("op %d: a failed transfer says that it moved %d bytes", op, r.Bytes)
		}
	}
	// What comes later is not disturbed.
	s.must(x.p.Notify(x.p.peers[x.d].ID, []byte("after")))
	x.d.notified("after")
	if x.d.wasNotified("must not come") {
		s.Error("the notification of a failed transfer came")
	}
}

// With a mute peer a transfer ends at its bound of silence, and its local memory comes back.
func outcomeDeadline(s *suite) {
	x := s.pair(16, 1<<20)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	rg := x.d.grant(x.p, agent.AccessRead, x.dDesc...)
	resume := s.net.Stall(s.T, x.d.Agent)
	w, r := x.transfer(agent.Write, g), x.transfer(agent.Read, rg)
	w.Silence, r.Silence = silence, silence
	w.Notif, r.Notif = []byte("late write"), []byte("late read")
	for _, id := range []agent.TransferID{x.p.post(w), x.p.post(r)} {
		res := x.p.result(id)
		if res.Outcome != agent.OutcomeDeadline && res.Outcome != agent.OutcomePeerLost {
			s.Errorf("ended as %v (%v)", res.Outcome, res.Err)
		}
		if res.Took < silence {
			s.Errorf("ended after %v of silence, before its bound", res.Took)
		}
		x.p.ended(id)
	}
	s.mustFree(x.p, x.pm)
	resume()
	if x.d.wasNotified("late write") || x.d.wasNotified("late read") {
		s.Error("notified of a transfer that did not end well")
	}
}

func outcomeCancelled(s *suite) {
	x := s.pair(16, 1<<20)
	resume := s.net.Stall(s.T, x.d.Agent)
	w := x.p.post(x.transfer(agent.Write, x.d.grant(x.p, agent.AccessWrite, x.dDesc...)))
	r := x.p.post(x.transfer(agent.Read, x.d.grant(x.p, agent.AccessRead, x.dDesc...)))
	x.p.Cancel(w)
	x.p.Cancel(r)
	for _, id := range []agent.TransferID{w, r} {
		if res := x.p.result(id); res.Outcome != agent.OutcomeCancelled || res.Err == nil {
			s.Errorf("cancelled transfer ended as %v (%v)", res.Outcome, res.Err)
		}
	}
	resume()
	x.p.ended(w)
	x.p.ended(r)
	// Nothing of it comes any more.
	before := bytes.Clone(x.dm.Bytes())
	fill(x.pm.Bytes(), 99)
	settle()
	if !bytes.Equal(before, x.dm.Bytes()) {
		s.Error("bytes arrived after Stopped")
	}
	for _, id := range []agent.TransferID{w, r, 1 << 40, 0} {
		x.p.Cancel(id)
	}
	settle()
}

func outcomePeerLost(s *suite) {
	x := s.pair(16, 1<<20)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	s.net.Stall(s.T, x.d.Agent)
	id := x.p.post(x.transfer(agent.Write, g))
	s.net.Kill(s.T, x.d.Agent)
	x.p.RemovePeer(x.p.peers[x.d].ID)
	x.p.expect(id, agent.OutcomePeerLost)
}

func outcomeClosed(s *suite) {
	x := s.pair(16, 1<<20)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	s.net.Stall(s.T, x.d.Agent)
	ids := []agent.TransferID{x.p.post(x.transfer(agent.Write, g)), x.p.post(x.transfer(agent.Write, g))}
	x.p.close()
	for _, id := range ids {
		x.p.expect(id, agent.OutcomeClosed)
	}
}

// What was queued before Close arrives, and then the loss of the peer.
func lastWords(s *suite) {
	x := s.pair(4, 4096)
	g := x.d.grant(x.p, agent.AccessRead, x.dDesc...)
	read := x.transfer(agent.Read, g)
	read.Notif = []byte("read")
	x.p.expect(x.p.post(read), agent.OutcomeDone)
	const n = 200
	for i := range n {
		s.must(x.p.Notify(x.p.peers[x.d].ID, fmt.Appendf(nil, "word %d", i)))
	}
	x.p.close()
	x.d.notified("read")
	for i := range n {
		x.d.notified(fmt.Sprintf("word %d", i))
	}
	x.d.lost(x.p.Name(), true)
}

// settle gives what must not happen time to happen. A test that passes only says less if it is too
// short.
func settle() { time.Sleep(20 * time.Millisecond) }
