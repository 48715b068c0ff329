package core

import (
	"fmt"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// Config sizes a Machine.
type Config struct {
	BlockSize      int // tokens
	NumBlocks      int
	MaxBatchTokens int        // tokens computed in one step, over all requests
	MaxRunning     int        // requests in one step
	MaxWaiting     int        // requests that wait to run or for a peer
	MaxContext     int        // tokens of prompt and answer together that the model can take
	EOS            []kv.Token // end an answer unless the request ignores them
	PrefixCaching  bool
	// LoadFailure is what becomes of a request whose KV does not come, unless the request says
	// otherwise. Empty means kv.FailOnLoadFailure.
	LoadFailure kv.LoadFailurePolicy
	// ParkTimeout is how long receives may hold blocks that others need while nothing at all goes
	// on in this engine; 0 means for ever.
	ParkTimeout time.Duration
	// Tier: blocks are looked for in a CPU tier and given to it.
	Tier bool
	// TierTimeout is how long a request waits for the tier to say what it has, or for a next block of it; then the
	// rest is computed.
	// It must be positive with Tier.
	TierTimeout time.Duration
	// HashSeed enters every block hash: engines with different seeds share no blocks.
	HashSeed string
}

// Validate reports the first number that no machine can work with.
func (c Config) Validate() error {
	for _, f := range []struct {
		name  string
		value int
		least int
	}{
		{"block size", c.BlockSize, 1}, {"number of blocks", c.NumBlocks, 1}, {"batch tokens", c.MaxBatchTokens, 1},
		{"running requests", c.MaxRunning, 1}, {"waiting requests", c.MaxWaiting, 1}, {"context", c.MaxContext, 2},
		{"batch tokens (at least one per running request)", c.MaxBatchTokens, c.MaxRunning},
	} {
		if f.value < f.least {
			return fmt.Errorf("engine core: %s: %d is below %d", f.name, f.value, f.least)
		}
	}
	if c.LoadFailure != "" && !c.LoadFailure.Valid() {
		return fmt.Errorf("engine core: load failure policy %q is neither fail nor recompute", c.LoadFailure)
	}
	if c.ParkTimeout < 0 {
		return fmt.Errorf("engine core: park timeout %v is negative", c.ParkTimeout)
	}
	if c.Tier && c.TierTimeout <= 0 {
		return fmt.Errorf("engine core: tier timeout %v is not positive", c.TierTimeout)
	}
	return nil
}

// Context is the number of tokens that prompt and answer may have together: the model's, or what
// the blocks can hold and one more, because the last token's KV is never needed.
func (c Config) Context() int { return min(c.MaxContext, c.NumBlocks*c.BlockSize+1) }

// Request is one prompt to be continued. The machine keeps the slices; nobody may change them.
type Request struct {
	ID         kv.RequestID
	Prompt     []kv.Token
	MaxTokens  int // below 1: as many as the context allows
	StopTokens []kv.Token
	IgnoreEOS  bool
	Keys       Keys
	Params     *kv.TransferParams // nil: no hand-off
	Tier       TierSpec
	// Together is how many requests come with this one, itself included: answers of one prompt, that are of use
	// only if all are taken. It is refused unless there is room for all of them, or nothing waits; the others say
	// nothing of it. 0 is one.
	Together int
}

// Event is what happened outside: Add, Abort, ReleaseHold, StepDone, ConnectorOutput, ResetCache,
// GiveUpReset, Drain, Tick, or one of the tier's.
type Event interface{ coreEvent() }

type (
	// Add brings a request. It is refused or taken within the same Step.
	Add struct{ Request }
	// Abort ends a request as connector.FinishAbort, with Err in its last Emit. An unknown or
	// ended id is ignored.
	Abort struct {
		ID  kv.RequestID
		Err error
	}
	// ReleaseHold says that nobody will ask for the blocks that an ended request holds, as long as they
	// are held under this lease. HoldReleased answers it at once; the blocks come back when nothing reads
	// them. Requests that have not ended, and other ids and leases, are left alone.
	ReleaseHold struct {
		ID    kv.RequestID
		Lease kv.Generation
	}
	// StepDone ends the step in flight. Results are in the order of the batch; those of sequences
	// without Sample are ignored. Err, if set, fails every request of the batch.
	StepDone struct {
		Results []Result
		Err     error
	}
	// ConnectorOutput is one rank's report.
	ConnectorOutput struct{ connector.WorkerOutput }
	// ResetCache asks for an empty prefix cache. CacheReset answers it: at once if no blocks are
	// held for peers or being written by them; else with a *CacheBusyError at once, or with Wait when
	// none are any more. Until then no hand-off is given blocks, so that the time comes. Tickets are
	// the caller's to choose and differ.
	ResetCache struct {
		Ticket uint64
		Wait   bool
	}
	// GiveUpReset ends the waiting of a ResetCache; it is then answered with a *CacheBusyError. An
	// answered ticket is ignored.
	GiveUpReset struct{ Ticket uint64 }
	// Drain says that no request comes any more: what is kept for next turns is let go, now and as requests
	// end.
	Drain struct{}
	// Tick says that the time of Deadline has come.
	Tick struct{}
)

func (Add) coreEvent()             {}
func (Abort) coreEvent()           {}
func (ReleaseHold) coreEvent()     {}
func (StepDone) coreEvent()        {}
func (ConnectorOutput) coreEvent() {}
func (ResetCache) coreEvent()      {}
func (GiveUpReset) coreEvent()     {}
func (Drain) coreEvent()           {}
func (Tick) coreEvent()            {}

// Result is what a step gave for one sequence.
type Result struct {
	Token kv.Token
	Stop  bool  // the text ends here, as only who makes text of tokens can tell
	Err   error // no token: the request fails
}

// Action is what to do: Refused, RunStep, SendMeta, Emit, HoldReleased, CacheReset or one for the tier, in
// the order given.
type Action interface{ coreAction() }

type (
	// Refused answers an Add. Nothing of the request is kept, and no Emit follows.
	Refused struct {
		ID  kv.RequestID
		Err error
	}
	// RunStep starts the one step that may be in flight; StepDone must follow.
	RunStep struct{ Batch []Sequence }
	// SendMeta is for the workers of every rank, now: it waits for no step.
	SendMeta struct{ Meta connector.StepMeta }
	// Emit tells a request's reader something.
	Emit struct{ Output }
	// HoldReleased answers a ReleaseHold. Released: there was such a hold, and it ends by this.
	HoldReleased struct {
		ID       kv.RequestID
		Released bool
	}
	// CacheReset answers a ResetCache. Without an error, nothing that was computed or received before
	// is found in the prefix cache any more, now or later.
	CacheReset struct {
		Ticket uint64
		Blocks int // that were forgotten
		Err    error
	}
)

func (Refused) coreAction()  {}
func (RunStep) coreAction()  {}
func (SendMeta) coreAction() {}
func (Emit) coreAction()     {}

func (HoldReleased) coreAction() {}

func (CacheReset) coreAction() {}

// Sequence is the part of one request that a step computes. The receiver owns it.
type Sequence struct {
	ID     kv.RequestID
	Tokens []kv.Token   // to compute
	Start  int          // position of the first one
	Blocks []kv.BlockID // block table up to the last one
	Sample bool         // choose the token behind the last one
}

// Output is news of one request.
type Output struct {
	ID     kv.RequestID
	Tokens []kv.Token // sampled, at most one per step
	// Finish is set on the last Output of a request, and everything below with it.
	Finish   connector.FinishReason
	Usage    Usage
	Params   *kv.TransferParams      // what to answer; nil if nothing
	Transfer connector.TransferFacts // of the KV that came from a peer
	LoadErr  error                   // why KV did not come from a peer although the answer went on without
	Err      error                   // for FinishError and FinishAbort
}

// Usage counts tokens of one request. Without preemption or error Cached + External + Tier +
// ComputedPrompt is Prompt.
type Usage struct {
	Prompt         int
	Completion     int
	Cached         int // prompt tokens found in the prefix cache at first; after a failed load, anew
	External       int // prompt tokens brought by a peer and used
	Recomputed     int // prompt tokens that a peer did not bring, so that they are not in External
	ComputedPrompt int // prompt positions computed, recomputations counted again
	Blocks         int // at the end
	Preemptions    int
	Tier           int // prompt tokens loaded from the CPU tier, unless after a preemption
}

// Stats is a snapshot of a Machine: gauges, then totals.
type Stats struct {
	BlocksFree, BlocksTotal, BlocksCached int
	Running, Waiting, WaitingRemote, Held int

	PrefixQueries, PrefixHits      uint64 // prompt tokens looked up and found, but not after a preemption
	Preemptions, Steps             uint64
	PromptTokens, CompletionTokens uint64
	ComputedPrompt, ExternalTokens uint64
	Received, ReceiveFailed        uint64
	Recomputed                     uint64 // failed receives whose request went on
	Unparked                       uint64 // receives given up because others needed their blocks
	TurnsKept, TurnsReclaimed      uint64 // ended requests kept for a next turn; let go because others needed their blocks
	CacheResets                    uint64
	StrayOutcomes                  uint64 // outcomes of requests that wait for none

	Looking, Loading int // requests that wait for the tier's answer, or for its copy
	Copies           int // loads and stores under way

	// Tokens that the tier was asked for, brought, said to have and did not bring, and was given; and
	// the answers that did not come in time.
	TierQueries, TierTokens, TierShort, TierStored, TierTimeouts uint64

	Finished map[connector.FinishReason]uint64
}
