package session

import (
	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// Action is what the driver is to do, in order.
type Action interface{ action() }

// For the transport.
type (
	// Dial connects to a peer; Up or Down follows, and Down when it ends, unless Hang came first.
	Dial struct {
		Peer PeerID
		Gen  kv.Generation
	}
	// Send sends a message on a connection that was dialled; before Up it waits.
	Send struct {
		Peer PeerID
		Gen  kv.Generation
		Msg  wire.P2PMessage
	}
	// Hang ends the connection after what was sent, within a short time of the driver's.
	Hang struct {
		Peer PeerID
		Gen  kv.Generation
	}
	// Probe asks the peer's end of a connection that was dialled for a sign of life; Alive follows, unless the
	// process stands still.
	Probe struct {
		Peer PeerID
		Gen  kv.Generation
	}
	// DropLink ends a connection by which a peer reaches us.
	DropLink struct {
		Identity string
		Link     uint64
	}
)

// For the agent.
type (
	// Admit adds a peer; Admitted follows. At once where that is cheap, else on another goroutine.
	Admit struct {
		Peer    PeerID
		Gen     kv.Generation
		Connect *wire.P2PConnect
	}
	// Dismiss takes back an Admit: one that is under way is given up, and what it may still give is
	// removed; an admitted peer is removed.
	Dismiss struct {
		Peer  PeerID
		Gen   kv.Generation
		Agent agent.PeerID // zero while the admission is under way
	}
	// Grant permits the peer's agent to write the slots of a load; Granted follows.
	Grant struct {
		Job   core.JobID
		Agent agent.Name
		Slots []core.Slot
	}
	// Revoke ends that: when it is done, nothing is written any more. A job without a grant is ignored.
	Revoke struct{ Job core.JobID }
	// Post writes slots to the peer's blocks. Either PostFailed follows, or TransferEnded and
	// TransferStopped.
	Post struct {
		Transfer uint64
		Agent    agent.PeerID
		Base     uint64 // of the peer's memory
		Local    []core.Slot
		Remote   []uint32
		Grant    agent.GrantID
	}
	// Cancel asks a transfer to end early.
	Cancel struct{ Transfer uint64 }
)

// For the tier.
type (
	// Answer says whether the request's source has a key. A hit is kept for one fetch: if one was asked
	// for after the Ask of this Epoch, the hit is of no use, and the key is to be asked for anew.
	Answer struct {
		Req   kv.RequestID
		Epoch uint64 // of the Ask
		Key   core.Key
		Hit   bool
	}
	// Fail says that the source has nothing more for the request.
	Fail struct {
		Req kv.RequestID
		Why string
	}
	// LoadEnded: all Blocks of a load have arrived, or none. Unless Stopped, something may still write
	// its slots, and LoadStopped follows when nothing does. Of those that arrived, each is whole if its
	// content has its sum; the sums are nil if the peer tells none.
	LoadEnded struct {
		Job         core.JobID
		Peer        PeerID
		Blocks      int
		OK, Stopped bool
		Keys        []core.Key
		Slots       []core.Slot
		Sums        []uint32
	}
	LoadStopped struct{ Job core.JobID }
	StoreEnded  struct {
		Job core.JobID
		OK  bool
	}
	// Serve looks a portion of a lookup up for a peer and pins what is there, Most blocks of it; Served follows, also
	// after other events. Forgo says that a Serve without a Served has become of no use: it need not be carried out.
	Serve struct {
		Peer   PeerID
		Lookup uint64
		Keys   []core.Key
		Most   int
	}
	Forgo struct {
		Peer   PeerID
		Lookup uint64
	}
	Unpin struct{ Pins []core.PinID }
)

// Report is for whoever watches.
type Report struct{ Event event.Event }

// Note tells people what happened with a peer.
type Note struct {
	Peer PeerID
	What string // a stable snake_case name
	Text string
}

func (Dial) action()        {}
func (Send) action()        {}
func (Hang) action()        {}
func (Probe) action()       {}
func (DropLink) action()    {}
func (Admit) action()       {}
func (Dismiss) action()     {}
func (Grant) action()       {}
func (Revoke) action()      {}
func (Post) action()        {}
func (Cancel) action()      {}
func (Answer) action()      {}
func (Fail) action()        {}
func (LoadEnded) action()   {}
func (LoadStopped) action() {}
func (StoreEnded) action()  {}
func (Serve) action()       {}
func (Forgo) action()       {}
func (Unpin) action()       {}
func (Report) action()      {}
func (Note) action()        {}
