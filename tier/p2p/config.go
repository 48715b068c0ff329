package p2p

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/wire"
)

// StockHashSeed is what release 0.32.0 hashes with when PYTHONHASHSEED is not set.
const StockHashSeed = "vllm-none-hash"

// Config of a Tier.
type Config struct {
	// Listener receives; the tier takes it over. Port receives by a Front that others share. One of the two.
	Listener net.Listener
	Port     *Port
	// Name is our own "host:port", under which peers know us and dial us back: it must lead to the
	// Listener from where they are. Required.
	Name string
	// Agent moves the bytes. The tier is the only reader of its events, and does not close it. Required.
	Agent agent.Agent
	// Base, Blocks and BlockLen are the Manager's memory, registered with the agent. Required.
	Base     uint64
	Blocks   int
	BlockLen int
	// Fingerprint of the model's facts (p2p-tier.md, section 3.2); "" is compared with nothing.
	Fingerprint string
	// HashSeed of the block hashes. Required.
	HashSeed string
	// Instance is random for each process start, and equal for all ranks of one engine: they go
	// together. It is secret: no peer is told. Required. HostID is equal for nodes that share a kernel; "" unknown.
	Instance, HostID string

	// Store is a peer, "host:port", that keeps blocks for others: it is offered every block that is
	// stored, and asked for those of requests that name no source. "": none.
	Store string
	// Offers makes this node a store: it is told what peers offer. nil: it is none.
	Offers Taker

	// Session holds the protocol's bounds; its Local, Store and Revocable are filled in here.
	Session session.Config
	// PingEvery is how often a silent connection is tried by a PING; stock does it every two seconds. 0 or
	// less: never, so that idle sessions wake nobody: the kernel finds hosts that are gone, and who waits for
	// something has a deadline. Peers' PINGs are answered in any case.
	PingEvery time.Duration
	// Silence bounds the time without progress of a transfer. 0: 30 s.
	Silence time.Duration
	// Dial opens connections. nil: net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Events gets the typed events of sessions and fetches (event.TierSessionStarted and others), from the
	// loop's goroutine. nil: event.Discard.
	Events event.Sink
	// OnNote is told what happens with peers, from the loop's goroutine. It must not block. nil: nobody.
	OnNote func(session.Note)
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	switch {
	case (c.Listener == nil) == (c.Port == nil) || c.Agent == nil:
		return errors.New("p2p tier: no listener or no agent")
	case c.Instance == "":
		return errors.New("p2p tier: no instance")
	case c.PingEvery > pingTTL/2:
		return fmt.Errorf("p2p tier: a PING every %v; peers would drop us after %v", c.PingEvery, pingTTL)
	case c.Silence < 0:
		return fmt.Errorf("p2p tier: a silence of %v", c.Silence)
	}
	return c.session().Validate()
}

// session is the hub's configuration.
func (c Config) session() session.Config {
	s := c.Session
	ext := &wire.Extension{Version: wire.ExtensionVersion, Instance: c.Instance, HostID: c.HostID}
	s.Local = wire.P2PConnect{
		PeerID: c.Name, AgentMetadata: []byte{}, BaseAddr: c.Base, NumBlocks: c.Blocks, BlockLen: uint64(max(0, c.BlockLen)),
		Fingerprint: c.Fingerprint, HashSeed: c.HashSeed, Extension: ext,
	}
	s.Store = session.PeerID(c.Store)
	ext.Capabilities = []string{wire.CapP2PSums, wire.CapP2PLater}
	if c.Offers != nil {
		ext.Capabilities = append(ext.Capabilities, wire.CapP2PStore)
	}
	if c.Agent != nil {
		s.Revocable = c.Agent.Capabilities().Revocable
		for _, o := range c.Agent.Offers() {
			ext.Agents = append(ext.Agents, wire.AgentOffer{Transport: o.Transport, Blob: o.Blob})
			if o.Transport == stockTransport {
				s.Local.AgentMetadata = o.Blob
			}
		}
	}
	return s
}

// stockTransport is the transport of stock peers' metadata.
const stockTransport = "nixl"

// peerInfo is what the agent is told of a peer.
func peerInfo(m *wire.P2PConnect) agent.PeerInfo {
	if m.Extension == nil {
		return agent.PeerInfo{Offers: []agent.Offer{{Transport: stockTransport, Blob: m.AgentMetadata}}}
	}
	info := agent.PeerInfo{HostID: m.Extension.HostID}
	for _, o := range m.Extension.Agents {
		info.Offers = append(info.Offers, agent.Offer{Transport: o.Transport, Blob: o.Blob})
	}
	return info
}

func (c Config) heartbeat() zmtp.Heartbeat { return heartbeat(c.PingEvery) }
