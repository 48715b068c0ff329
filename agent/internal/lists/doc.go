// Package lists keeps prepared descriptor lists. A list is checked once and stored compactly, so
// that a transfer is two arrays of indices into it, and checking a transfer costs one array access
// per index.
//
//	Build(owner, descriptors, registered memory) ─> List ─ Table.Insert ─> ListID
//
// A List never changes once built, and any goroutine may read it. A Table may be used from any
// goroutine; nothing here blocks.
package lists
