package mux

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/kv"
)

// Over the two transports of the product: one memory and one grant, by shared memory, then by TCP.
func TestSharedMemoryAndTCP(t *testing.T) {
	build := func(setting string) *Mux {
		var b [16]byte
		_, _ = rand.Read(b[:])
		name := agent.Name(hex.EncodeToString(b[:]))
		s, err := shm.New(shm.Config{Name: name})
		must(t, err)
		n, err := tcp.New(tcp.Config{Name: name})
		must(t, err)
		m, err := New(Config{Transport: setting, Backends: []Backend{{Agent: s, SameHost: shm.SameHost}, {Agent: n}}})
		must(t, err)
		return m
	}
	d := build(Auto)
	defer d.Close()
	dm, err := d.Alloc(1 << 20)
	must(t, err)
	whole := []kv.Descriptor{{Addr: dm.Addr(), Length: 1 << 20}}
	for i, c := range []struct{ setting, transport, why string }{
		{Auto, "shm", "same host"}, {"tcp", "tcp", "chosen by setting"}, {"shm", "shm", "chosen by setting"},
	} {
		p := build(c.setting)
		defer p.Close()
		pm, err := p.Alloc(1 << 20)
		must(t, err)
		for k := range pm.Bytes() {
			pm.Bytes()[k] = byte(k*7 + i)
		}
		peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()})
		must(t, err)
		if peer.Transport != c.transport || peer.Why != c.why {
			t.Fatalf("%s: chosen %+v", c.setting, peer)
		}
		tr := agent.Transfer{LocalIdx: []uint32{0}, RemoteIdx: []uint32{0}, Silence: time.Minute, Notif: []byte("n")}
		tr.Grant, err = d.Grant(agent.GrantSpec{Peer: p.Name(), Ranges: whole})
		must(t, err)
		tr.Local, err = p.Prepare(agent.Local, []kv.Descriptor{{Addr: pm.Addr(), Length: 1 << 20}})
		must(t, err)
		tr.Remote, err = p.Prepare(peer.ID, whole)
		must(t, err)
		_, err = p.Post(tr)
		must(t, err)
		if r := (<-p.Events()).(agent.Result); r.Outcome != agent.OutcomeDone {
			t.Fatalf("%s: %+v", c.setting, r)
		}
		<-p.Events()
		for {
			if n, ok := (<-d.Events()).(agent.Notification); ok {
				if n.From.Name != p.Name() || !bytes.Equal(pm.Bytes(), dm.Bytes()) {
					t.Errorf("%s: from %v; bytes equal: %v", c.setting, n.From, bytes.Equal(pm.Bytes(), dm.Bytes()))
				}
				break
			}
		}
		d.Revoke(tr.Grant)
		_, err = p.Post(tr)
		must(t, err)
		if r := (<-p.Events()).(agent.Result); r.Outcome != agent.OutcomeFailed {
			t.Errorf("%s: after Revoke: %+v", c.setting, r)
		}
		<-p.Events()
	}
}
