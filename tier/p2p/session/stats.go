package session

import (
	"maps"
	"slices"

	"github.com/kvferry/kvferry/event"
)

// Reason says in one word why a session has ended, or a peer got none: a label of metrics.
type Reason string

const (
	Lost      Reason = "lost"      // the connection, or the agent's, is gone
	Silent    Reason = "silent"    // nothing came from it for long, although it was asked
	Goodbye   Reason = "goodbye"   // the peer has disconnected
	Handshake Reason = "handshake" // not finished in time
	Protocol  Reason = "protocol"  // the peer broke it
	Facts     Reason = "facts"     // another model, hash seed, block length, or memory that cannot be
	Admission Reason = "admission" // the agent cannot have it
	Sibling   Reason = "sibling"   // another rank of the same process is gone
	Replaced  Reason = "replaced"  // it has connected anew
	Evicted   Reason = "evicted"   // idle, and its place was needed
	Displaced Reason = "displaced" // its host had most of the places
	Overflow  Reason = "overflow"  // too much waits for it
	Closing   Reason = "closing"   // this node is
	Full      Reason = "full"      // no place
	BadName   Reason = "name"      // its name cannot be dialled, or is ours
	NoConnect Reason = "no_connect"
	Stale     Reason = "stale" // its connect answers that of an earlier session
)

// Counts are what has happened with one peer, or with all. They only grow.
type Counts struct {
	SessionsOpened, SessionsEnded uint64
	// Lookups of ours: asked, answered whole, given up. LookupsServed are the peers'.
	LookupsAsked, LookupsAnswered, LookupsTimedOut, LookupsServed uint64
	// Fetches of ours: those that arrived, and those that did not. FetchesServed and FetchesRefused are
	// the peers': written whole, and not.
	FetchesDone, FetchesFailed, FetchesServed, FetchesRefused uint64
	BlocksIn, BlocksOut, BytesIn, BytesOut                    uint64
	// BlocksDamaged did not have their checksum, BlocksUnchecked came without one.
	BlocksDamaged, BlocksUnchecked uint64
	ProtocolErrors                 uint64
}

func (c *Counts) add(o *Counts) {
	for i, p := range o.fields() {
		*c.fields()[i] += *p
	}
}

func (c *Counts) fields() []*uint64 {
	return []*uint64{&c.SessionsOpened, &c.SessionsEnded, &c.LookupsAsked, &c.LookupsAnswered, &c.LookupsTimedOut, &c.LookupsServed,
		&c.FetchesDone, &c.FetchesFailed, &c.FetchesServed, &c.FetchesRefused, &c.BlocksIn, &c.BlocksOut, &c.BytesIn, &c.BytesOut,
		&c.BlocksDamaged, &c.BlocksUnchecked, &c.ProtocolErrors}
}

// Stats are for people and metrics.
type Stats struct {
	Sessions, Open int // now: all, and those past their handshake
	Total          Counts
	// Peers has those with a session, and as many of the others as fit (128 more than sessions); the rest are
	// together under "".
	Peers map[PeerID]Counts
	// Ended and Refused count by reason: sessions, and peers that got none.
	Ended, Refused map[Reason]uint64
}

// ledger is the book behind Stats.
type ledger struct {
	total          Counts
	peers          map[PeerID]*Counts
	order          []PeerID // of peers, by their first session
	ended, refused map[Reason]uint64
}

func newLedger() ledger {
	return ledger{peers: map[PeerID]*Counts{}, ended: map[Reason]uint64{}, refused: map[Reason]uint64{}}
}

// Stats copies the counters.
func (h *Hub) Stats() Stats {
	s := Stats{Sessions: len(h.sessions), Total: h.book.total, Peers: make(map[PeerID]Counts, len(h.book.peers)),
		Ended: maps.Clone(h.book.ended), Refused: maps.Clone(h.book.refused)}
	for p, c := range h.book.peers {
		s.Peers[p] = *c
	}
	for _, x := range h.sessions {
		if x.ready() {
			s.Open++
		}
	}
	return s
}

// count changes a counter of a peer and of the total.
func (h *Hub) count(p PeerID, change func(*Counts)) {
	change(&h.book.total)
	c := h.book.peers[p]
	if c == nil {
		if c = h.book.peers[""]; h.sessions[p] != nil || c == nil {
			c = h.enter(p)
		}
	}
	change(c)
}

// enter gives a peer an account. When there are too many, the oldest of a peer without a session goes into
// the common one.
func (h *Hub) enter(p PeerID) *Counts {
	b := &h.book
	if p != "" && h.sessions[p] == nil {
		p = ""
	}
	if len(b.peers) >= h.cfg.MaxPeers+maxPastPeers {
		i := slices.IndexFunc(b.order, func(o PeerID) bool { return h.sessions[o] == nil })
		if i >= 0 {
			rest := b.peers[""]
			if rest == nil {
				rest = &Counts{}
				b.peers[""] = rest
			}
			rest.add(b.peers[b.order[i]])
			delete(b.peers, b.order[i])
			b.order = slices.Delete(b.order, i, i+1)
		}
	}
	c := b.peers[p]
	if c == nil {
		c = &Counts{}
		b.peers[p] = c
		if p != "" {
			b.order = append(b.order, p)
		}
	}
	return c
}

func (h *Hub) report(ev event.Event) { h.emit(Report{Event: ev}) }

// refused notes a peer that gets no session.
func (h *Hub) refused(p PeerID, why Reason, text string) {
	h.book.refused[why]++
	h.report(event.TierPeerRefused{Peer: string(p), Reason: string(why), Why: text})
}
