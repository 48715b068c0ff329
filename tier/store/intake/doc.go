// Package intake decides which of the blocks that peers offer a store fetches, and when. It is pure: no
// clock, I/O, goroutines or logs.
//
//	peer a ── Offer ──> queue ─┐
//	peer b ── Offer ──> queue ─┼─ Next, in turn ──> batches under way ── Ended
//	peer c ── Offer ──> queue ─┘
//
// Each peer has a queue of its own, bounded, and at most one batch under way: one that offers much, or is
// slow, delays nobody else. An offer that finds its queue full is dropped, which costs a block that is
// not kept. An Intake belongs to one goroutine, or to whoever holds its owner's lock.
package intake
