package kv

// TransferMode says who moves the bytes.
type TransferMode string

const (
	// Push: P writes into D's memory.
	Push TransferMode = "push"
	// Pull: D reads from P's memory.
	Pull TransferMode = "pull"
)

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
}
