// Package front is the half of an agent that every backend in this module shares: memory,
// registrations, prepared lists, grants, the event queue, and the check that turns a Transfer into
// a Plan before any byte moves.
//
//	user ─ Alloc, Register, Prepare, Grant ─> Front ─ tables
//	user ─ Post ─> backend ─ Front.Check ───> Plan ─ Cutter ─> Pieces to move
//
// A Front may be used from any goroutine. Only Free and Deregister block, until transfers on the
// memory have stopped.
package front
