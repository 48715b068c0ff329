package worker

import (
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

// remote is the rank of a connected engine that corresponds to ours, in one generation. It does not
// change; the machine forgets it when another generation comes or its agent is lost.
type remote struct {
	engine   kv.EngineID
	addr     connector.PeerAddr // by which it was reached
	gen      kv.Generation
	agent    agent.Peer
	layout   geometry.Layout
	stock    bool // no kvferry
	pushFail bool // understands PUSH_FAIL
	control  bool // understands control messages
	claims   bool // and lends blocks
	clock    peer.ClockSample
	err      error // why no KV can be moved between it and us; nil if it can
}

func (r *remote) name() agent.Name { return r.agent.ID.Name }

// remoteOf is what we know of a connected engine, computed once per generation.
func (m *machine) remoteOf(addr connector.PeerAddr, c *peer.Connected) *remote {
	if r := m.remotes[c.Engine]; r != nil {
		if r.gen == c.Gen && r.layout.TP == addr.TP && r.layout.PP == addr.PP {
			return r
		}
		m.forgetRemote(r)
	}
	r := &remote{engine: c.Engine, gen: c.Gen, addr: addr, clock: c.Clock}
	rank, ok := c.Rank(m.cfg.Rank)
	if !ok {
		r.err = fmt.Errorf("engine %q has no rank PP %d, TP %d", c.Engine, m.cfg.Rank.PP, m.cfg.Rank.TP)
		return r // not kept: a later handshake may find the rank
	}
	r.agent = rank.Agent
	r.stock = rank.Meta.Extension == nil
	r.pushFail = rank.Meta.Extension.Has(PushFailCapability)
	r.control = rank.Meta.Extension.Has(wire.ControlCapability)
	r.claims = r.control && rank.Meta.Extension.Has(wire.ClaimCapability)
	r.layout, r.err = geometry.FromMetadata(rank.Meta, addr.TP, addr.PP)
	if r.err == nil {
		r.err = geometry.Check(m.cfg.Layout, r.layout, r.stock)
	}
	if len(m.remotes) >= maxRemotes {
		for _, old := range m.remotes {
			m.forgetRemote(old)
			break
		}
	}
	m.remotes[c.Engine] = r
	m.named[r.name()] = r
	return r
}

// restarted ends what waits for an earlier incarnation of an engine, whose agent the peer table has
// removed without a word to us.
func (m *machine) restarted(old *remote) {
	m.receivesLost(old.name(), errors.New("the engine has restarted"))
	m.fetchesLost(old.name(), errors.New("the engine has restarted"))
	m.claimsLost(old.name(), anyConnection)
	m.senderLost(m.now, old.name(), "its decode engine has restarted")
	m.quarantinesLost(agent.PeerLost{Peer: old.agent.ID})
	m.forgetCorrespondent(old.name())
}

// forgetRemote drops what was computed for a generation. Work under way keeps its own pointer.
func (m *machine) forgetRemote(r *remote) {
	delete(m.remotes, r.engine)
	if m.named[r.name()] == r {
		delete(m.named, r.name())
	}
	m.do(forget{r.agent.ID})
}

// forgetAgent drops the remote whose agent is gone.
func (m *machine) forgetAgent(id agent.PeerID) {
	for _, r := range m.remotes {
		if r.agent.ID == id {
			m.forgetRemote(r)
			return
		}
	}
}

// whereWeAre is the address that peers are told, and why they may not find us there.
func (m *machine) whereWeAre() string {
	at := net.JoinHostPort(kv.BareHost(m.cfg.Host), strconv.Itoa(m.cfg.Port))
	if kv.OwnHost(m.cfg.Host) {
		at += ", which to another host is itself: unless it runs on this one, start this engine with --side-channel and --agent-listen, " +
			"or --advertise-host, by which it reaches this host"
	}
	return at
}

// pushReg is the registration of one receive as it goes over the wire.
func (m *machine) pushReg(r *receive, g agent.GrantID) *wire.PushReg {
	p := &wire.PushReg{
		RequestID:      r.wireID,
		DecodeEngineID: m.cfg.Engine,
		DecodeHost:     m.cfg.Host,
		DecodePort:     m.cfg.Port,
		DecodeTPSize:   m.cfg.TP,
		LocalBlockIDs:  r.reg.Blocks,
		RemoteEngineID: r.reg.Peer.Engine,
		RemoteHost:     r.reg.Peer.Host,
		RemotePort:     r.reg.Peer.Port,
		RemoteTPSize:   r.reg.Peer.TP,
		RemotePPSize:   r.reg.Peer.PP,
		TransferID:     r.reg.TransferID,
	}
	p.Extension = &wire.PushRegExtension{
		Grant:        g,
		Token:        r.token,
		StartToken:   r.reg.StartToken,
		NumTokens:    r.reg.NumTokens - r.reg.StartToken,
		PromptDigest: r.reg.Digest,
		Generation:   r.gen,
		Lease:        r.reg.Lease,
	}
	return p
}
