package core

import (
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// Connector is the SchedulerHalf as the machine uses it. It is called by the machine's owner only,
// from within Step and Deadline. Only requests that carry hand-off parameters are told to it:
//
//	Arrived ─> External* ─> Allocated? ─> Finished ─> (hold) Outcome
//	                            │
//	                            └─> Outcome Received or ReceiveFailed, if external tokens were taken
//
// Arrived, Allocated and Finished come at most once per request, Finished exactly once for each
// that arrived without an error, and not before a due Received or ReceiveFailed unless as
// FinishAbort: the client has gone, or others need the blocks. If such a request is computed here
// after all, nothing more is said of it. A prefill leg whose receive fails is computed here and ends as
// any other.
type Connector interface {
	// Arrived announces a request. An error refuses it, and nothing of it is kept.
	Arrived(now time.Time, r connector.Request) error
	// External is the number of prompt tokens behind the first computed ones whose KV a peer will
	// bring. It is asked again, with another number perhaps, until blocks are allocated; never
	// after that, so that a request that lost its blocks does not transfer again.
	External(id kv.RequestID, computed int) int
	// Allocated tells the request's blocks: of the whole prompt if external > 0, else at least of
	// what is computed first. The first computed tokens are there already.
	Allocated(now time.Time, id kv.RequestID, blocks kv.BlockIDs, computed, external int)
	// Finished ends a request. blocks is what it has, with the KV of the first computedTokens
	// tokens in place. hold asks to keep the blocks until an Outcome names the request; params is
	// what to answer.
	Finished(now time.Time, id kv.RequestID, reason connector.FinishReason, blocks kv.BlockIDs, computedTokens int) (hold bool, params *kv.TransferParams)
	// Kept tells the digests of what Finished has asked to hold with params of a prefill leg, for the next
	// turn of a conversation: of their RemoteNumTokens tokens, and of the first block's, the first two
	// blocks' and so on. It follows such a Finished at once.
	Kept(id kv.RequestID, whole connector.Digest, prefixes []connector.Digest)
	// Release gives up a hold, named by the lease of the params that Finished gave; its Outcome follows.
	// false: there is no such hold, and nothing happens.
	Release(id kv.RequestID, lease kv.Generation) bool
	// Metadata is what the workers are to do since the last call; false if nothing.
	Metadata(now time.Time) (connector.StepMeta, bool)
	// Update takes one rank's report and gives what is then certain.
	Update(now time.Time, out connector.WorkerOutput) []connector.Outcome
	// Expire acts on deadlines that have passed.
	Expire(now time.Time) []connector.Outcome
	// Deadline is when Expire or Metadata wants to be called next; false if never.
	Deadline() (time.Time, bool)
}
