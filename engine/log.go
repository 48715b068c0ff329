package engine

// LogFinished is the message of the one log line that every admitted request ends with. The
// constants are its attributes; durations are milliseconds as floating point numbers. The fields
// of a transfer are absent unless KV came from a peer, LogError unless the request failed.
const (
	LogFinished = "request finished"

	LogID             = "id"
	LogPromptTokens   = "prompt_tokens"
	LogCached         = "cached_tokens"          // from the own prefix cache
	LogExternal       = "external_tokens"        // from a peer
	LogComputedPrompt = "computed_prompt_tokens" // computed here
	LogCompletion     = "completion_tokens"
	LogFinish         = "finish" // a connector.FinishReason
	LogError          = "error"
	LogPreemptions    = "preemptions" // absent if 0

	LogBlocks       = "blocks" // received
	LogBytes        = "bytes"
	LogTransferMS   = "transfer_ms" // first byte to last
	LogGBps         = "gbps"        // bytes / transfer time, in 1e9 bytes per second; absent if unknown
	LogWaitMS       = "wait_ms"     // registration to completion
	LogTransport    = "transport"
	LogWhy          = "why" // why that transport
	LogRemoteEngine = "remote_engine"
)
