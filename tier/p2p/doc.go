// Package p2p is the tier of peers: it fetches blocks out of the CPU memory of other nodes, and serves
// theirs, while the engine computes.
//
//	Manager ── Begin, Probe, Flush, Load ──> inbox ─┐           ┌──> Host: Serve, LoadEnded, …
//	ROUTER ─── receiver goroutine ── messages ──────┤  ┌─────┐  │
//	agent ──── events ──────────────────────────────┼─>│loop │──┼──> conn (one per peer): DEALER
//	timers ─────────────────────────────────────────┤  │ Hub │  │
//	admissions, dials ──────────────────────────────┘  └─────┘  └──> agent: Grant, Post, AddPeer
//
// The protocol is package session's Hub. The loop goroutine owns it, feeds it and carries out what
// follows; it never waits for a peer, a disk or an engine step, only, shortly, for the Manager's lock.
//
// # Long lookups
//
// A peer's lookup is answered from the Manager's book in portions (session.Config.Portion). Peers take turns with them,
// and messages and all else come between two portions, so that a long lookup delays neither the engine nor other
// peers. Each hit is pinned when it is found; the answer goes out when the last portion is known.
//
// # Goroutines
//
// The loop; one that receives from the ROUTER; for each peer one that dials and sends; for each
// admission that may take long one, several at once where the agent allows. Close ends all of them.
// With sessions open and nothing to do, nobody wakes: the kernel watches for hosts that are gone, and PINGs
// are sent only to a peer that owes an answer and is silent, or if wanted (Config.PingEvery). Stock peers send theirs every two seconds, which are answered.
//
// # A peer's blocks
//
// No list of a peer's blocks is made when it is admitted: a transfer prepares the descriptors that it
// needs, so that a peer of any size costs the same.
//
// # A store
//
// A node may have a store (Config.Store): it is offered what the engine computes, and asked by requests
// that name no source. A store (Config.Offers) takes what it likes of that by ordinary fetches. Nothing
// waits for a store.
//
// A Front lets several tiers of one node, with other model facts, share one ROUTER.
//
// # Whom to believe
//
// Nobody proves a name. A peer is admitted only if no other session holds a name of its agent, so it cannot
// end another's transfers, and the ROUTER keeps an identity for the connection that said it first. Who says
// a name that is not its own keeps the owner out as long as it stays; the owner, and whoever asks for
// it, learns that at once, and nobody else notices. When there is no place for a new peer, the host with most
// of the sessions pays.
//
// # Stock peers
//
// test/interop/p2p-control.sh runs this package against a released tier: connect, ack, lookup, fetch, refusals and
// disconnects, in both roles. Without an agent for NIXL no bytes come to this node: it lends the
// metadata of another process's agent.
//
// # Permissions
//
// A fetch carries the grant for exactly the slots that it names. Before the tier learns that a load
// has ended, the grant is revoked. Towards stock peers, and with agents that cannot refuse, see
// package session.
package p2p
