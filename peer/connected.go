package peer

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Target says which engine to connect, where it is said to be, and which of its ranks are needed.
type Target struct {
	Engine kv.EngineID
	Host   string // name or literal address; an IPv6 literal with or without brackets
	Port   int
	TP, PP int // the peer's sizes as the request names them; 0 means 1
	// Ranks is whom to ask, in order, without repetition: never more than known to exist, that is
	// each below TP and PP. The slice is copied.
	Ranks []kv.Rank
}

// RankPeer is one connected rank of a peer engine.
type RankPeer struct {
	Rank    kv.Rank
	Agent   agent.Peer          // by what it is reached, and why so
	Meta    *wire.AgentMetadata // as received; read only
	Regions []kv.Region         // of Meta; read only
}

// Connected is a peer engine as one handshake found it. It is immutable and may be read from any
// goroutine, also after its generation is gone.
type Connected struct {
	Engine kv.EngineID
	Gen    kv.Generation
	Addr   string     // where the handshake found it, host:port
	Ranks  []RankPeer // in the order of the target; ranks added later follow
	Clock  ClockSample

	instance string // random per incarnation of the engine; empty for a stock peer
}

// Has reports whether every connected rank announces a capability in its kvferry extension. A peer
// without it must not be sent what it stands for.
func (c *Connected) Has(capability string) bool {
	for i := range c.Ranks {
		x := c.Ranks[i].Meta.Extension
		if x == nil || !slices.Contains(x.Capabilities, capability) {
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

// ClockSample relates a peer's clock to ours: the sample with the lowest round trip of one
// handshake (nixl-connector.md, section 2.4).
type ClockSample struct {
	Offset float64       // peer's clock minus ours, seconds; the error is at most RTT/2
	RTT    time.Duration // of the question that gave it
}

// Local turns a reading of the peer's clock into one of ours, both in seconds.
func (c ClockSample) Local(remote float64) float64 { return remote - c.Offset }
