// Package engine is a small real LLM engine around the KV connector, so that the KV that moves is
// real and every claim can be tried on a laptop.
//
//	 HTTP layer                 loop goroutine                        model goroutine
//	┌──────────┐  Submit   ┌──────────────────────────┐   batch    ┌──────────────────┐
//	│ Request  │ ────────> │ core.Machine             │ ─────────> │ model.Forward    │
//	│ Stream   │ <──────── │   block pool, scheduler  │ <───────── │ sampling         │
//	└──────────┘  Output   │ scheduler half           │   tokens   └──────────────────┘
//	                       │ text, stop strings       │
//	                       └───┬──────────────────▲───┘
//	                  StepMeta │                  │ WorkerOutput
//	                       ┌───▼──────────────────┴───┐     agent      ┌───────────┐
//	                       │ worker (one rank)        │ <════════════> │ peers     │
//	                       └──────────────────────────┘  side channel  └───────────┘
//
// # Who owns what
//
// The loop goroutine owns the machine (package core), the SchedulerHalf and the text of every
// request. It never blocks: not on the model, not on a worker, not on a reader. The model goroutine
// runs one step at a time and owns the scratch memory of the model; the loop knows which blocks it
// may touch and reuses none of them before it is done. A Stream is a small buffer with a lock,
// written by the loop and read by one goroutine.
//
// Nothing polls: an engine without requests wakes for nothing, and a timer exists only while the
// machine has a deadline.
//
// # KV that comes from a peer
//
// A request that hands over its prefill is given blocks at once, whatever the model is doing, and
// registered with the peer; it joins the batch when every byte has arrived and computes the last
// prompt token only. Its blocks are given back, after an abort or a failure, only when the worker
// says that nobody writes them any more.
//
// If the KV does not come, the request ends with an error that names the phase, or is computed here
// (Config.LoadFailurePolicy, and kv_load_failure_policy of a request). Either way nothing of the
// failed load is in the prefix cache.
//
// # Next turns
//
// A decode engine that is Bidirectional keeps what an ended request has, for Config.DecoderBlocksTTL at most:
// until a prefill engine has read it, somebody releases it, another request needs the blocks, the
// prefix cache is reset or the engine ends. A prefill engine whose request names such blocks reads them as a
// decode engine reads its; if they do not come, it computes, whatever the policy.
//
// # The CPU tier
//
// With Config.Tier, blocks that are full are copied into CPU memory as they are computed, and kept there
// when the KV cache gives them away. A prompt's tail beyond the prefix hit is looked for there, and in
// the files and peers behind it; what is found is copied back, and only the rest is computed.
//
//	loop ── commands ──> tier goroutine ── Lookup, Use, Reserve ──> tier.Manager <── files, peers
//	  ^                        │ copies                                   │ OnChange
//	  └────── events ──────────┴─────> copier ── EndUse, Commit ──────────┘
//
// The loop and the tier exchange mailboxes: neither waits for the other, and a step waits for neither.
// A request that waits for the tier's answer has no blocks and no place in the batch; others go on. A
// copy has references of its own on its KV blocks, and pins on the tier's, until it has ended. A miss, a
// failed load, a damaged block or an answer that does not come within TierConfig.Timeout is computed.
//
// Blocks of the tier are all layers of a KV block, one after the other. Their key is the hash of the prefix
// cache, salt and adapter included, so that whoever may not share a block does not find it.
//
// # Threads
//
// A process whose goroutines compute on every P answers its peers about every 10 ms only. Config.Dedicated
// keeps the computing to threads of their own, of a lower priority (Config.Nice), so that a process with
// more Ps than those answers at once; see docs/benchmarks.md.
//
// # Closing
//
// Close refuses new requests, finishes what it has taken, hands over what it has promised to peers and
// lets the tiers keep what they were given; when its context ends it aborts requests, revokes grants and drops holds.
package engine
