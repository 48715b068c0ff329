// Package gate makes "no more from now on" exact. Short, bounded pieces of work pass through an
// open gate; Shut closes it and returns when the pieces inside have left, so that after Shut none
// of the work is going on and none can start.
//
//	worker:  if g.Enter() { copy a bounded piece; g.Leave() }
//	owner:   g.Shut()     // waits for one piece at most per worker, never for a peer
//
// Grants, transfers and incoming transfers each have one. Who passes several enters them in the
// order transfer, grant, and never waits for a peer inside.
package gate
