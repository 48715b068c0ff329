// Package shm is the transfer agent for peers on one host. Each side maps the other's memory
// read-only, and whoever owns the destination does the copying: no process ever has a writable
// mapping of another's memory.
//
//	 P process                                     D process
//	┌───────────────┐   unix socket                ┌────────────────┐
//	│ Post(WRITE)   │ ── WRITE, PIECES ──────────> │ reader: checks │
//	│               │    (the doorbell)            │  grant, ranges │
//	│ pool, memfd ──┼── mapped read-only ────────> │ worker: copies │ ─> own memory
//	│ control page ─┼── mapped read-only ────────> │  then looks at │
//	│               │ <──────── DONE ───────────── │  P's word      │ ─> Notification
//	└───────────────┘                              └────────────────┘
//
// # Words
//
// Every agent has a control page of 64-bit words that its peers map read-only. A WRITE has a word in
// the page of its poster, a read grant has one in the page of its giver. The word changes before
// the memory behind it may be reused: when a transfer ends for whatever reason, when a grant is
// revoked. Who copies compares the word before and after the copy, and reports success only if it
// held: so nothing torn or stale counts as done, although nobody waits for anybody.
//
// For a READ the poster asks with READ, the giver checks grant and ranges and answers READABLE with
// the word to watch, and the poster copies.
//
// # Revoke, Stopped
//
// A write under a grant is done by the giver itself, in slices inside the grant's gate: Revoke waits
// for one slice at most and is exact. The result of a WRITE is decided inside the last slice's
// gate, notification included. A WRITE that its poster cancels gives Stopped when the peer has
// answered or its bound of silence has passed. One that ran into that bound, or whose peer was
// removed, gives Stopped at once: a peer that sleeps in the middle of a slice may then finish that
// slice into memory that it has itself granted, and finds the word changed.
//
// # Memory that is not fd-backed
//
// Destinations may lie in borrowed memory. A source in borrowed memory cannot be mapped by the
// peer; such a transfer is copied once more, through memory of its own that is.
//
// # Goroutines
//
// One accepts. Each connection has a reader, which owns what the peer has told (mappings, the
// request being received), and a writer, which encodes. Copying is done by a few workers, which
// serve connections in turn, a bounded amount at a time, and exist only while there is work.
// Agent.mu guards peers and transfers. There are no timers but one per transfer in flight.
package shm
