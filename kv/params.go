package kv

// TransferMode says who moves the bytes.
type TransferMode string

const (
	// Push: P writes into D's memory.
	Push TransferMode = "push"
	// Pull: D reads from P's memory.
	Pull TransferMode = "pull"
)

// Valid tells whether m is one of the modes.
func (m TransferMode) Valid() bool { return m == Push || m == Pull }

// LoadFailurePolicy says what becomes of a request whose KV does not come from its peer.
type LoadFailurePolicy string

const (
	// FailOnLoadFailure ends the request with an error that names the phase.
	FailOnLoadFailure LoadFailurePolicy = "fail"
	// RecomputeOnLoadFailure computes the prompt here, as if no peer had been named.
	RecomputeOnLoadFailure LoadFailurePolicy = "recompute"
)

// Valid tells whether p is one of the policies.
func (p LoadFailurePolicy) Valid() bool { return p == FailOnLoadFailure || p == RecomputeOnLoadFailure }

// TransferParams is the hand-off object `kv_transfer_params` of one request: what a router tells
// an engine, and what an engine answers (nixl-connector.md, section 8.1). Package wire reads and
// writes its JSON form and checks which fields a leg must have.
type TransferParams struct {
	DoRemoteDecode  bool // "you are P; keep the KV"
	DoRemotePrefill bool // "the KV comes from a remote P"

	RemoteEngineID  EngineID
	RemoteRequestID RequestID
	RemoteHost      string
	RemotePort      int
	RemoteBlockIDs  BlockIDs // the peer's logical blocks; nil when not told
	TPSize          int      // the peer's; 0 when not told
	DCPSize         int      // 1 when not told
	PPSize          int      // 1 when not told

	RemoteNumTokens    int      // computed tokens behind the blocks; 0 when none
	RemoteBlocksExpiry *float64 // seconds on D's clock (bidirectional pull); nil when not told
	Mode               TransferMode
	CachedTokens       *int // P's own cached prompt tokens
	PromptTokens       []Token
	TransferID         TransferID
	Lease              Generation        // of the hold of RemoteBlockIDs; 0 when not told
	Release            string            // whoever shows it to P's HTTP server may let that hold go; "" when P has no such way
	LoadFailurePolicy  LoadFailurePolicy // "" when not told: the engine's own

	// Readers is how many requests of the decode engine take the same KV: the answers of one request
	// with n > 1. 0 means 1. It is no key of the JSON form; the engine that splits a request sets it.
	Readers int
}
