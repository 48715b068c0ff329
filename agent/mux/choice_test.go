package mux

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/kv"
)

func must(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// Which transport serves a peer, and why, for all that both sides may be.
func TestChoice(t *testing.T) {
	here := func(agent.Offer) bool { return true }
	away := func(agent.Offer) bool { return false }
	for name, c := range map[string]struct {
		setting   string
		sameHost  func(agent.Offer) bool
		hosts     [2]string // ours and theirs
		withhold  string    // a transport that the peer does not offer
		kill      string    // a transport on which the peer cannot be reached
		transport string
		why       string // or of the error
	}{
		"same host":             {Auto, here, [2]string{}, "", "", "red", "same host"},
		"same host, told":       {Auto, here, [2]string{"h", "h"}, "", "", "red", "same host"},
		"other host":            {Auto, away, [2]string{}, "", "", "blue", "the peer is on another host"},
		"other host, told":      {Auto, here, [2]string{"h", "i"}, "", "", "blue", "the peer is on another host"},
		"only blue":             {Auto, here, [2]string{}, "red", "", "blue", "the only transport both sides offer"},
		"only red":              {Auto, here, [2]string{}, "blue", "", "red", "the only transport both sides offer"},
		"only red, other host":  {Auto, away, [2]string{}, "blue", "", "", "red is all that both sides may use, and the peer is on another host"},
		"no host tied":          {Auto, nil, [2]string{}, "", "", "red", "first in the order of preference"},
		"set to red":            {"red", here, [2]string{}, "", "", "red", "chosen by setting"},
		"set to blue":           {"blue", here, [2]string{}, "", "", "blue", "chosen by setting"},
		"set to what is not":    {"blue", here, [2]string{}, "blue", "", "", "the peer does not offer blue, which is the setting here"},
		"set to red, elsewhere": {"red", away, [2]string{}, "", "", "", "red is all that both sides may use"},
		"red is broken":         {Auto, here, [2]string{}, "", "red", "blue", "fallback, because red failed: peer agent agent-2: dial: connection refused"},
		"set to red, broken":    {"red", here, [2]string{}, "", "red", "", "red failed"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newNet("red", "blue")
			cfg := w.config(t, agent.Limits{})
			cfg.Transport, cfg.HostID = c.setting, c.hosts[0]
			cfg.Backends[0].SameHost = c.sameHost
			p, d := w.mux(t, cfg), w.mux(t, w.config(t, agent.Limits{}))
			defer p.Close()
			defer d.Close()
			for _, cable := range w.cables {
				if cable.transport == c.kill {
					cable.fabric.Kill(d.Name())
				}
			}
			info := agent.PeerInfo{HostID: c.hosts[1], Offers: slices.DeleteFunc(slices.Clone(d.Offers()), func(o agent.Offer) bool {
				return o.Transport == c.withhold
			})}
			peer, err := p.AddPeer(t.Context(), info)
			if c.transport == "" {
				var pe *agent.PeerError
				if !errors.As(err, &pe) || !strings.Contains(err.Error(), c.why) {
					t.Fatalf("added as %+v, %v", peer, err)
				}
				return
			}
			must(t, err)
			if peer.Transport != c.transport || peer.Why != c.why {
				t.Errorf("chosen: %s, %q", peer.Transport, peer.Why)
			}
		})
	}
}

func TestOffersFollowTheSetting(t *testing.T) {
	w := newNet("red", "blue")
	for setting, want := range map[string]int{"": 2, Auto: 2, "red": 1, "blue": 1} {
		cfg := w.config(t, agent.Limits{})
		cfg.Transport = setting
		m := w.mux(t, cfg)
		if n := len(m.Offers()); n != want || want == 1 && m.Offers()[0].Transport != setting {
			t.Errorf("%q: offers %v", setting, m.Offers())
		}
		must(t, m.Close())
	}
	for name, spoil := range map[string]func(*Config){
		"no backends":       func(c *Config) { c.Backends = nil },
		"unknown transport": func(c *Config) { c.Transport = "green" },
		"one transport twice": func(c *Config) {
			c.Backends[1] = Backend{Agent: newCable("red").end(t, c.Backends[0].Agent.Name(), agent.Limits{})}
		},
		"two names": func(c *Config) {
			c.Backends[1] = Backend{Agent: newCable("green").end(t, "another", agent.Limits{})}
		},
		"no shared grants": func(c *Config) {
			c.Backends[1] = Backend{Agent: struct{ agent.Agent }{c.Backends[1].Agent}}
		},
	} {
		cfg := w.config(t, agent.Limits{})
		spoil(&cfg)
		if m, err := New(cfg); err == nil {
			t.Errorf("%s: accepted", name)
			m.Close()
		}
	}
}

// One memory, one grant id, two peers by different transports at once.
func TestTwoTransportsAtOnce(t *testing.T) {
	w := newNet("red", "blue")
	d := w.mux(t, w.config(t, agent.Limits{}))
	defer d.Close()
	dm, err := d.Alloc(8192)
	must(t, err)
	whole := []kv.Descriptor{{Addr: dm.Addr(), Length: 8192}}
	for i, setting := range []string{"red", "blue", Auto} {
		cfg := w.config(t, agent.Limits{})
		cfg.Transport = setting
		p := w.mux(t, cfg)
		defer p.Close()
		pm, err := p.Alloc(8192)
		must(t, err)
		for k := range pm.Bytes() {
			pm.Bytes()[k] = byte(k + i*7)
		}
		peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()})
		must(t, err)
		g, err := d.Grant(agent.GrantSpec{Peer: p.Name(), Ranges: whole})
		must(t, err)
		tr := agent.Transfer{LocalIdx: []uint32{0}, RemoteIdx: []uint32{0}, Grant: g, Silence: time.Minute, Notif: []byte(setting)}
		tr.Local, err = p.Prepare(agent.Local, []kv.Descriptor{{Addr: pm.Addr(), Length: 8192}})
		must(t, err)
		tr.Remote, err = p.Prepare(peer.ID, whole)
		must(t, err)
		id, err := p.Post(tr)
		must(t, err)
		r := (<-p.Events()).(agent.Result)
		if r.Outcome != agent.OutcomeDone || r.Transfer != id || r.Peer != peer.ID {
			t.Fatalf("%s: %+v", setting, r)
		}
		<-p.Events()
		if n := (<-d.Events()).(agent.Notification); string(n.Msg) != setting || n.From.Name != p.Name() {
			t.Errorf("%s: notified of %q by %v", setting, n.Msg, n.From)
		}
		if !bytes.Equal(pm.Bytes(), dm.Bytes()) {
			t.Errorf("%s: the bytes did not arrive", setting)
		}
		d.Revoke(g)
		_, err = p.Post(tr)
		must(t, err)
		if r := (<-p.Events()).(agent.Result); r.Outcome != agent.OutcomeFailed {
			t.Errorf("%s: after Revoke: %+v", setting, r)
		}
		<-p.Events()
	}
}

// A peer that is added again by another transport has one id at a time.
func TestChangeOfTransport(t *testing.T) {
	w := newNet("red", "blue")
	p, d := w.mux(t, w.config(t, agent.Limits{})), w.mux(t, w.config(t, agent.Limits{}))
	defer p.Close()
	defer d.Close()
	red, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()})
	must(t, err)
	blue, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()[1:]})
	must(t, err)
	if red.Transport != "red" || blue.Transport != "blue" || red.ID == blue.ID {
		t.Fatalf("%+v, %+v", red, blue)
	}
	if p.Notify(red.ID, []byte("m")) == nil {
		t.Error("the old generation was notified")
	}
	must(t, p.Notify(blue.ID, []byte("m")))
	lost, told := false, false
	for range 2 { // of two transports, so in any order
		switch ev := (<-d.Events()).(type) {
		case agent.PeerLost:
			lost = ev.Peer.Name == p.Name() && ev.Inbound
		case agent.Notification:
			told = string(ev.Msg) == "m"
		}
	}
	if !lost || !told {
		t.Errorf("the peer lost the old connection: %v; was notified by the new one: %v", lost, told)
	}
}

// Shared memory is chosen by itself on one host, and the next transport where it cannot admit.
func TestSharedMemoryFirst(t *testing.T) {
	c := newCable("blue")
	build := func(name agent.Name) *Mux {
		s, err := shm.New(shm.Config{Name: name})
		must(t, err)
		m, err := New(Config{Backends: []Backend{
			{Agent: s, SameHost: shm.SameHost}, {Agent: c.end(t, name, agent.Limits{})},
		}})
		must(t, err)
		return m
	}
	p, d := build("p"), build("d")
	defer p.Close()
	dm, err := d.Alloc(1 << 20)
	must(t, err)
	pm, err := p.Alloc(1 << 20)
	must(t, err)
	peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: d.Offers()})
	must(t, err)
	if peer.Transport != shm.Transport || peer.Why != "same host" {
		t.Fatalf("chosen: %+v", peer)
	}
	pm.Bytes()[77] = 7
	whole := []kv.Descriptor{{Addr: dm.Addr(), Length: 1 << 20}}
	tr := agent.Transfer{LocalIdx: []uint32{0}, RemoteIdx: []uint32{0}, Silence: time.Minute}
	tr.Grant, err = d.Grant(agent.GrantSpec{Peer: "p", Ranges: whole})
	must(t, err)
	tr.Local, err = p.Prepare(agent.Local, []kv.Descriptor{{Addr: pm.Addr(), Length: 1 << 20}})
	must(t, err)
	tr.Remote, err = p.Prepare(peer.ID, whole)
	must(t, err)
	_, err = p.Post(tr)
	must(t, err)
	if r := (<-p.Events()).(agent.Result); r.Outcome != agent.OutcomeDone || dm.Bytes()[77] != 7 {
		t.Fatalf("%+v", r)
	}
	<-p.Events()
	must(t, dm.Free(context.Background()))
	must(t, d.Close())
	if l := (<-p.Events()).(agent.PeerLost); l.Peer != peer.ID {
		t.Errorf("%+v", l)
	}
	// A new incarnation whose shared memory is gone is reached all the same.
	half := c.end(t, "e", agent.Limits{})
	defer half.Close()
	peer, err = p.AddPeer(t.Context(), agent.PeerInfo{Offers: append(d.Offers()[:1:1], half.Offers()...)})
	must(t, err)
	if peer.Transport != "blue" || !strings.HasPrefix(peer.Why, "fallback, because shm failed: ") {
		t.Errorf("chosen: %+v", peer)
	}
}
