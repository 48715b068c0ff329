// Package core is the pure part of the router: which way a request goes, what each leg's body says,
// and the machine that runs the two legs of one client request.
//
//	body ── NewPlan ──> Plan ──┬─ PrefillBody ──> leg to P ── ReadHandoff ─┐ (pull)
//	                           └─ DecodeBody  ──> leg to D <── HandoffBody ┘
//
//	            Begin, Located, Chunk, Ended, ClientGone, Tick
//	driver ───────────────────────────────────────────> Machine.Step
//	       <───────────────────────────────────────────
//	            Locate, StartLeg, CancelLeg, Release, Commit, Forward, Complete, Reject, Break, End
//
// Two engines that push get their legs together; of two that pull, D gets its leg when P has answered, with
// P's parameters in it. Until the engines' mode is known only P's leg runs: it is the same in both.
//
// There are no sockets, clocks, goroutines or logs here. A Machine belongs to one goroutine: the one
// that serves the client request. Package proxy is the driver.
package core
