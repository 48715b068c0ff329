// Package peer finds other engines and keeps them connected: the side channel on which an engine
// tells its metadata, the handshakes that read a peer's, and the table of connected peers by
// generation.
//
//	 our engine                                            peer engine
//	┌──────────────────────┐                              ┌──────────────────────┐
//	│ Listener             │ <─ REQ  [get_meta, pp, tp] ─ │ Table (one per rank) │
//	│  one port, all ranks │ ── ROUTER [payload, clock] ─>│                      │
//	└──────────────────────┘                              └──────────────────────┘
//	┌──────────────────────┐  Ensure(target, done)
//	│ Table                │ ──────────┐ connected: returned at once
//	│  engine → Connected  │           │ else one flight per (engine, address):
//	│  flights             │           └─> slot ─> dial ─> query ranks ─> check ─> agent.AddPeer
//	│  least recently used │ <──────────── publish: all waiters released together ────┘
//	└──────────────────────┘ <── Lost(agent peer) from the reader of the agent's events
//
// # Who owns what
//
// The Listener owns its port, its connections and one goroutine that answers. The Table owns one
// goroutine per handshake in flight and the agent peers that it added; its map is guarded by a
// mutex that is never held across I/O, a call to the agent, an event or a callback. Close of
// either ends all of it and returns when no goroutine is left.
//
// # Handshakes
//
// A handshake asks rank (0,0), which every engine has, before any other rank, so that a stock peer
// is recognised before it is asked for something that would end its listener (nixl-connector.md,
// section 14). Each answer is decoded in two phases: the outer map and its compatibility hash
// first, the metadata only if the hash fits (section 2.4). All ranks must agree in instance and
// block count. Only then are agents added; if one cannot be, those added before it are removed.
//
// At most Config.MaxParallel handshakes are active, but one that has not ended after slotPatience
// gives its slot away and goes on without it: a crowd of dead peers costs a healthy one little
// waiting, and each of them ends by Config.HandshakeTimeout.
//
// # Shares
//
// A handshake is accounted to the agent that asked us for an answer (Target.By), else to the host that our own work
// needs (share.go). The two kinds have bounds of their own. When one is full, the tenant with most handshakes
// makes room with its oldest; slots go to those who have fewest, and no tenant ever has all. So
// whoever makes up thousands of engines delays and ends its own handshakes and nobody else's.
//
// # Same engine id, other address
//
// Handshakes with one engine id at two addresses run side by side; they take turns only for adding
// agents. When the second one finds the same instance as the connected one, both addresses name
// that same generation from then on. When it finds another instance, it becomes a new generation
// and the old one is gone. A failed one changes nothing.
//
// # Generations
//
// Connected.Gen is new whenever an engine was connected anew. What was posted to an earlier
// generation ends as peer lost in the agent. Within a generation ranks may be added, when a later
// target names more of them; those already there stay as they are.
package peer
