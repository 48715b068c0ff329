// Package core decides which request gets which KV blocks and when it is computed: the block pool
// with its prefix cache, continuous batching with chunked prefill and preemption, and the engine's
// side of hand-offs. It is pure: no clock, I/O, goroutines or logs.
//
//	            Add                          RunStep ────────────> model
//	driver ───> Abort            ┌─────────┐ Emit, Refused ──────> clients
//	            StepDone ──────> │ Machine │ SendMeta ───────────> workers
//	            ConnectorOutput  └──┬───┬──┘
//	            Tick                │   └── Pool: references, free list, contents by hash
//	                                └────── Connector: the SchedulerHalf
//
// # The life of a request
//
//	          External > 0                  Received
//	waiting ───────────────> remote ───────────────────> waiting, with blocks
//	   │                        │ ReceiveFailed             │
//	   │ blocks and a place     └───────────> ended         │ a place
//	   └──────────────> running <───────────────────────────┘
//	         ^            │ │
//	         └────────────┘ └── stop, length, abort, error ──> ended, or held until an Outcome
//	          preempted
//
// Whether a request waits for a peer has no bearing on the step, and the step none on it: blocks for
// KV that comes from a peer are given, and the peer is told, in the very event that brings the
// request or frees the blocks. At most one step is in flight; what it reads and writes has
// references of its own, so that blocks given back meanwhile are reused only after it.
//
// Machine and Pool belong to one goroutine.
package core
