// Package core is the pure part of the router: which way a request goes, what each leg's body says,
// and the machine that runs the two legs of one client request.
//
//	body ── NewPlan ──> Plan ──┬─ PrefillBody ──> leg to P
//	                           └─ DecodeBody  ──> leg to D
//
//	            Begin, Chunk, Ended, ClientGone, Tick
//	driver ───────────────────────────────────────────> Machine.Step
//	       <───────────────────────────────────────────
//	            StartLeg, CancelLeg, Commit, Forward, Complete, Reject, Break, End
//
// There are no sockets, clocks, goroutines or logs here. A Machine belongs to one goroutine: the one
// that serves the client request. Package proxy is the driver.
package core
