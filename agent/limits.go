package agent

import "time"

// FlushTimeout is how long Close lets queued notifications leave, for all peers together. The kernel
// takes them at once from all but a peer that has not read for long.
const FlushTimeout = 250 * time.Millisecond

// Limits bound what one agent keeps, so that neither its user nor a peer can make it grow without
// end. A zero field means the default. Backends take them in their Config.
type Limits struct {
	// Transfers is how many may be posted whose Stopped has not been read from Events. Beyond it
	// Post returns ErrBusy: the slots of their Results and Stoppeds are kept free.
	Transfers int
	// Peers bounds added peers, and peers that have connected to us, each for itself.
	Peers int
	// Lists bounds prepared lists: a few per peer.
	Lists int
	// ListDescs bounds the descriptors of one list, and the pairs of one transfer.
	ListDescs int
	// Grants bounds live grants: one or a few per request that waits for its KV.
	Grants int
	// GrantRanges bounds the ranges of one grant before they are merged.
	GrantRanges int
	// Registrations bounds registered memory ranges: one or a few per layer.
	Registrations int
	// Notification bounds one notification in bytes. A registration with all blocks of a long
	// prompt is some 100 KiB.
	Notification int
	// PeerNotifications is how many notifications of one peer may wait to be read. A peer that
	// goes beyond is lost.
	PeerNotifications int
	// PeerNotificationBytes is the same in bytes.
	PeerNotificationBytes int
}

// DefaultLimits are those of an engine rank with some hundred peers.
var DefaultLimits = Limits{
	Transfers:             4096,
	Peers:                 1024,
	Lists:                 16384,
	ListDescs:             1 << 20,
	Grants:                65536,
	GrantRanges:           1 << 20,
	Registrations:         4096,
	Notification:          1 << 20,
	PeerNotifications:     4096,
	PeerNotificationBytes: 8 << 20,
}

// WithDefaults replaces zero fields by those of DefaultLimits.
func (l Limits) WithDefaults() Limits {
	set := func(v *int, def int) {
		if *v <= 0 {
			*v = def
		}
	}
	d := DefaultLimits
	set(&l.Transfers, d.Transfers)
	set(&l.Peers, d.Peers)
	set(&l.Lists, d.Lists)
	set(&l.ListDescs, d.ListDescs)
	set(&l.Grants, d.Grants)
	set(&l.GrantRanges, d.GrantRanges)
	set(&l.Registrations, d.Registrations)
	set(&l.Notification, d.Notification)
	set(&l.PeerNotifications, d.PeerNotifications)
	set(&l.PeerNotificationBytes, d.PeerNotificationBytes)
	return l
}
