// Package session is the protocol of the P2P tier: what two nodes say to each other so that one gets
// blocks out of the other's memory. It is pure: no sockets, agents, clocks, goroutines or logs.
//
//	engine ── Begin, Ask, Fetch, Finish ─────> ┌──────────────────────────┐ ── Answer, LoadEnded ──>
//	tier   ── Supply, Served, Changed ───────> │ Hub                      │ ── Serve, Unpin ───────>
//	peers  ── Message, Up, Down, LinkEnded ──> │  session ─┬─ client role │ ── Dial, Send, Hang ───>
//	agent  ── Admitted, Granted, Transfer… ──> │           └─ server role │ ── Admit, Grant, Post ─>
//	clock  ── Tick ──────────────────────────> └──────────────────────────┘
//
// # A fetch
//
//	client                                                server
//	   │ lookup(id, keys, round)                             │ each hit is pinned, then the next is looked at
//	   │ ──────────────────────────────────────────────────> │
//	   │ <────────────────────────────────────── lookup_resp │
//	   │ grant; fetch(id, keys, indexes, round)              │
//	   │ ──────────────────────────────────────────────────> │ WRITE
//	   │ <════════════════════════════════════════ the bytes │
//	   │ <────────────────────────────── transfer_done, sums │ pins go when the agent has stopped
//	   │ revoke; the blocks are ready                        │
//
// A server keeps only so much for one client; the rest of a long prompt is asked for in later rounds (later.go).
//
// A prefilling server is not asked first: the fetch waits there for what it computes (Supply).
//
// A peer that is a store is offered blocks, which it then fetches as above; see store.go.
//
// # What ends what
//
//   - A lookup without an answer, and a fetch without an end, fail by their deadlines, and with a peer that gives
//     no sign of life; a failure is a miss, and the engine computes.
//   - The slots of a failed fetch are free when nobody can write them any more: at once where the
//     grant can be revoked, else when the peer confirms or its agent's connection is gone (TornDown).
//     No timer ever frees them.
//   - The server's pins are held until the agent has stopped every transfer from them, also when the
//     session has long ended. An ack of an abort is sent only then.
//   - A supply whose pins were given back is forgotten with them: a later fetch for it fails.
//   - An id is used anew only when all that was asked under it is answered: a fence (an empty fetch
//     and an abort, whose ack comes last) makes sure that late answers cannot be mistaken.
//
// # Sessions
//
// A session begins with a connect from each side, and each side's ack says that it has admitted the
// other: the permission to send. It ends with the connection of either direction, an error of the
// peer's, or too long a handshake; its end fails all that hangs on it and removes the peer from the
// agent. Sessions carry generations, and what comes for an earlier one is dropped.
//
// A Hub belongs to one goroutine.
package session
