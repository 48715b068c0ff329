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
//   - if the client leaves while P works, P's leg ends.
//
// # Holds that no D takes
//
// P has answered, keeps the KV for its lease, and no D will ask for it: D refused its leg (400, 429, 503),
// failed or could not be reached before it answered anything, the client left, the engines are no pair. In
// either mode, and for each part of a request for several answers, the router then tells P to let go: POST
// /kv/release with remote_request_id, kvferry_lease and kvferry_release of P's answer. It does so when all
// legs of the attempt are over, behind the client's answer, once, within releaseTimeout, and at most
// maxReleases at a time; kvferry_router_releases_total counts how it ended.
//
// If P's leg was cut, or broke, before its answer was read, P may hold something all the same, or will: its
// answer crosses the cut. P is then told by the leg's key, 128 random bits in X-Kvferry-Release-Key that only
// P was sent: POST /kv/release with {"key": KEY}. It ends the request without a hold in whatever order leg,
// answer and release are handled there. An engine that does not know this, which a stock one does not, says
// so once and is not told again until an answer of it has the key kvferry_release.
//
// An answer that was read and has no kvferry_release is a stock engine's. Of such a P D gets its leg,
// in pull, and that leg is cancelled as soon as D has it: an engine that is told to stop before it has read
// anything lets P go.
//
// For the same reason a leg of P's that nobody waits for, while D has none, is given the time for an answer that
// is on its way (prefillGrace, prefillTail when it has begun). What remains for the lease is a P that cannot be
// reached, a stock P's answer that is slower, and a D that refuses the KV of a stock P.
//
// # Conversations
//
// In pull a D that is bidirectional says in its answer, or in the last chunk of its stream, what it keeps for
// the next turn. The router takes that out of what the client gets. If the request named a conversation
// (conversation_id, which no engine sees), it is remembered, for Config.ConversationTTL and for one
// request: P's leg of the next turn brings it along as D has written it, once. A second attempt goes without,
// as does a P that answers 400. What no turn will follow D is told to let go: an answer of no
// conversation, one that did not reach its client, one that is too old or followed by another (turns.go). It is
// told with the Authorization, and the forwarded headers, of the client whose turn it was, which are remembered with
// the turn. A router that ends tells D's of all that it remembers, when the last leg is over (ending.go).
//
// A conversation is a client's: of one Authorization, model and cache salt. That a prompt really begins with
// the earlier turn is checked by kvferry engines, by digest; stock ones believe what they are told. A stock
// router overrides remote_host; here D's word counts, as P's does (engines are told --advertise-host).
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
