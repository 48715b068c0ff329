package agenttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// Removing a peer ends what runs with it, and tells the peer, not the remover.
func removePeer(s *suite) {
	x := s.pair(16, 1<<20)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	id := x.p.peers[x.d].ID
	resume := s.net.Stall(s.T, x.d.Agent)
	tr := x.p.post(x.transfer(agent.Write, g))
	x.p.RemovePeer(id)
	x.p.RemovePeer(id)
	x.p.RemovePeer(agent.PeerID{Name: "nobody", Gen: 1})
	x.p.expect(tr, agent.OutcomePeerLost)
	if _, err := x.p.Post(x.transfer(agent.Write, g)); err == nil {
		s.Error("a transfer to a removed peer was accepted")
	}
	var pe *agent.PeerError
	if err := x.p.Notify(id, []byte("m")); !errors.As(err, &pe) {
		s.Errorf("notify to a removed peer: %v", err)
	}
	if _, err := x.p.Prepare(id, x.dDesc); err == nil {
		s.Error("a list of a removed peer was accepted")
	}
	resume()
	x.d.lost(x.p.Name(), true)
	for _, ev := range x.p.all() {
		if l, ok := ev.(agent.PeerLost); ok {
			s.Errorf("the remover is told: %+v", l)
		}
	}
}

// A peer that is added again is another generation: the old one's lists and ids are dead, its
// transfers have ended, and the new one works.
func generations(s *suite) {
	x := s.pair(4, 4096)
	old, oldList := x.p.peers[x.d].ID, x.remote
	x.admit()
	now := x.p.peers[x.d].ID
	if now.Name != old.Name || now.Gen == old.Gen {
		s.Fatalf("added again: %v, then %v", old, now)
	}
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	stale := x.transfer(agent.Write, g)
	stale.Remote = oldList
	if _, err := x.p.Post(stale); err == nil {
		s.Error("a list of an old generation was accepted")
	}
	if err := x.p.Notify(old, []byte("m")); err == nil {
		s.Error("an old generation was notified")
	}
	x.p.RemovePeer(old)
	x.p.expect(x.p.post(x.transfer(agent.Write, g)), agent.OutcomeDone)

	// Removed and added again.
	x.p.RemovePeer(now)
	x.admit()
	if again := x.p.peers[x.d].ID; again.Gen == old.Gen || again.Gen == now.Gen {
		s.Errorf("generation %d is used twice", again.Gen)
	}
	x.p.expect(x.p.post(x.transfer(agent.Write, g)), agent.OutcomeDone)

	// Both ways at once: what d adds is not what p added.
	back := x.d.connect(x.p)
	s.must(x.d.Notify(back.ID, []byte("hello")))
	if from := x.p.notified("hello").From; from.Name != x.d.Name() || from == x.p.peers[x.d].ID {
		s.Errorf("notification from %v", from)
	}
}

// A peer that reached us can be shown the door by the id that its notifications carry.
func removeInboundPeer(s *suite) {
	x := s.pair(4, 4096)
	s.must(x.p.Notify(x.p.peers[x.d].ID, []byte("hello")))
	x.d.RemovePeer(x.d.notified("hello").From)
	x.p.lost(x.d.Name(), false)
}

// The death of a process is told to both sides of its connections, and ends what runs with it.
func peerDies(s *suite) {
	x := s.pair(16, 1<<20)
	g := x.d.grant(x.p, agent.AccessWrite, x.dDesc...)
	back := x.d.connect(x.p)
	s.must(x.p.Notify(x.p.peers[x.d].ID, []byte("hello")))
	s.must(x.d.Notify(back.ID, []byte("hello")))
	x.d.notified("hello")
	x.p.notified("hello")
	var ids []agent.TransferID
	for range 4 {
		ids = append(ids, x.p.post(x.transfer(agent.Write, g)))
	}
	s.net.Kill(s.T, x.d.Agent)
	x.p.lost(x.d.Name(), false)
	x.p.lost(x.d.Name(), true)
	for _, id := range ids {
		if r := x.p.ended(id); r.Outcome != agent.OutcomePeerLost && r.Outcome != agent.OutcomeDone {
			s.Errorf("ended as %v (%v)", r.Outcome, r.Err)
		}
	}
	if _, err := x.p.Post(x.transfer(agent.Write, g)); err == nil {
		s.Error("a transfer to a lost peer was accepted")
	}
	if err := x.p.Notify(x.p.peers[x.d].ID, []byte("m")); err == nil {
		s.Error("a lost peer was notified")
	}
}

// Who would be added is known without adding anybody.
func namesBeforeAdmission(s *suite) {
	p, d := s.add(), s.add()
	n, ok := p.Agent.(agent.Namer)
	if !ok {
		s.Fatalf("%T does not name peers", p.Agent)
	}
	for name, info := range map[string]agent.PeerInfo{
		"no offers":    {},
		"garbage blob": {Offers: []agent.Offer{{Transport: "carrier pigeon", Blob: bytes.Repeat([]byte{0xff}, 300)}}},
	} {
		if got := n.PeerNames(info); len(got) > 0 {
			s.Errorf("%s: named %q", name, got)
		}
	}
	names := n.PeerNames(agent.PeerInfo{Offers: d.Offers()})
	if got := p.connect(d).ID.Name; !slices.Contains(names, got) {
		s.Errorf("named %q, added %s", names, got)
	}
}

// An admission that fails says why and leaves nothing behind.
func failedAdmission(s *suite) {
	p, d := s.add(), s.add()
	var pe *agent.PeerError
	for name, info := range map[string]agent.PeerInfo{
		"no offers":         {},
		"foreign transport": {Offers: []agent.Offer{{Transport: "carrier pigeon", Blob: []byte("coo")}}},
		"empty blob":        {Offers: []agent.Offer{{Transport: p.Offers()[0].Transport}}},
		"garbage blob":      {Offers: []agent.Offer{{Transport: p.Offers()[0].Transport, Blob: bytes.Repeat([]byte{0xff}, 300)}}},
		"itself":            {Offers: p.Offers()},
	} {
		if _, err := p.AddPeer(context.Background(), info); !errors.As(err, &pe) {
			s.Errorf("%s: %v", name, err)
		}
	}
	offers := d.Offers()
	d.close()
	if _, err := p.AddPeer(context.Background(), agent.PeerInfo{Offers: offers}); !errors.As(err, &pe) {
		s.Errorf("a closed peer: %v", err)
	}
	if _, err := p.Prepare(agent.PeerID{Name: d.Name(), Gen: 1}, []kv.Descriptor{{Addr: 1, Length: 1}}); err == nil {
		s.Error("a list of a peer that was never added was accepted")
	}
	settle()
	if evs := p.all(); len(evs) != 0 {
		s.Errorf("events of failed admissions: %v", evs)
	}
}

// A peer whose notifications nobody reads is lost at its bound; the others' come all the same.
func notificationOverflow(s *suite) {
	const share = 16
	d := s.addWith(agent.Limits{PeerNotifications: share, Transfers: 4}, false)
	flooder, honest := s.add(), s.add()
	fp, hp := flooder.connect(d), honest.connect(d)
	s.must(honest.Notify(hp.ID, []byte("before")))
	stop := time.After(patience)
flood:
	for i := 0; ; i++ {
		if err := flooder.Notify(fp.ID, fmt.Appendf(nil, "flood %d", i)); err != nil {
			break // the loss has been noticed
		}
		select {
		case <-stop:
			s.Fatal("a peer that floods is never lost")
		default:
		}
		if i%share == 0 {
			time.Sleep(time.Millisecond)
		}
		for _, ev := range flooder.all() {
			if _, lost := ev.(agent.PeerLost); lost {
				break flood
			}
		}
	}
	flooder.lost(d.Name(), false)
	s.must(honest.Notify(hp.ID, []byte("after")))
	d.start()
	d.notified("before")
	d.notified("after")
	d.lost(flooder.Name(), true)
	floods := 0
	for _, ev := range d.all() {
		if m, ok := ev.(agent.Notification); ok && m.From.Name == flooder.Name() {
			floods++
		}
	}
	if floods > share+1 { // one may be on its way to the reader
		s.Errorf("%d notifications of the flooder were kept, its share is %d", floods, share)
	}
}

// A reader that sleeps delays nothing but what it would read.
func slowReader(s *suite) {
	p, d := s.addWith(agent.Limits{}, false), s.addWith(agent.Limits{}, false)
	x := s.pairOf(p, d, 16, 16<<10)
	g := d.grant(p, agent.AccessWrite, x.dDesc...)
	var ids []agent.TransferID
	for i := range 40 {
		tr := x.transfer(agent.Write, g)
		tr.Notif = fmt.Appendf(nil, "n%d", i)
		ids = append(ids, p.post(tr))
	}
	deadline := time.Now().Add(patience)
	for !bytes.Equal(x.pm.Bytes(), x.dm.Bytes()) {
		if time.Now().After(deadline) {
			s.Fatal("bytes wait for the reader of events")
		}
		time.Sleep(time.Millisecond)
	}
	p.start()
	d.start()
	for i, id := range ids {
		p.expect(id, agent.OutcomeDone)
		d.notified(fmt.Sprintf("n%d", i))
	}
}

// A peer that neither reads nor writes costs the others nothing.
func mutePeerDelaysNobody(s *suite) {
	p := s.add()
	mute, good := s.pairOf(p, s.add(), 16, 1<<20), s.pairOf(p, s.add(), 16, 64<<10)
	mg := mute.d.grant(p, agent.AccessWrite, mute.dDesc...)
	mr := mute.d.grant(p, agent.AccessRead, mute.dDesc...)
	g := good.d.grant(p, agent.AccessWrite, good.dDesc...)
	back := good.d.connect(p)
	resume := s.net.Stall(s.T, mute.d.Agent)
	var stuck []agent.TransferID
	for range 8 {
		stuck = append(stuck, p.post(mute.transfer(agent.Write, mg)), p.post(mute.transfer(agent.Read, mr)))
		s.must(p.Notify(p.peers[mute.d].ID, []byte("to the mute")))
	}
	for i := range 5 {
		tr := good.transfer(agent.Write, g)
		tr.Notif = fmt.Appendf(nil, "n%d", i)
		p.expect(p.post(tr), agent.OutcomeDone)
		good.d.notified(string(tr.Notif))
		s.must(p.Notify(p.peers[good.d].ID, fmt.Appendf(nil, "m%d", i)))
		good.d.notified(fmt.Sprintf("m%d", i))
		s.must(good.d.Notify(back.ID, fmt.Appendf(nil, "b%d", i)))
		p.notified(fmt.Sprintf("b%d", i))
	}
	for _, id := range stuck {
		p.Cancel(id)
	}
	p.RemovePeer(p.peers[mute.d].ID)
	for _, id := range stuck {
		p.ended(id)
	}
	resume()
}

// Notifications to a mute peer are bounded: it is lost, not the memory of this process.
func notifyToMutePeerIsBounded(s *suite) {
	p := s.addWith(agent.Limits{PeerNotifications: 64, Notification: 64 << 10, PeerNotificationBytes: 1 << 20}, true)
	d := s.add()
	peer := p.connect(d)
	resume := s.net.Stall(s.T, d.Agent)
	defer resume()
	msg := make([]byte, 64<<10)
	for i := 0; ; i++ {
		if err := p.Notify(peer.ID, msg); err != nil {
			break
		}
		if i > 1000 {
			s.Fatal("64 MB of notifications are queued for a mute peer")
		}
	}
	p.lost(d.Name(), false)
}
