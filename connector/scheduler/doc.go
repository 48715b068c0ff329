// Package scheduler is SchedulerHalf: the ledger of one engine's hand-offs. It decides what is to
// be received, kept, sent and given up, and never moves a byte.
//
//	           engine loop (owner of the Half)
//	 Arrived ──> External ──> Allocated ──> Finished
//	     │           │            │            │
//	     ▼           ▼            ▼            ▼
//	┌──────────────────── Half ─────────────────────┐  Metadata   ┌─────────┐
//	│ D: waiting → staged → shipped → cancelling    │ ──────────> │ rank 0  │
//	│ P: arrived → processing → held                │ <────────── │ rank 1… │
//	└───────────────────────────────────────────────┘   Update    └─────────┘
//	     │
//	     ▼ Update, Expire
//	 Received, ReceiveFailed, Released
//
// A Half is pure: no I/O, no clock, no goroutine, no log. Everything that it needs to know comes in
// by its methods with the time at which it happened, and everything that it wants goes out by
// Metadata and by outcomes. One goroutine, the engine's loop, owns it; no method blocks.
//
// # What D does
//
// Arrived checks the parameters and lets heartbeats begin, so that P keeps the blocks while D's
// queue is long. Allocated stages a registration for the blocks that D lacks and arms the
// watchdog. The request runs after Received, which comes when every rank has the whole KV. If it
// will not come (a rank failed, the watchdog fired), the other ranks are told to cancel, and
// ReceiveFailed comes when every rank has reported: nobody writes those blocks any more. An abort
// while waiting holds the blocks until the same moment and ends as Released.
//
// The seed's watchdog only forgets (push-mode.md); here it ends the request (issue 3). It counts
// silence: whatever a rank reports as progress of P re-arms it. A request that ends, or needs nothing,
// before any rank knew of it is withdrawn, so that P gives its blocks back at once.
//
// # What P does
//
// Allocated marks the request as being computed, Finished puts its blocks under a lease that the
// workers keep and that has a generation, and Released comes when every rank is done with them. A request that ends without
// blocks, or in another way than by length or stop, is dropped: whoever waits for it is told. Release gives
// a hold up that nobody will ask for, named by id and lease generation; Released comes as always, when
// every rank is done with the blocks.
//
// # Pull
//
// The mode is one per engine. In pull the two legs come one after the other: P's answer names its
// blocks, and D's request brings these. The ledger is the same; what D stages is a read instead of a
// registration, of the tokens that P has (fewer than the prompt, if P says so), and P tells its workers
// of finished requests only, since nobody can ask for one before its answer. A D that needs nothing
// withdraws, and P frees.
//
// # The next turn (bidirectional pull)
//
//	D: … → decoding ── Finished ──> finished → held      its answer's parameters go to P with the next turn
//	P: waiting → staged → shipped ──> processing → finished → held
//	              │ failed, too late        ▲
//	              └─────────────────────────┘
//
// A D that is Bidirectional keeps what it has of prompt and answer when its request has ended, for a time
// that nothing makes longer. P, whose next prompt begins with the same tokens, reads it as D reads in
// pull, and computes the rest: reading is one life of the request in the ledger, prefilling the next.
// Whatever goes wrong with the first, the second is right (nixl-connector.md, section 6.1).
//
// # Recompute threshold
//
// Below it, tokens are computed instead of transferred, in push, pull and for the next turn alike (issue
// 5); the reference connector heeds it for the next turn only. Whoever would have given the KV is told.
//
// # Second look-ups
//
// Parameters are used once. After Allocated with them, or after a failed receive, External answers
// 0, so that a preempted request prefills locally instead of waiting for a transfer that nobody
// will start (nixl-connector.md, H12). Nothing is kept for a next turn but what a request with a hand-off
// has computed and its answer names (H13).
package scheduler
