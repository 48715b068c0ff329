// Package tier keeps KV blocks in CPU memory and behind it, keyed by the hash of their content: what
// an engine's GPU cache has evicted, and what other engines may fetch instead of computing it.
//
//	engine ── Lookup, Reserve, Commit, Use ──> ┌──────────────┐ ── Load, Store ──> fs (files)
//	                                           │   Manager    │
//	         OnChange <─────────────────────── │ lock ─ core  │ <── Host ───────── p2p (peers)
//	                                           └──────┬───────┘
//	                                            Memory: slots of equal length
//
// The Manager is a lock around the pure Machine of package core. Every call is short: none waits for
// a tier, a disk or a peer. Tiers do their jobs on goroutines of their own and report by Host, from
// any goroutine, whether the engine is in a step or not.
//
// # Locks
//
// A Secondary's methods are called with the Manager's lock held, so that jobs reach it in order. They
// must not block and must not call Host before they return. A Secondary never holds a lock of its own
// while it calls Host, unless no method of the Secondary takes that lock.
//
// A peer's lookup comes in portions (Host.Serve), so that the lock is not held for long.
//
// # Prompts
//
// A block of a prompt is of no use without all before it. A Request with a Prefix gets nothing behind its first
// Miss: nothing is loaded there, and tiers that were asked before the miss was known hear of it (Secondary.Unwanted), so
// that peers keep nothing for it. While an answer before is still awaited, what others have at hand is loaded. A store,
// which takes any block, has no Prefix.
//
// # Bounds
//
// The Manager keeps nothing of its own: requests, jobs and pins are bounded by package core, queues by
// the tiers that have them.
//
// # Memory
//
// The slots belong to the Manager. The engine writes to those of a Reservation until Commit and reads
// those of a Use until EndUse; a tier fills those of a load until it reports LoadEnded with stopped,
// or LoadStopped, and reads those of a store until StoreEnded. Nobody touches others.
//
// # Checksums
//
// Commit takes the CRC32C of each block, and it goes where the block goes: files are written and read with
// it, and peers are told it when a fetch is done (wire.CapP2PSums), so that bytes that were damaged in the
// source's memory, on its disk or on the way are a miss for the reader. Use reads without looking,
// unless Config.VerifyUse says otherwise. Config.InjectFault shows that all of that works.
package tier
