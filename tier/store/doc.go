// Package store is a node without a model that holds blocks for the engines of a rack: what one has
// computed another gets, also when the first is gone.
//
//	engines ── offers ──────> Front ──> namespace ── intake ── fetch ──> Manager ──> fs (files)
//	        ── lookups ─────>       └─> namespace …           p2p tier ──┘   └── Serve ──> engines
//
// An engine tells its store which blocks it has computed; the store fetches them, in its own time, as a
// consumer of package p2p: by grants for its own memory, whole or not at all. From then on it serves them
// as any peer does. With files, each block that came in is also written, and what memory has lost is
// served from there.
//
// # Namespaces
//
// Blocks are those of one model only: fingerprint, hash seed and block length are the namespace, which
// the first engine that connects makes. Each has memory, files, an agent and a p2p tier of its own, an
// equal share of what the store has. There are at most Config.Namespaces of them: when all are taken,
// one that holds nothing and that no engine has used for a while gives way; else the newcomer is refused, with
// the reason. One that holds blocks, in memory or files, never gives way, however long it was not used: what a
// fleet has left here is not lost to one engine that is set up wrongly, nor to a store that is started with fewer
// places. Who wants it gone deletes its folder.
//
//	<folder>/<16 hex of the facts>/namespace.json     what they are
//	<folder>/<16 hex of the facts>/<…>                package fs
//
// # Who owns what
//
// A namespace's collector goroutine makes the fetches. The Front's goroutine routes; it waits for
// nobody: opening and closing a namespace, which may read a large folder, have a goroutine each. The
// table of namespaces is guarded by a mutex that is never held across I/O.
package store
