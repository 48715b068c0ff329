// Package openai holds the part of the OpenAI HTTP API that kvferry speaks: request, response and
// stream types of /v1/completions, /v1/chat/completions and /v1/models, the error shape, edits of
// raw JSON bodies, and server-sent events.
//
//	body ── ParseObject ──> Object ──┬─ Set, Delete, Bytes: the client's other bytes survive (router)
//	                                 └─ ParseCompletion, ParseChat: typed and checked      (engine)
//	SSE bytes ── EventReader ──> events        AppendEvent, AppendDone ──> SSE bytes
//
// It has no I/O, no clock and no goroutines; every function is safe for concurrent use on distinct
// values. Nothing here blocks. What a parser allocates is bounded by a small multiple of its input
// and by limits.go.
//
// # Strictness
//
// A body must be one JSON object in valid UTF-8. Known fields must have their type, and their
// values must be in range; an error names the field in `param`. Unknown fields are ignored, as the
// OpenAI servers ignore them, except for those that are known to change the answer and that this
// project does not implement (unsupported.go): these are refused unless they have their neutral
// value, because an answer that silently ignores them would be wrong. A null is the same as an
// absent field. Of a field that occurs twice the last one counts, as in Python's json module.
package openai
