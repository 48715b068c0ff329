package engine

import (
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// Stats is a snapshot. Gauges are of this moment, totals since New.
type Stats struct {
	BlocksFree   int // blocks that no request, transfer or step uses; cached ones included
	BlocksTotal  int
	BlocksCached int // free or used blocks that the prefix cache can give out

	Running       int // in the batch
	Waiting       int // queued, preempted or ready for the batch
	WaitingRemote int // their KV is on its way from a peer
	Held          int // ended, but their blocks are kept for a peer

	PrefixQueries uint64 // prompt tokens looked up in the prefix cache
	PrefixHits    uint64 // prompt tokens found there
	Preemptions   uint64

	Steps            uint64 // model steps
	PromptTokens     uint64 // prompt tokens of admitted requests
	ComputedPrompt   uint64 // prompt positions computed here
	ExternalTokens   uint64 // prompt tokens received from peers
	CompletionTokens uint64
	Finished         map[connector.FinishReason]uint64
	Refused          map[ErrorKind]uint64 // requests that Submit refused

	Wakeups uint64 // how often the loop woke; it does for a reason only

	Received      uint64 // requests whose KV came from a peer
	ReceiveFailed uint64 // requests whose KV did not come
	Recomputed    uint64 // those of them whose prompt was computed here instead
	Unparked      uint64 // those of them that were given up because others needed their blocks
	CacheResets   uint64 // of the prefix cache

	TurnsKept      uint64 // ended requests whose blocks were kept for a next turn
	TurnsReclaimed uint64 // those of them that made way for others

	TierLooking  int    // requests that wait for the CPU tier's answer
	TierLoading  int    // requests that wait for a copy out of it
	TierCopies   int    // copies from and to it
	TierQueries  uint64 // prompt tokens that it was asked for
	TierTokens   uint64 // tokens that it brought
	TierShort    uint64 // tokens that it was said to have and did not bring
	TierStored   uint64 // tokens that it was given
	TierTimeouts uint64 // answers that did not come in time

	Peers int // connected peer engines
}

// Coordinates is what a router must know to pair this engine with another.
type Coordinates struct {
	EngineID     kv.EngineID     `json:"engine_id"`
	Host         string          `json:"host"` // of the side channel
	Port         int             `json:"port"`
	TPSize       int             `json:"tp_size"`
	PPSize       int             `json:"pp_size"`
	TransferMode kv.TransferMode `json:"transfer_mode"`
	BlockSize    int             `json:"block_size"`
	Model        string          `json:"model"`
	Role         connector.Role  `json:"role"`
	// P2PAddress is the "host:port" at which peers ask for blocks of the CPU tier; "": they cannot.
	P2PAddress string `json:"p2p_address,omitempty"`
}

// ModelInfo describes the model that is served.
type ModelInfo struct {
	Name       string
	Adapters   []string // other names, by which requests ask for the model with an adapter
	MaxContext int      // tokens of prompt and answer together that this engine can hold
	Vocab      int
	EOS        []kv.Token
}
