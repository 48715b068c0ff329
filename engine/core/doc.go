// Package core decides which request gets which KV blocks and when it is computed: the block pool
// with its prefix cache, continuous batching with chunked prefill and preemption, and the engine's
// side of hand-offs. It is pure: no clock, I/O, goroutines or logs.
//
//	            Add                          RunStep ────────────> model
//	driver ───> Abort            ┌─────────┐ Emit, Refused ──────> clients
//	            StepDone ──────> │ Machine │ SendMeta ───────────> workers
//	            ConnectorOutput  │         │ Tier… ───────────────> tier
//	            Tier…            └──┬───┬──┘
//	            ResetCache, Tick    │   └── Pool: references, free list, contents by hash
//	                                └────── Connector: the SchedulerHalf
//
// # The life of a request
//
//	          External > 0                  Received
//	waiting ───────────────> remote ───────────────────> waiting, with blocks
//	   │                        │ ReceiveFailed             │
//	   │ blocks and a place     ├───────────> ended (fail)  │ a place
//	   │                        └───────────> waiting, without blocks (recompute)
//	   └──────────────> running <───────────────────────────┘
//	         ^            │ │
//	         └────────────┘ └── stop, length, abort, error ──> ended, or held until an Outcome
//	          preempted
//
// With a tier, a request that waits first waits for the tier's answer, without blocks and at most for
// Config.TierTimeout; and what the tier has is loaded before it runs:
//
//	          TierLook                TierFound 0, or too late
//	waiting ───────────> waiting ────────────────────────────────> waiting
//	                        │ TierFound n, blocks       TierLoaded    ^ with blocks: n or fewer are computed
//	                        └──────────────> loading ─────────────────┘
//
// A load and a store have references of their own on their blocks until TierLoaded and TierStored,
// whatever becomes of the request.
//
// Whether a request waits for a peer has no bearing on the step, and the step none on it: blocks for
// KV that comes from a peer are given, and the peer is told, in the very event that brings the
// request or frees the blocks. At most one step is in flight; what it reads and writes has
// references of its own, so that blocks given back meanwhile are reused only after it.
//
// # The tier
//
// Each block that is full of computed or received tokens is given to the tier once (TierStore), in the
// event that fills it. A request looks when it arrives, and when it has lost its blocks. What the tier
// said to have may be gone when it is loaded: the machine goes on with what was brought.
//
// # What ends a wait for blocks
//
// Requests get blocks by arrival, so that a wait ends when those before it end: running ones by their
// limits, receives by an Outcome, holds by an Outcome. If nothing runs and all blocks that are needed
// belong to receives, these are given up after Config.ParkTimeout without any news, the latest
// first: two engines that hold blocks for each other's requests would else wait for ever although
// both live.
//
// # Next turns
//
// Blocks that a connector keeps for the next turn of a conversation are held, but for nobody who waits: while
// fewer than an eighth of all blocks are free, or a request starves, the oldest are released (turn.go), and
// all of them when a cache reset waits or the engine drains.
//
// # Cache resets
//
// A reset makes all contents unknown, now and for what live requests compute behind older KV. It is
// refused, or waits, while blocks are held for peers or written by them.
//
// Machine and Pool belong to one goroutine.
package core
