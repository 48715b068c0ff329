// Package proxy is the router in front of prefill and decode engines: one OpenAI endpoint for
// clients, two pools of engines behind it, and hand-offs between them.
//
//	push                                          pull
//	client ──> Router ──┬── leg ──> P             client ──> Router ──── leg ──> P
//	   ▲                └── leg ──> D                ▲           ▲──── its params ◄┘
//	   └──── D's answer ◄───────────┘                │           └── leg with them ──> D
//	                                                 └──────────────── D's answer ◄────┘
//
// Both legs of an attempt have one X-Request-Id and one transfer id made for it. The client gets D's
// answer; the first leg that fails ends the other and is what the client is told. What to do when is
// decided by package core; this package does it.
//
// # Modes
//
// Every engine is asked once for its transfer mode (GET /kv/coordinates); a stock one's is configured
// (Target.Peer). P's leg is the same in both modes and is sent before the mode is known. Two engines of
// different modes are refused. In pull:
//
//   - P's parameters go to D to the byte, so that keys that this router does not know reach D;
//   - parameters that no decode engine could use are P's failure and are never sent on;
//   - if P has kept nothing, D computes the prompt, and X-Kvferry-Route says so;
//   - if the client leaves while P works, P's leg ends; if it leaves when P has answered, D gets its leg and
//     that leg is cancelled as soon as D has it. An engine that is told to stop before it has read
//     anything lets P go, which P would otherwise do when its lease ends. The router cannot tell P itself:
//     P knows its blocks by D's messages only.
//
// What remains is an answer of P's that is on the network when P's leg ends, and a D that cannot be
// reached: both are for the lease.
//
// # Several answers
//
// A request for several answers is split into one per answer (n, several prompts), each a pair of legs
// of its own, at most maxPairs at a time, and the answers are merged as one engine would give them. The
// first that fails ends all.
//
// # Goroutines
//
// A client request has the goroutine of its HTTP handler, which owns the core.Machine and alone
// writes to the client, and one goroutine per leg. The handler returns when both legs have ended. Of a
// request for several answers each part has a goroutine that owns its machine; the handler merges.
// Nothing runs while there is no request: health is asked when somebody asks for it.
//
// # Streams
//
// D's server-sent events are forwarded as they arrive, one whole event at a time, so that an error
// can follow at any point without breaking into one. The status is sent with the first event. An
// answer that is not streamed is read whole before its status is sent: a cut answer is an error and
// never a short success.
//
// # Timeouts
//
// Connecting takes at most Config.ConnectTimeout. A leg may be silent for Config.FirstByteTimeout
// before its answer begins; D's time begins when P is done. A stream may pause for
// Config.IdleTimeout. A client that takes no bytes for clientWriteTimeout is taken for gone.
// Nothing bounds the length of a stream.
package proxy
