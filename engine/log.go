package engine

import (
	"context"
	"log/slog"
	"time"

	"github.com/kvferry/kvferry/connector"
)

// LogFinished is the message of the one log line that every admitted request ends with. The
// constants are its attributes; durations are milliseconds as floating point numbers. The fields
// of a transfer are absent unless KV came from a peer, LogError unless the request failed, those of a
// recomputation unless KV did not come and the prompt was computed here instead.
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

	LogTier     = "tier_tokens" // from the CPU tier; absent if 0
	LogTierFrom = "tier"        // from which tiers, as "cpu=32,p2p=64": tokens

	LogRecomputed      = "recomputed_tokens" // that a peer was to bring
	LogRecomputedAfter = "recomputed_after"  // the connector.Phase in which it failed
	LogRecomputedWhy   = "recomputed_why"    // the reason

	LogBlocks       = "blocks" // received
	LogBytes        = "bytes"
	LogTransferMS   = "transfer_ms" // first byte to last
	LogGBps         = "gb_per_s"    // bytes / transfer time, in 1e9 bytes per second; absent if unknown
	LogWaitMS       = "wait_ms"     // registration to completion
	LogTransport    = "transport"
	LogWhy          = "why"           // why that transport
	LogRemoteEngine = "remote_engine" // the peer named by a request for remote KV
)

func logFinished(log *slog.Logger, l *live, o *Output) {
	attrs := []slog.Attr{
		slog.String(LogID, string(l.ID)),
		slog.Int(LogPromptTokens, o.Usage.Prompt),
		slog.Int(LogCached, o.Usage.Cached),
		slog.Int(LogExternal, o.Usage.External),
		slog.Int(LogComputedPrompt, o.Usage.ComputedPrompt),
		slog.Int(LogCompletion, o.Usage.Completion),
		slog.String(LogFinish, string(o.Finish)),
	}
	if o.Usage.Preemptions > 0 {
		attrs = append(attrs, slog.Int(LogPreemptions, o.Usage.Preemptions))
	}
	if o.Usage.Tier > 0 {
		attrs = append(attrs, slog.Int(LogTier, o.Usage.Tier), slog.String(LogTierFrom, tierText(o.TierTokens)))
	}
	if e := o.LoadErr; e != nil {
		attrs = append(attrs,
			slog.Int(LogRecomputed, o.Usage.Recomputed),
			slog.String(LogRecomputedAfter, string(e.Phase)),
			slog.String(LogRecomputedWhy, e.Reason),
		)
	}
	if l.Params != nil && l.Params.DoRemotePrefill {
		attrs = append(attrs, slog.String(LogRemoteEngine, string(l.Params.RemoteEngineID)))
	}
	if t := o.Transfer; t != (connector.TransferFacts{}) {
		attrs = append(attrs,
			slog.Int(LogBlocks, t.Blocks),
			slog.Int64(LogBytes, t.Bytes),
			slog.Float64(LogTransferMS, ms(t.Took)),
			slog.Float64(LogWaitMS, ms(t.Waited)),
			slog.String(LogTransport, t.Transport),
			slog.String(LogWhy, t.Why),
		)
		if t.Took > 0 && t.Bytes > 0 {
			attrs = append(attrs, slog.Float64(LogGBps, float64(t.Bytes)/float64(t.Took.Nanoseconds())))
		}
	}
	level := slog.LevelInfo
	if o.LoadErr != nil {
		level = slog.LevelWarn
	}
	if o.Err != nil {
		attrs = append(attrs, slog.String(LogError, o.Err.Error()))
		if o.Err.Kind != KindAborted {
			level = slog.LevelWarn
		}
	}
	log.LogAttrs(context.Background(), level, LogFinished, attrs...)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
