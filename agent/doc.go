// Package agent is the transfer-agent interface: what moves bytes between the memory of two
// processes, and the contract that everything above relies on.
//
//	 P process                                   D process
//	┌──────────────┐  Post(WRITE, idx, idx)     ┌──────────────┐
//	│ Agent        │ ═════════ bytes ═════════> │ Agent        │
//	│  Prepare     │ ───── notification ──────> │  Grant       │
//	│  Post        │                            │  Revoke      │
//	└──────┬───────┘                            └──────┬───────┘
//	       Events: Result, Stopped                     Events: Notification, PeerLost
//
// # Life
//
// A program allocates memory with Alloc (fd-backed, zeroed, freed by the agent) or lends its own
// with Register. It tells peers its Offers through a handshake (package peer), admits each with
// AddPeer, and prepares descriptor lists once per peer. After that a transfer is two lists of
// indices: Post. The peer must have given a Grant for what the transfer touches; how the grant's
// id reaches the poster is not the agent's business (a registration carries it).
//
// # Contract
//
// Package agenttest checks it on every backend:
//
//   - Each posted transfer gives exactly one Result and then exactly one Stopped. Only Stopped
//     gives blocks back.
//   - A notification attached to a WRITE arrives after its bytes, and only if all of them arrived.
//   - After Revoke has returned no byte is written (or read) under that grant, whatever the writer
//     does: stopped in the middle, hostile, dead.
//   - No byte outside of a grant moves. A transfer that names one fails; of a large one, parts that
//     are granted may have moved by then.
//   - Indices and lengths are checked before any byte moves. A hostile peer can cause an error,
//     never a crash, never a write outside a grant, never a delay for other peers.
//   - Registered memory is never Go heap.
//   - Every transfer ends within its bound of silence, whatever the peer does or stops doing.
//
// # Who owns what
//
// The agent owns its goroutines, connections and mappings. The one reader of Events owns the
// events. Lists, grants and peers live until released, revoked or removed; all are bounded (Limits),
// and what is beyond a bound is refused with *LimitError. A list ends with its peer, a grant with
// any memory that it includes.
//
// The reader of Events may see a Result before Post has returned the transfer's id to the poster.
// It may be as slow as it likes: transfers go on, and notifications wait up to each peer's share.
//
// # Peers and their names
//
// Name is random per incarnation, PeerID adds a generation. A peer that has connected to this
// agent without being added (it learned our offer from our side channel) can only send
// notifications and use grants given to its name; its PeerID comes from the same generation
// counter, and it cannot be posted to until added. Such a peer is lost and added apart from what
// this agent may have added under the same name.
//
// # Choosing a backend
//
// Package local serves tests and simulations in one process, shm two processes of one host, tcp any
// two hosts. Package mux joins several over one memory and chooses for each peer; fault wraps an agent
// to make it fail on purpose.
package agent
