// Package core decides what the CPU block tier holds: which blocks lie in which slot of memory, who
// uses them, what is evicted, and which jobs the tiers behind it are to do. It is pure: no memory, no
// clock, I/O, goroutines or logs.
//
//	engine ── Lookup, Use, Reserve, Commit ──> ┌─────────┐ ── Load, Store, Unwanted, End ──> secondary tiers
//	peers  ── Serve, Unpin ──────────────────> │ Machine │ <── LoadEnded, StoreEnded ──┘
//	                                           └────┬────┘
//	                                              Pool: blocks by key, references, least recently used
//
// # The life of a block
//
//	          Reserve, promotion            Commit, LoadEnded good
//	absent ─────────────────────> writing ─────────────────────────> ready <──> pinned
//	   ^                             │ failed                          │ evicted (all or nothing)
//	   │                             v                                 │
//	   └──── LoadStopped ─── quarantine (its writer may still write)   │
//	   └───────────────────────────────────────────────────────────────┘
//
// A block that is not ready is never read, one that is pinned never evicted. A failed load whose
// writer has not stopped leaves its slot in quarantine: it belongs to nobody until LoadStopped.
//
// # Jobs
//
// Every job that the Machine gives out is in its ledger until it has ended, which it does once: a
// second end, or one of an unknown job, is counted (Stats.Strays) and changes nothing.
//
// A Machine belongs to one goroutine, or to whoever holds its owner's lock.
package core
