package connector

import (
	"time"

	"github.com/kvferry/kvferry/kv"
)

// Role says which halves of a hand-off an engine takes part in.
type Role string

const (
	Producer Role = "prefill" // P: computes and sends
	Consumer Role = "decode"  // D: receives and goes on
	Both     Role = "both"
)

// Digest is a hash of everything that a prompt's KV depends on: its tokens, cache salt, adapter and extra keys. Two
// requests of equal digest have equal KV; it guards a hand-off against pairing the wrong requests.
type Digest [32]byte

// Request is what the engine tells the SchedulerHalf about one request.
type Request struct {
	ID           kv.RequestID
	Params       kv.TransferParams
	PromptTokens int
	// Digest is of the prompt; of a decode leg whose parameters tell of fewer remote tokens, of so
	// many.
	Digest Digest
	// Earlier is of the first EarlierTokens tokens of the prompt of a prefill leg that names what a
	// decode engine kept of an earlier turn; else zero.
	Earlier Digest
}

// EarlierTokens is how many tokens of a prompt a prefill leg may take from what a decode engine kept of an
// earlier turn: as many as that has and the prompt shares, cut to whole blocks if the prompt is
// shorter, since a decode engine knows the digest of what it keeps by block.
func EarlierTokens(p *kv.TransferParams, prompt, blockSize int) int {
	switch n := p.RemoteNumTokens; {
	case !p.DoRemoteDecode || p.RemoteBlockIDs.Len() == 0:
		return 0
	case n <= prompt:
		return n
	}
	return prompt / blockSize * blockSize
}

// FinishReason is how a request left the engine.
type FinishReason string

const (
	FinishLength FinishReason = "length"
	FinishStop   FinishReason = "stop"
	FinishAbort  FinishReason = "abort"
	FinishError  FinishReason = "error"
)

// OutcomeKind says what the engine must do with a request that the workers are done with.
type OutcomeKind uint8

const (
	// Received: every rank has the whole KV; the request may run.
	Received OutcomeKind = iota
	// ReceiveFailed: the KV will not come and nobody writes its blocks any more.
	ReceiveFailed
	// Released: held blocks of a finished or aborted request may be freed.
	Released
)

// Outcome is one request's result, given to the engine once all ranks have reported.
type Outcome struct {
	ID   kv.RequestID
	Kind OutcomeKind
	Err  *Error // set for ReceiveFailed, and for Released when the blocks were not delivered
	// Receive facts for the access line; zero unless Kind is Received.
	Transfer TransferFacts
}

// TransferFacts is what is known about a finished receive.
type TransferFacts struct {
	Blocks    int
	Bytes     int64
	Took      time.Duration // first byte to last, slowest rank; 0 when the backend cannot tell
	Waited    time.Duration // registration or claim sent to completion
	Transport string
	Why       string
}

// StepMeta is what SchedulerHalf wants the workers to do. It is plain data that survives msgpack,
// the same for every rank. It need not wait for an engine step: the driver delivers it as soon as
// it is not empty, and before the answers of requests that finished with it. A worker takes the lists in the order of the fields, each front to back.
type StepMeta struct {
	// Registrations: D sends these to P, in order.
	Registrations []Registration
	// Reads: D reads these from P, in order.
	Reads []Read
	// Dropped: P will not deliver these (aborted, failed, no blocks). Whoever registered for one,
	// or registers later, is told so.
	Dropped []DroppedRequest
	// Queued: P has these requests and will finish or drop each.
	Queued []QueuedRequest
	// Processing: P has begun to compute these.
	Processing []kv.RequestID
	// Finished: P's blocks are complete; the lease starts now.
	Finished []FinishedBlocks
	// Released: P's holds that nobody will ask for; each ends when nothing reads its blocks any more.
	Released []Release
	// Cancels: D does not want these any more; revoke, then report as failed.
	Cancels []kv.RequestID
	// Withdrawn: D will never register or read these; P's ranks are told, so that they need not wait.
	Withdrawn []Withdrawal
	// Heartbeats: who waits for whom. A replacement of the whole set: what is not named stops.
	Heartbeats    []HeartbeatGroup
	HasHeartbeats bool
}

// Registration is D's wish to be written to, before ranks add their grants.
type Registration struct {
	ID         kv.RequestID // D's id
	TransferID kv.TransferID
	Blocks     kv.BlockIDs // D's logical blocks that it lacks, per group
	StartToken int         // absolute position of the first token of the first block, per group 0
	NumTokens  int         // prompt tokens: P's list is clipped to these
	Digest     Digest
	Peer       PeerAddr
	Lease      kv.Generation // of P's hold, when the request's parameters tell it; else 0
}

// Read is D's wish to read what P keeps (pull). Its ID is D's; NumTokens and Digest are of the tokens
// whose KV P keeps for it: the prompt, or the beginning of it.
type Read struct {
	Registration
	Remote       kv.RequestID // P's id of the request
	RemoteBlocks kv.BlockIDs  // P's logical blocks, per group
	Readers      int          // requests of D that read the same; at least 1
	// Earlier: it is P that reads, from what D kept of an earlier turn (bidirectional pull); the fields
	// above mean the same with P and D exchanged.
	Earlier bool
	// Expiry, if known, is when D gives the blocks back, on the clock of D's side channel, in seconds.
	Expiry *float64
}

// PeerAddr is a peer engine's coordinates as a request names them.
type PeerAddr struct {
	Engine kv.EngineID
	Host   string
	Port   int
	TP     int
	PP     int
}

// FinishedBlocks is what P has computed for one request and keeps under a lease.
type FinishedBlocks struct {
	ID         kv.RequestID // P's id
	TransferID kv.TransferID
	Blocks     kv.BlockIDs   // P's logical blocks from token 0, per group
	NumTokens  int           // prompt tokens whose KV is in Blocks
	Lease      time.Duration // remaining, not a clock reading: delivery can only lengthen it
	Digest     Digest
	Generation kv.Generation // of the lease: later ones are greater, also after a restart
	// Earlier: D keeps these for the next turn of a conversation. No sign of life makes their lease longer.
	Earlier bool
	// Prefixes are the digests of the first block's tokens, of the first two blocks' and so on, so that a
	// prompt that shares only so many can have them. Empty unless Earlier.
	Prefixes []Digest
}

// Release names a hold of P's that is not wanted any more. A hold of another generation is another one.
type Release struct {
	ID    kv.RequestID // P's id
	Lease kv.Generation
}

// QueuedRequest is a request of P whose KV somebody will ask for.
type QueuedRequest struct {
	ID         kv.RequestID // P's id
	TransferID kv.TransferID
	Digest     Digest
}

// Withdrawal is a request of D that ended, or needs nothing, before any rank knew of it.
type Withdrawal struct {
	ID         kv.RequestID // D's id
	TransferID kv.TransferID
	Remote     kv.RequestID // by which the router names P's request
	Digest     Digest
	Peer       PeerAddr
	Readers    int // requests of D that were to have the same KV; at least 1
	Reason     string
}

// DroppedRequest is a request of P that ends without KV for anybody. It carries what a
// registration can name it by.
type DroppedRequest struct {
	ID         kv.RequestID // P's id
	TransferID kv.TransferID
	Reason     string // for D's error message
}

// HeartbeatGroup is the requests that wait for one peer engine.
type HeartbeatGroup struct {
	Peer PeerAddr
	IDs  []kv.RequestID // ids as the peer may know them
}

// WorkerOutput is what one rank reports. Each id appears once in Sent or Recv over a request's life.
type WorkerOutput struct {
	Rank kv.Rank
	Sent []SentReport    // P: blocks may be freed as far as this rank is concerned
	Recv []ReceiveReport // D: arrived whole or failed, and stopped either way
	// Progress: D's requests whose prefill engine has shown that it works on them. They may come
	// any number of times.
	Progress []kv.RequestID
}

// SentReport ends P's hold of one request on one rank.
type SentReport struct {
	ID  kv.RequestID
	Err *Error // nil when delivered; lease over, write failed, … otherwise
}

// ReceiveReport ends D's receive of one request on one rank: nobody writes its blocks any more.
type ReceiveReport struct {
	ID       kv.RequestID
	Err      *Error // nil when every byte is in place
	Transfer TransferFacts
}
