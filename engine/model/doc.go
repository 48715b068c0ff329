// Package model is the transformer of the reference engine: a Llama-style decoder (RMSNorm, rotary
// positions, grouped-query attention, SwiGLU) in float32 that computes on a paged KV cache, with
// its tokenizer, sampling, checkpoint files and a built-in model, kvferry-tiny.
//
// Its purpose is KV that is real: tokens that come out right only if every block of the cache holds
// what it should. It is not built to be fast on large models.
//
//	text ──Tokenizer──> tokens ──┐
//	                             v
//	           Runner.Forward(Cache, []Sequence) ──> Logits ──Sampler──> token ──Decoder──> text
//	                 │      ^
//	              K, V of   │ K, V of all
//	           new tokens   │ positions before
//	                 v      │
//	        memory of others: [layer][block][head][token][K | V]   <── transfers write blocks here
//
// # Owners
//
// A Model, its Weights and its Tokenizer are immutable and shared. A Runner, a Sampler, a Decoder
// and a Logits belong to one goroutine each. Cache memory belongs to whoever made it; the Cache is
// a view. Nothing here keeps a goroutine: Forward forks and joins within a call. Nothing here
// waits, logs or reads a clock. Only Load and Save touch files.
//
// # Stock engines
//
// TestStockEngineGivesTheSame holds recorded tokens, log-probabilities and texts of vLLM 0.32.0 against this
// package, from checkpoints of both makes. test/interop/checkpoint.sh runs a live one and records them.
//
// # The same bits
//
// A request's result never depends on its company. Each number is computed by one fixed sequence of
// roundings, whatever the batch, chunking, layout, block size or number of threads (see dot.go). No
// multiplication is fused with an addition and no function of package math is used whose result
// differs between machines (see portable.go), so amd64 and arm64 agree as well.
package model
