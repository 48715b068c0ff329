// Package worker is WorkerHalf: one rank of an engine, with its agent, its memory and its transfers.
//
//	SchedulerHalf                                                  other engines
//	     │ StepMeta           ┌───────────────────────────┐
//	     └──Submit──> mailbox │                           │ ──PUSH_REG, beats, failures> Notify
//	peer.Table ─────> mailbox │  writer ── machine.Step   │ ──WRITE + completion───────> Post
//	agent.Events ───────────> │                           │ ──permission for our blocks─ Grant
//	one timer ──────────────> │                           │ ──and its end───────────── Revoke
//	     ┌──WorkerOutput───── └───────────────────────────┘
//	     ▼
//	SchedulerHalf
//
// # Who owns what
//
// The writer is one goroutine, the only one of the package. It alone reads the agent's events, sends
// notifications, grants and revokes, and posts transfers. Everything that it decides is decided by
// a machine, which is pure: it takes an input and the time and returns actions. Handshakes run in
// the peer table and come back through the mailbox. The writer blocks on nothing but its select: no
// peer, no engine step and no reader of Outputs holds it up, and with nothing waiting no timer runs.
// (The reference design polls every millisecond while blocks are unmatched, and lets heartbeats and
// completions ride on engine steps.)
//
// # What D does
//
// A registration waits for the handshake, then for a grant of exactly its blocks for P's agent, and
// goes to P as PUSH_REG with the grant in it. The completion of every P rank ends it: the grant is
// revoked, and the receive is reported. Whatever else happens (handshake, send, PUSH_FAIL, P's agent
// gone, cancel, silence) ends it the same way: first the revoke, then the report, so that reported
// blocks are never written. Where the agent cannot revoke, the blocks stay in quarantine until P has
// confirmed the cancel, has written everything after all, or has lost the connection by which it
// writes (quarantine.go).
//
// # What P does
//
// Finished blocks (under a lease) and registrations meet in two tables, whichever comes first: by
// transfer id, exact id, base id, each a hash lookup. A registration whose prompt or token count
// differs is refused. A pair waits for the handshake with D, is planned by package geometry and
// posted as one WRITE whose completion is attached. The blocks are given back at Stopped, never
// before. A lease that ends while bytes may move waits for Stopped, too. A hold that the ledger gives up
// (StepMeta.Released) ends as by the end of its lease, except that a WRITE under way is told to end.
//
//	blocks come ──> waiting ──pair──> connecting ──> (queued) ──> writing ──Stopped──> reported
//	                   │ lease            │ lease, D gone, refused            (done or failed)
//	                   ▼                  ▼
//	                reported      reported, or waiting again
//
// # Peers that understand control messages
//
// They announce wire.ControlCapability; no other peer is sent one. D beats, and P answers each beat
// with the state of D's registrations; every answer that shows progress re-arms the ledger's watchdog.
//
//	D heard nothing of P for 3 heartbeats        failed (wait); the engine is connected anew
//	P has forgotten what it had acknowledged     failed (wait) with that answer
//	P lives, has no prefill for it for a lease   failed (prefill)
//	registration not acknowledged                sent again with the beats, 4 times, then failed
//	P has written, the completion never came     failed (transfer) a heartbeat later
//	P will not serve it                          failed with P's phase and reason, at once
//	P queues, computes, waits for room, writes   D waits
//
// D's end of a request (abort, failure, nothing needed) is told to P by a cancel, registered or not;
// P stops what runs and gives its blocks back. Cancels and failures are letters: acknowledged, sent
// again with the heartbeats, four times at most, and taken once. P acknowledges a cancel when nothing
// of it is written any more.
//
// A timer that comes late says that this process did not run; a late silence timer gives P one more
// heartbeat.
//
// # Pull
//
// The mode is one per engine. In pull the hold and its lease are as in push, but nothing is matched: D
// names P's request, and asks for the permission to read its blocks with a claim.
//
//	D: fetch   connecting ──> claiming ──> (queued) ──> reading ──Stopped──> reported
//	              │              │ Claimed: a grant        │ ReadDone
//	P: hold ──────┴───── claim ──┴── lent ─────────────────┴──> n of n are done: revoke, reported
//
// P compares what D believes (lease generation, digest of the tokens, their number, the block ids)
// with what it holds, and lends exactly the hold's blocks to D's agent alone, or says why not. D asks
// again with every heartbeat interval, four times; P takes a claim once and answers each copy. The
// READ carries a notification that ends its claim, to a stock P the stock one, `<P's id>:<n>`; n is how many
// requests of D take the same KV (n > 1 in the client's request), so that the first does not free what the
// others read. A D request that needs no KV sends the stock notification alone, one that gives a claim up
// cancels it.
//
// A lease that ends takes the permissions back before the blocks are reported, also under a READ, which
// then fails: D never keeps bytes of a block's next owner. An agent that cannot revoke keeps the blocks
// until D acknowledges that it reads no more, or its connection is gone. A stock P lends without a
// claim; that its lease held, D cannot know.
//
// For the next turn of a conversation D is the lender and P the reader (pull_earlier.go). D compares the
// digest of the tokens that are wanted with its own, and its lease becomes no longer by beats or claims. P does
// not begin to read in the last five seconds, by the offset of the clocks that the handshake has found, and
// takes nothing from a stock D that came after D's time: unlike a stock P, that has said when it ends.
//
// # Strangers
//
// Agent names and engine addresses are public, ids and numbers can be guessed. A registration or claim has a
// token, a letter a receipt (token.go), which only the two peers have seen; what comes without it is counted
// and means nothing. A message counts as P's sign of life, and its connection as P's, if it names a request of
// ours that is under way, token included; a registration or claim goes with the connection that named it last
// (liveness.go, sender.go). Copies of registrations are told by their numbers for each connection by itself. A
// connection that we made is the agent's own. Where the agent tells what arrives, a completion without a
// WRITE is ignored. What waits for a handshake to be told has a share for each agent (notices.go), and so have
// the handshakes (package peer); what waits for room has a queue for each peer (line.go).
//
// # How long things are kept
//
// A registration that finds no blocks goes Config.RegistrationTimeout (480 s) after its arrival or the
// last beat that named it, earlier if its sender or all together have too many (limits.go). A request of P that ended without KV is
// remembered as long, so that a registration that comes late is told. Heartbeats go every sixth of
// a lease in whole seconds (5 s of 30 s) while somebody waits, and each guarantees two thirds of
// one (20 s) from its arrival. A heartbeat extends what it names exactly, by transfer id, by base
// id, or by X-Request-Id; the last is what a stock D names behind a concurrent router, and what
// stock P fails to recognise (nixl-connector.md, section 7.8).
//
// # Ids on the wire
//
// A completion carries D's request id and nothing else. When the engine gives ids without a random
// suffix, the registration's generation takes the suffix's place on the wire, so that a completion
// of an earlier request of the same id is recognised as such.
package worker
