// Package api is an engine's HTTP server: the OpenAI endpoints, health, metrics, and what a router
// asks for.
//
//	POST /v1/completions, /v1/chat/completions ──> openai.Parse… ──> Engine.Submit, once per answer
//	     client <── JSON, or server-sent events <── Stream.Next ──┘
//	GET  /v1/models       the model and its context
//	GET  /health          the process lives
//	GET  /ready           requests are served and the side channel listens
//	GET  /metrics         Prometheus
//	GET  /kv/coordinates  engine id, side channel and sizes, for routers (engine.Coordinates)
//	POST /kv/release      let go what a prefill answer holds, for routers whose D does not come
//	POST /kv/reset-prefix-cache?wait=SECONDS
//	                      forget all KV of finished requests; 409 while peers read or write blocks
//
// # Requests
//
// The header X-Request-Id names a request; without it the server makes 16 hexadecimal digits R. A
// completion's internal id is `cmpl-R-<prompt index>-<8 hex>`, a chat's `chatcmpl-R-<8 hex>`, and the
// k-th of n answers has `<k>_` before it: vLLM's rule, by which the two engines of a hand-off know
// each other's requests (nixl-connector.md, section 14). Config.NoRequestIDSuffix leaves the random
// hex digits away, as VLLM_DISABLE_REQUEST_ID_RANDOMIZATION does.
//
// Several prompts and n become requests of their own. Their kv_transfer_params are without the
// transfer id then, which names one request only; peers find each other by the ids.
//
// An answer with kv_transfer_params carries those of its first request, and only if it is not
// streamed. The exception is what a decode engine keeps for the next turn (bidirectional pull): the last
// chunk of a stream says that, too. With "return_token_ids" the answer has the token ids beside the text.
//
// `usage.prompt_tokens_details.cached_tokens` counts prompt tokens that were not computed for the
// request: from the prefix cache, the CPU tier and a peer, or what the router says that P had cached.
//
// A stream's status is sent with its first token, so that a request that fails before gets a status
// of its own. A later failure is an event {"error": …}, and [DONE] does not follow.
//
// # Holds that nobody will ask for
//
// A prefill leg ends with its blocks held for a D until its lease ends. Where it is certain that no D
// comes, they are let go at once:
//
//   - an answer that the client did not wait for, or that could not be written to it, holds nothing,
//     whatever else it has computed: the client left before, meanwhile or at the end, or got an error;
//   - a router whose D refuses asks for it: POST /kv/release with
//     {"request_id": R, "lease": L, "token": T}, which are remote_request_id, kvferry_lease and
//     kvferry_release of the answer's kv_transfer_params. {"released": true} says that there was such a
//     hold and that it ends; false, that it was over or never was. A request that runs is not affected;
//   - a router that has cut a leg and does not know what was answered asks for it by the key that it has sent
//     with the leg, 128 random bits in the header X-Kvferry-Release-Key: {"key": K}. If the request with
//     that key runs, it ends without a hold, also if its answer is being written; if its holds are there, they
//     are let go; if it has not arrived, it will end at once (earlyRelease). So no order of cut, answer and
//     release leaves a hold. "released" is true in the first two cases.
//
// The token is a hash of id and lease under a secret of this process: whoever was given the answer has
// it, and nobody can guess one. A wrong one gets 403, whether or not there is such a hold. That the key is
// there says that the engine has this endpoint; a stock engine has neither. A release key is as unguessable, and
// a release of one that no request has is remembered in a table of its own, so that a flood of them puts out
// no hold.
//
// # Chats
//
// The tokenizer has no role tokens, so a fixed plain-text template stands in for one, [model.ChatPrompt]. Stock
// engines find it in a checkpoint that this project wrote; the one of a checkpoint of others is not read.
//
// # Goroutines
//
// A request has its HTTP handler's goroutine, which alone writes to the client, and one per answer,
// which reads a Stream. They end with the handler. When the client goes, the requests are aborted.
package api
