// Package memory is an agent's view of its own process's memory: fd-backed segments that it maps
// itself, and the table of registered ranges, in which every range counts the transfers that use
// it.
//
//	Map ─────────> Segment ──┐
//	                         ├─ Table.Add ─> Range ── Hold/Unhold by transfers
//	borrowed memory ─────────┘                 └───── Retire, Wait: no more holds, then none left
//
// A Table may be used from any goroutine. Nothing here blocks except Range.Wait, which waits for
// transfers to stop or for its context.
package memory
