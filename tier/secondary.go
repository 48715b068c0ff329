package tier

import (
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
)

// Request is what the tiers are told of a request before anything of it is looked up.
type Request struct {
	ID kv.RequestID
	// Source is a peer that may have blocks of the request; nil: none was named.
	Source *Source
	// Decoder is set when a peer will fetch what this request computes.
	Decoder *Decoder
	// LoadOnlyFrom names the tiers that may be asked; nil: all.
	LoadOnlyFrom []string
	// Prefix: the keys of a Lookup follow each other, each once, and a block is of no use without all before it, as with
	// those of a prompt: nothing is loaded behind the first Miss. Otherwise each block is looked up for itself.
	Prefix bool
	// Through: what one tier brings for this request is stored to the others too.
	Through bool
}

// Source names a peer and the transaction to speak of with it (p2p-tier.md, section 9).
type Source struct {
	Host        string
	Port        int
	KVRequestID string
	// Everything: the peer prefills this request and will have every block, so it is not asked first.
	Everything bool
}

// Decoder names the transaction under which a peer fetches.
type Decoder struct{ KVRequestID string }

// Interest is what a tier has to do with a request.
type Interest struct {
	Load  bool // it may have blocks of it
	Store bool // it keeps the blocks that the request computes
	Whole bool // it wants every block of the request, also those that are in memory already
}

// Secondary is a tier behind the CPU's. All methods but Start and Close are called with the Manager's
// lock held: they must not block, and must not call Host before they return.
type Secondary interface {
	// Name is a short word, used in configuration and metrics: "fs", "p2p".
	Name() string
	// Start begins the tier's work. It is called once, before anything else.
	Start(Host) error
	// Begin tells of a request, End that it is over. Jobs of it may still be under way after End.
	Begin(Request) Interest
	End(kv.RequestID)
	// Probe says whether the tier has a block. Pending means that Host.Wake will follow.
	Probe(kv.RequestID, core.Key) core.Verdict
	// Unwanted says that a request has no use for keys for which it may have been probed. It comes between the Probes
	// and the Flush of a lookup, after its Load. The slice is not to be kept.
	Unwanted(kv.RequestID, []core.Key)
	// Flush follows the Probes of one lookup.
	Flush(kv.RequestID)
	// Load and Store begin a job, which ends by Host.LoadEnded or StoreEnded, exactly once, within a
	// bound of the tier's own.
	Load(core.Job)
	Store(core.Job)
	// Changed says that what is in memory has changed.
	Changed()
	// Close ends every job and every goroutine of the tier, then returns. No lock is held, and no other
	// method is called once it has been.
	Close() error
}

// Host is how a tier reports. Its methods may be called from any goroutine, except from within a
// method of the Secondary that the Manager has called; they wait for the Manager's lock only.
type Host interface {
	// Block is a slot's memory.
	Block(core.Slot) []byte
	// LoadEnded, LoadStopped and StoreEnded end jobs; see core.Machine. LoadSummed is LoadEnded by a tier
	// that has read the blocks and knows their checksums; LoadEnded reads them for that.
	LoadEnded(id core.JobID, good []bool, stopped bool)
	LoadSummed(id core.JobID, good []bool, sums []core.Sum, stopped bool)
	LoadStopped(core.JobID)
	StoreEnded(id core.JobID, ok bool)
	// Serve answers a peer of this tier, with every hit pinned, and at most so many blocks pinned or loaded
	// for it; Unpin gives pins back. The lock is held for all of keys, so a long lookup is to come in portions.
	Serve(keys []core.Key, most int) []core.Served
	Unpin([]core.PinID)
	// Recent gives the keys of at most so many blocks in memory, those first that are evicted last.
	Recent(most int) []core.Key
	// Wake says that Probe may answer otherwise than before.
	Wake()
}
