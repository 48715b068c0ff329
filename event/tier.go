package event

import (
	"time"

	"github.com/kvferry/kvferry/kv"
)

// The peers of the CPU tier. Peer is their "host:port".
type (
	// TierSessionStarted: both sides have admitted each other.
	TierSessionStarted struct {
		Peer   string
		Stock  bool // no kvferry node
		Blocks int  // of its memory
		Took   time.Duration
	}
	// TierSessionEnded: a session is over, open or not. Reason is one word of a fixed set, Why a sentence.
	TierSessionEnded struct {
		Peer   string
		Reason string
		Why    string
		Lasted time.Duration
	}
	// TierPeerRefused: a peer gets no session. Reason is one word of a fixed set, Why a sentence.
	TierPeerRefused struct {
		Peer   string
		Reason string
		Why    string
	}
	// TierPeerAdmitted: the agent has a peer, or, with Err, cannot have it.
	TierPeerAdmitted struct {
		Peer      string
		Agent     string
		Transport string
		Took      time.Duration
		Err       error
	}
	// TierLookupTimedOut: a source did not say in time what it has; the request gets nothing of it.
	TierLookupTimedOut struct {
		Request kv.RequestID
		Peer    string
	}
	// TierFetchDone: a fetch of ours has arrived. Checked: the source has told checksums.
	TierFetchDone struct {
		Request kv.RequestID
		Peer    string
		Blocks  int
		Bytes   int64
		Took    time.Duration
		Checked bool
	}
	// TierFetchFailed: it has not, and its blocks are misses.
	TierFetchFailed struct {
		Request kv.RequestID
		Peer    string
		Blocks  int
		Why     string
	}
	// TierBlocksDamaged: of a fetch that has arrived, some blocks do not have their checksums.
	TierBlocksDamaged struct {
		Peer   string
		Blocks int
	}
	// TierServed: a fetch of a peer has been answered, well or not.
	TierServed struct {
		Peer   string
		Blocks int
		Bytes  int64
		OK     bool
	}
)

func (TierSessionStarted) Kind() string { return "tier_session_started" }
func (TierSessionEnded) Kind() string   { return "tier_session_ended" }
func (TierPeerRefused) Kind() string    { return "tier_peer_refused" }
func (TierPeerAdmitted) Kind() string   { return "tier_peer_admitted" }
func (TierLookupTimedOut) Kind() string { return "tier_lookup_timed_out" }
func (TierFetchDone) Kind() string      { return "tier_fetch_done" }
func (TierFetchFailed) Kind() string    { return "tier_fetch_failed" }
func (TierBlocksDamaged) Kind() string  { return "tier_blocks_damaged" }
func (TierServed) Kind() string         { return "tier_served" }
