// Package connector is the boundary between the two halves of a KV connector, and what both share:
// the plain data that crosses it, its msgpack form, the configuration and the errors.
//
//	engine loop                                        one per rank
//	┌─────────────────┐   StepMeta (the same for all)  ┌─────────────────┐
//	│ scheduler.Half  │ ─────────────────────────────> │ worker.Worker   │ ── agent ── peers
//	│ (a ledger)      │ <───────────────────────────── │ (a writer)      │
//	└─────────────────┘   WorkerOutput (of each rank)  └─────────────────┘
//	   │ Outcome
//	   ▼ Received, ReceiveFailed, Released
//
// The halves share nothing. In one process the values are passed as they are; between processes
// AppendStepMeta and its siblings carry them. Lists are cut off at limits that no ledger reaches
// (limits.go). A value is owned by whoever got it last; nobody changes one that was passed on.
//
// Everything here is data and functions of data: no I/O, no clock, no goroutines.
package connector
