package session

import (
	"net/netip"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// Event is what a Hub is told.
type Event interface{ event() }

// From the engine, by way of the tier.
type (
	// Begin tells of a request that names a source, or a decoder, or both.
	Begin struct {
		Req kv.RequestID
		// Source is the peer to ask under SourceID; empty: none. Everything: it prefills this request.
		Source     PeerID
		SourceID   string
		Everything bool
		// Decoder: a peer will fetch under DecoderID what this request computes.
		Decoder   bool
		DecoderID string
	}
	// Ask asks the request's source for keys; an Answer follows for each, or a Fail. Epoch counts the
	// request's fetches so far.
	Ask struct {
		Req   kv.RequestID
		Epoch uint64
		Keys  []core.Key
	}
	// Decline says that a request will not fetch some of what it has asked for since its last Fetch: so many keys that
	// were Answered as hits, and those Open that were not answered yet. When nothing else is kept for it, the source
	// learns at once that it may let go.
	Decline struct {
		Req  kv.RequestID
		Hits int
		Open []core.Key
	}
	// Fetch asks for blocks that were Answered as hits, or of a source that has Everything.
	Fetch struct {
		Req   kv.RequestID
		Job   core.JobID
		Keys  []core.Key
		Slots []core.Slot
	}
	// Supply offers blocks of a request with a decoder, until StoreEnded.
	Supply struct {
		Req   kv.RequestID
		Job   core.JobID
		Keys  []core.Key
		Slots []core.Slot
		Sums  []core.Sum // of the slots' content
	}
	// Finish ends a request: what it still waits for fails.
	Finish struct{ Req kv.RequestID }
)

// From the tier.
type (
	// Served answers Serve.
	Served struct {
		Lookup  uint64
		Answers []core.Served
	}
	// Changed: a Serve may answer otherwise than before.
	Changed struct{}
)

// From the transport. Gen is the session's that dialled; Link is the connection's by which a peer
// reaches us, from 1.
type (
	// Up: the connection to the peer stands. Remote is its other end, zero if not known.
	Up struct {
		Peer   PeerID
		Gen    kv.Generation
		Remote netip.AddrPort
	}
	// Down: it could not be made, or has ended.
	Down struct {
		Peer PeerID
		Gen  kv.Generation
		Err  error
	}
	// Alive answers a Probe.
	Alive struct {
		Peer PeerID
		Gen  kv.Generation
	}
	// Message came in. Msg is nil if it could not be decoded, and Err says why. Host is the address
	// that the connection comes from.
	Message struct {
		Identity string
		Link     uint64
		Host     string
		Msg      wire.P2PMessage
		Err      error
	}
	// LinkEnded: a peer's connection to us has ended; no Message of it follows.
	LinkEnded struct {
		Identity string
		Link     uint64
	}
)

// From the agent.
type (
	// Admitted answers Admit.
	Admitted struct {
		Peer  PeerID
		Gen   kv.Generation
		Agent agent.PeerID
		// Transport is how, as the agent says.
		Transport string
		Err       error
	}
	// AgentLost: the agent has lost an admitted peer.
	AgentLost struct{ Agent agent.PeerID }
	// TornDown: nothing that this peer agent began can write our memory any more.
	TornDown struct{ Agent agent.Name }
	// Granted answers Grant.
	Granted struct {
		Job core.JobID
		ID  agent.GrantID
		Err error
	}
	// PostFailed: nothing of the Post was begun.
	PostFailed struct {
		Transfer uint64
		Err      error
	}
	// TransferEnded: OK says that every byte is in place. TransferStopped: none moves any more.
	TransferEnded struct {
		Transfer uint64
		OK       bool
		Err      error
	}
	TransferStopped struct{ Transfer uint64 }
	// Damaged: of a load that had arrived, some blocks are not what the peer says they are.
	Damaged struct {
		Peer   PeerID
		Job    core.JobID
		Blocks int
	}
)

// Tick says that time has passed.
type Tick struct{}

// Shutdown ends all sessions, and with them everything but the transfers that have not stopped.
type Shutdown struct{}

func (Begin) event()           {}
func (Ask) event()             {}
func (Decline) event()         {}
func (Fetch) event()           {}
func (Supply) event()          {}
func (Finish) event()          {}
func (Served) event()          {}
func (Changed) event()         {}
func (Up) event()              {}
func (Down) event()            {}
func (Alive) event()           {}
func (Message) event()         {}
func (LinkEnded) event()       {}
func (Admitted) event()        {}
func (AgentLost) event()       {}
func (TornDown) event()        {}
func (Granted) event()         {}
func (PostFailed) event()      {}
func (TransferEnded) event()   {}
func (TransferStopped) event() {}
func (Damaged) event()         {}
func (Tick) event()            {}
func (Shutdown) event()        {}
