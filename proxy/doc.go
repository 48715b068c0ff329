// Package proxy is the router in front of prefill and decode engines: one OpenAI endpoint for
// clients, two pools of engines behind it, and push hand-offs between them.
//
//	client ──> Router ──┬── leg ──> P   (one token, keeps the KV)
//	   ▲                └── leg ──> D   (P's coordinates, the client's own request)
//	   └──── D's answer ◄───────────┘
//
// Both legs of a request are sent at once, with one X-Request-Id and one transfer id made for the
// attempt. The client gets D's answer; the first leg that fails ends the other and is what the client
// is told. What to do when is decided by package core; this package does it.
//
// # Goroutines
//
// A client request has the goroutine of its HTTP handler, which owns the core.Machine and alone
// writes to the client, and one goroutine per leg. The handler returns when both legs have ended.
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
