package engine

import (
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Request is one prompt to be continued. Submit copies nothing: the caller must not change the
// slices afterwards.
type Request struct {
	// ID is the internal id, unique among the requests that live in this engine, including those
	// whose blocks are still held for a peer.
	ID     kv.RequestID
	Prompt []kv.Token // at least one, at most MaxContext()-1
	// MaxTokens ends the answer with FinishLength. 0 means as many as the context allows.
	MaxTokens int
	Sampling  model.Sampling
	// StopStrings end the answer with FinishStop; the text ends before the first of them.
	StopStrings []string
	// StopTokens end the answer with FinishStop. They count as completion tokens and add no text.
	StopTokens []kv.Token
	// IgnoreEOS makes the model's own end tokens ordinary ones.
	IgnoreEOS bool
	// CacheSalt separates prefix-cache entries: only requests of equal salt share blocks, and a
	// hand-off pairs only requests of equal salt.
	CacheSalt string
	// Adapter is one of Config.Adapters, with which the model answers; empty for the model itself.
	// Requests share KV, in a cache or by a hand-off, only with those of the same adapter.
	Adapter string
	// Extras are what else the prompt's KV depends on, hashes of images for example, in order. Requests
	// share KV only with those of equal extras. They change no token of the built-in model, which sees
	// text only.
	Extras []string
	// Params is the hand-off of this request; nil for one that is served here alone.
	Params *kv.TransferParams
	// Tier is what the request says to the CPU tier: where else its blocks may be, who will fetch them,
	// and how many are looked for and kept. An engine without one ignores it.
	Tier wire.P2PParams
	// Together is how many requests are submitted at once, this first one included, that are of use only together:
	// it is refused unless the queue has room for all, so that a peer's hand-off is not begun by some of those that
	// share it. That is a look and no reservation: who comes between them may take the room. More than the queue
	// holds need an empty one. 0 is one.
	Together int
}

// Output is what Stream.Next gives: the tokens since the last one. Several tokens arrive in one
// Output if the reader is slower than the engine.
type Output struct {
	Tokens []kv.Token // new tokens, in order; empty for a request that ends without one
	// LogProbs is the natural logarithm of each token's probability under the model itself.
	LogProbs []float64
	Text     string // the text that became certain with them; never half a character or stop string
	// Finish is empty until the last Output of the request, on which everything below is set.
	Finish connector.FinishReason
	// StopString is the stop string that ended the text; empty if none did.
	StopString string
	Usage      Usage
	// Params is what to answer as kv_transfer_params; nil if there is nothing to hand off.
	Params *kv.TransferParams
	// Transfer is what is known about the KV that came from a peer; zero if none did.
	Transfer connector.TransferFacts
	// TierTokens says how many prompt tokens came from which tier: "cpu" for the CPU's memory, or the name
	// of one behind it. Usage.Tier is their sum.
	TierTokens map[string]int
	// LoadErr is why KV did not come from the peer if the prompt was computed here instead
	// (kv.RecomputeOnLoadFailure); nil otherwise.
	LoadErr *connector.Error
	// Err is set if Finish is FinishError or FinishAbort.
	Err *RequestError
}

// Usage counts tokens of one request. Unless the request was preempted or ended with an error, Cached
// + External + Tier + ComputedPrompt equals Prompt, also if its KV did not come and was computed here.
type Usage struct {
	Prompt         int // tokens of the prompt
	Completion     int // tokens sampled, a stop token included
	Cached         int // prompt tokens whose KV was in the own prefix cache
	External       int // prompt tokens whose KV came from a peer and was used
	Recomputed     int // prompt tokens that a peer was to bring and did not, so that they were computed here
	ComputedPrompt int // prompt positions computed here; counts a recomputation again
	Blocks         int // KV blocks of the request at its end
	Preemptions    int // how often it lost its blocks to an older request
	Tier           int // prompt tokens loaded from the CPU tier, unless after a preemption
}
