package peer

import (
	"crypto/sha256"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// RankPeer is one connected rank of a peer engine.
type RankPeer struct {
	Rank    kv.Rank
	Agent   agent.Peer          // by what it is reached, and why so
	Meta    *wire.AgentMetadata // as received; read only
	Regions []kv.Region         // of Meta; read only

	digest [sha256.Size]byte // of the encoded metadata
}

// Connected is a peer engine as one handshake found it. It is immutable and may be read from any
// goroutine, also after its generation is gone.
type Connected struct {
	Engine kv.EngineID
	Gen    kv.Generation
	Addr   string     // where the handshake found it, host:port
	Ranks  []RankPeer // in the order of the target; ranks added later follow
	Clock  ClockSample

	root [sha256.Size]byte // digest of rank (0,0)'s metadata, connected or not
}

// Has reports whether every connected rank announces a capability in its kvferry extension. A peer
// without it must not be sent what it stands for.
func (c *Connected) Has(capability string) bool {
	for i := range c.Ranks {
		if !c.Ranks[i].Meta.Extension.Has(capability) {
			return false
		}
	}
	return len(c.Ranks) > 0
}

// Rank finds a connected rank.
func (c *Connected) Rank(r kv.Rank) (*RankPeer, bool) {
	for i := range c.Ranks {
		if c.Ranks[i].Rank == r {
			return &c.Ranks[i], true
		}
	}
	return nil, false
}

// hasAgent reports whether an agent peer serves one of the ranks.
func (c *Connected) hasAgent(id agent.PeerID) bool {
	for i := range c.Ranks {
		if c.Ranks[i].Agent.ID == id {
			return true
		}
	}
	return false
}

// ClockSample relates a peer's clock to ours: the sample with the lowest round trip of one
// handshake (nixl-connector.md, section 2.4).
type ClockSample struct {
	Offset float64       // peer's clock minus ours, seconds; the error is at most RTT/2
	RTT    time.Duration // of the question that gave it

	taken bool
}

// Local turns a reading of the peer's clock into one of ours, both in seconds.
func (c ClockSample) Local(remote float64) float64 { return remote - c.Offset }
