package agent

import (
	"context"
	"time"

	"github.com/kvferry/kvferry/kv"
)

// Name is an agent's own name, random for every process incarnation. It is not an engine id: an
// engine that restarts comes back with agents of other names.
type Name string

// PeerID names one peer agent as added once. A peer that is removed and added again, or that
// connects again, has another Generation; what still refers to the old one ends as peer lost.
type PeerID struct {
	Name Name
	Gen  kv.Generation
}

// Local is the PeerID under which an agent's own memory is prepared.
var Local = PeerID{}

// Offer is what one backend tells about itself, for one transport. A blob is opaque to all but the
// backend of the same transport.
type Offer struct {
	Transport string // "tcp", "shm", "nixl", …
	Blob      []byte
}

// PeerInfo is what a handshake learned about a peer agent.
type PeerInfo struct {
	HostID string  // equal host ids mean one kernel; empty when not told
	Offers []Offer // in the peer's order
}

// Peer is an added peer: which transport serves it, and why that one.
type Peer struct {
	ID        PeerID
	Transport string
	Why       string // one clause for people, e.g. "the only transport both sides offer"
}

// Capabilities tell what the product may rely on.
type Capabilities struct {
	// Revocable: Revoke is exact. Without it, revoked memory must stay in quarantine until the
	// peer confirms or its connection is gone.
	Revocable bool
	// CheapAdmission: AddPeer does so little that it may run inline.
	CheapAdmission bool
	// ParallelAdmission: AddPeer may run for several peers at once.
	ParallelAdmission bool
	// TellsArrivals: every notification that came with a WRITE has its Arrival. A completion without
	// one then came with no bytes.
	TellsArrivals bool
}

// MemoryKind says where memory lies.
type MemoryKind uint8

const (
	DRAM MemoryKind = iota
	VRAM
)

// Memory is fd-backed memory that the agent maps, registers and frees. It is never Go heap.
type Memory interface {
	Bytes() []byte // the mapping; valid until Free
	Addr() uint64  // virtual address of Bytes()[0]
	// Free unmaps the memory once every transfer on it has stopped, or returns ctx's error and
	// leaves it mapped. Nothing may use Bytes after Free is called.
	Free(ctx context.Context) error
}

// Registration is borrowed memory, e.g. an engine's tensors. Its owner may free the memory only
// after Deregister has returned nil.
type Registration interface {
	// Deregister refuses new transfers on the memory and revokes every grant that includes a byte
	// of it, at once. It returns when every transfer on it has stopped, or with ctx's error; it
	// may be called again then.
	Deregister(ctx context.Context) error
}

// Op is the direction of a transfer, seen from the agent that posts it.
type Op uint8

const (
	Write Op = iota // local memory into the peer's
	Read            // the peer's memory into local
)

// ListID names a prepared descriptor list of one agent. The zero ListID is never in use.
type ListID uint64

// TransferID names one posted transfer of one agent. The zero TransferID is never in use.
type TransferID uint64

// GrantID is an unguessable permission, made by the owner of the memory and told to the one peer
// that may use it.
type GrantID [16]byte

// Access says what a grant permits.
type Access uint8

const (
	AccessWrite Access = iota // the peer may write the ranges
	AccessRead                // the peer may read the ranges: the agent's side of a lease
)

// GrantSpec is a permission for one peer agent on a set of memory ranges.
type GrantSpec struct {
	Peer   Name   // the peer by name: it may connect after the grant is made
	Access Access // one direction only
	Ranges []kv.Descriptor
}

// Transfer describes one READ or WRITE between two prepared lists. Index i of LocalIdx is paired
// with index i of RemoteIdx; the two descriptors must have equal lengths.
type Transfer struct {
	Op        Op
	Local     ListID
	LocalIdx  []uint32
	Remote    ListID
	RemoteIdx []uint32
	// Grant is the peer's permission. Agents that can refuse do so without a live one.
	Grant GrantID
	// Notif is delivered to the peer after all bytes of a WRITE have arrived (or, for a READ, have
	// been read), and not at all if the transfer fails. nil = none; an empty one is not allowed.
	Notif []byte
	// Silence bounds the time without any progress, after which the transfer ends as
	// OutcomeDeadline. It must be positive.
	Silence time.Duration
}

// Agent moves bytes between the memory of this process and that of peers. The package
// documentation states the contract; package agenttest checks it.
//
// Unless said otherwise, methods may be called from any goroutine and do not block on a peer.
// After Close they return ErrClosed.
type Agent interface {
	Name() Name
	Capabilities() Capabilities
	// Offers is what to tell peers. It does not change while the agent lives.
	Offers() []Offer

	// Alloc maps length bytes of zeroed memory and registers it. Typed error: *LimitError.
	Alloc(length int) (Memory, error)
	// Register borrows length bytes at addr. owner names the lender in messages. The range may
	// not overlap another registered one.
	Register(addr uint64, length int, kind MemoryKind, owner string) (Registration, error)

	// AddPeer admits a peer. It may block on the peer until ctx ends and leaves nothing behind
	// when it fails. Adding a peer whose name is already added replaces it: the old generation is
	// removed first. Typed errors: *PeerError.
	AddPeer(ctx context.Context, info PeerInfo) (Peer, error)
	// RemovePeer ends every transfer with this generation of the peer as peer lost and releases
	// its lists. It does not block; the Results and Stoppeds come as events, a PeerLost does not.
	// The id of a peer that connected to us is good too: its connection is closed. An unknown or
	// old id is ignored. A peer that was lost needs no RemovePeer.
	RemovePeer(id PeerID)

	// Prepare checks and keeps a descriptor list: of this agent's own memory (Local; every
	// descriptor must lie in registered memory), or of a peer's. The list is read at once; the
	// caller keeps its slice.
	Prepare(owner PeerID, descs []kv.Descriptor) (ListID, error)
	// Release forgets a list. Transfers already posted with it are not disturbed.
	Release(ListID)

	// Post starts a transfer. An error means that nothing was started: indices, lengths and limits
	// are checked before any byte moves. On success exactly one Result and later exactly one
	// Stopped follow, for which slots are reserved now. Typed errors: *PostError, ErrBusy.
	Post(Transfer) (TransferID, error)
	// Cancel asks a transfer to end early: its Result, if not yet given, is OutcomeCancelled. An
	// unknown or ended id is ignored.
	Cancel(TransferID)
	// Notify sends a notification alone, in order with others to that peer. nil means that it was
	// queued, not that it arrived; a queue that cannot drain loses the peer. An empty one is not
	// allowed. Typed errors: *PeerError.
	Notify(peer PeerID, msg []byte) error

	// Grant gives a permission. The ranges must lie in registered memory.
	Grant(GrantSpec) (GrantID, error)
	// Revoke ends a permission: when it returns, no byte can be moved under it any more, whatever
	// the peer does (agents that are Revocable). It waits at most for a copy in this process that
	// is bounded by its own limits, never for a peer. An unknown id is ignored.
	Revoke(GrantID)

	// Events is the one channel on which everything comes up. Its reader may be slow: no peer can
	// block another's events, and a peer that overflows its share of notifications is lost. The
	// channel is closed when Close has finished.
	Events() <-chan Event

	// Close ends all transfers as closed, stops every goroutine and unmaps what Alloc gave. It
	// returns when that is done. Notifications that were queued leave first, as far as peers take
	// them within FlushTimeout: the last words of an engine that ends free its peers' blocks. It waits for no reader: the Results and Stoppeds that are owed
	// lie in the closed channel of Events to be read, so its reader may be the one that calls
	// Close. Notifications that were not read by then may be dropped.
	Close() error
}

// Namer is an Agent that can tell whom AddPeer would add. Every agent here is one; who has several users
// of one agent, such as the sessions of hosts that do not trust each other, keeps one of them from
// replacing another's peer with it.
type Namer interface {
	// PeerNames are the names under which AddPeer might add the peer, one for each of its offers that
	// can be read. The peer is not asked.
	PeerNames(PeerInfo) []Name
}
