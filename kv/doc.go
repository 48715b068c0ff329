// Package kv holds the ids and plain values that every other package of kvferry speaks in.
//
// It has no state, no I/O, no clock and no goroutines, and imports nothing of this module. What
// crosses a wire is encoded by package wire; what happened is told by package event.
//
//	EngineID ─┬─ Rank (PP, TP) ── one agent, one set of Regions
//	          └─ RequestID ── BlockIDs (per group, logical) ──ratio──> KernelBlockID
//
// # Ids are types
//
// A logical block (BlockID) is the scheduler's unit; a kernel block (KernelBlockID) is what a
// region addresses. They are different types, and Expand is the only way from one to the other,
// so that a list of one kind cannot be used as the other by accident.
package kv
