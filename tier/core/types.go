package core

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Key names the content of one block.
type Key = wire.OffloadKey

// Slot is a place for one block in the tier's memory, from 0.
type Slot uint32

// JobID names one job or lease of a Machine. It is never used twice; 0 is none.
type JobID uint64

// PinID names one peer's reference to one block. It is never used twice; 0 is none.
type PinID uint64

// Verdict answers a lookup.
type Verdict uint8

const (
	Miss    Verdict = iota // no tier has it, as far as this request is concerned
	Pending                // it is on its way, or not known yet: ask again after a change
	Hit                    // it is ready
)

func (v Verdict) String() string {
	switch v {
	case Miss:
		return "miss"
	case Pending:
		return "pending"
	case Hit:
		return "hit"
	}
	return fmt.Sprintf("verdict %d", uint8(v))
}

// Job is work of one secondary tier: fill these slots with the content of these keys, or keep the
// content of these slots under these keys. The slots stay as they are until the job has ended (a
// load's: has stopped).
type Job struct {
	ID    JobID
	Req   kv.RequestID // on whose behalf; empty for a peer's
	Keys  []Key
	Slots []Slot
	// Sums are of the slots' content; nil for a load.
	Sums []Sum
}

// Action is what the driver is to carry out, in order: Load, Store, Unwanted or End.
type Action interface{ action() }

// Load asks a tier to fill slots.
type Load struct {
	Tier int
	Job  Job
}

// Store asks a tier to keep blocks.
type Store struct {
	Tier int
	Job  Job
}

// End tells a tier that a request is over; stores of it may still be under way.
type End struct {
	Tier int
	Req  kv.RequestID
}

// Unwanted tells a tier that a request has no use for keys that it may have been asked for: they stand behind one
// that is nowhere. Keys is a part of the lookup's and not to be kept.
type Unwanted struct {
	Tier int
	Req  kv.RequestID
	Keys []Key
}

func (Load) action()     {}
func (Store) action()    {}
func (End) action()      {}
func (Unwanted) action() {}

// Prober asks a tier whether it has a block. It answers at once; Pending means that the answer will
// be known after a change. p2p-tier.md, section 8.3.
type Prober interface {
	Probe(tier int, req kv.RequestID, key Key) Verdict
}

// Served answers one key of a peer's lookup. A Hit is pinned already.
type Served struct {
	Verdict Verdict
	// Later is set of a Miss that is one only because peers hold as much as they may at the moment.
	Later bool
	// Promoted is set of a Pending that the peer is charged for: this call has begun to load it.
	Promoted bool
	Pin      PinID
	Slot     Slot
	Sum      Sum
}

// Stats are counts for people.
type Stats struct {
	Slots, Free, Writing, Ready, Pinned, Quarantined int
	Requests, Loads, Stores, Leases, PeerPins        int

	Hits, Misses, Promotions, FailedLoads, FailedStores, Evicted uint64
	// RefusedPromotions found no room, RefusedStores no place in the ledger, RefusedPins no more of
	// the peers' share. Strays are ends of jobs that had ended or never were.
	RefusedPromotions, RefusedStores, RefusedPins, Strays uint64
	// Damaged blocks were forgotten, because their content was not what had been written.
	Damaged uint64
}
