// Package fs is a tier of files: blocks that survive the engine, bounded by size.
//
//	Store ──> queue ──> worker: tmp file, fsync, rename, fsync of the folder ──> index
//	Load  ──> queue ──> worker: read into the slot, check lengths, key, sums ──> LoadEnded
//	Probe ──> index (in memory, least recently used)
//
//	<root>/<16 hex of the facts>/<first 2 hex of the key>/<hex of the key>.kvb
//	<root>/<16 hex of the facts>/tmp/<number>.tmp
//	<root>/<16 hex of the facts>/lock
//
// # What is in a file
//
// A header (magic, version, the SHA-256 of the model facts, key, length, CRC32C of the payload, CRC32C
// of the header) and the block. What does not fit in every field is never loaded: the file is removed,
// the block becomes a miss, and Dropped says so.
//
// # Crashes
//
// A file has its final name only when all of it is on the disk. At Start the folder is read: unfinished
// files, and those whose header or length is wrong, are removed and reported (Recovery). Payloads are
// checked when they are loaded, not at Start. Files that do not look like ours are left alone and
// reported. One process at a time holds the lock.
//
// # Who owns what
//
// The index is guarded by a mutex that is never held across I/O or a call to the Host. Workers
// (Config.Workers) do all I/O; loads go before stores. Both queues are bounded: what does not fit fails
// at once, which costs a recomputation or a block that is not kept.
package fs
