package core

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
)

// Config sizes a Machine.
type Config struct {
	Slots int // blocks of memory, >= 1
	Tiers int // secondary tiers, by index from 0 in the order they are asked
	// PeerPins is how many blocks peers may hold, or have loaded, by their lookups, all together. 0: half of
	// Slots.
	PeerPins int
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Slots < 1:
		return fmt.Errorf("cpu tier: %d blocks fit into its memory, at least 1 must", c.Slots)
	case c.Tiers < 0 || c.Tiers > MaxTiers:
		return fmt.Errorf("cpu tier: %d secondary tiers, at most %d are possible", c.Tiers, MaxTiers)
	case c.PeerPins < 0:
		return fmt.Errorf("cpu tier: peers may hold %d blocks, which is negative", c.PeerPins)
	}
	return nil
}

// RequestSpec says how the tiers treat a request.
type RequestSpec struct {
	// NoLoad[i]: tier i is not asked for this request (kv_load_tiers). May be shorter than the tiers.
	NoLoad []bool
	// NoStore[i]: tier i has no use for the blocks that this request computes.
	NoStore []bool
	// Whole[i]: tier i wants every block of the request, also those that are here already (request
	// level), not only newly computed ones.
	Whole []bool
	// Through: what one tier brings for this request is stored to the others, as if it were computed.
	Through bool
	// Prefix: the keys of a lookup follow each other, and a block is of no use without all before it.
	Prefix bool
}

// Machine is the CPU tier's book. See the package documentation.
type Machine struct {
	cfg      Config
	pool     *Pool
	requests map[kv.RequestID]*request
	jobs     map[JobID]*job
	pins     map[PinID]*block
	lastID   uint64
	inFlight int // loads and stores in jobs
	parkedIn int // blocks in quarantine
	// peerLoads is how many blocks are being loaded for peers.
	peerLoads int
	out       []Action
	changed   bool
	stats     Stats
}

type request struct {
	spec     RequestSpec
	stores   int // reservations not yet committed
	parked   int // blocks of others' writing that a whole-request tier waits for
	finished bool
	failed   map[tierKey]struct{} // loads that failed: not tried again for this request
}

type tierKey struct {
	tier int
	key  Key
}

// parked is a block's promise to be stored, once ready, to a tier that wants the whole request.
type parked struct {
	req  kv.RequestID
	tier int
}

type jobKind uint8

const (
	jobLoad jobKind = iota
	jobStore
	jobUse     // the engine reads
	jobReserve // the engine writes
	jobHalted  // a load that has ended and not stopped: quarantine
)

type job struct {
	kind   jobKind
	tier   int
	req    kv.RequestID
	blocks []*block
}

// New makes an empty tier.
func New(cfg Config) (*Machine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.PeerPins == 0 {
		cfg.PeerPins = max(1, cfg.Slots/peerShareDiv)
	}
	return &Machine{
		cfg: cfg, pool: newPool(cfg.Slots), requests: map[kv.RequestID]*request{},
		jobs: map[JobID]*job{}, pins: map[PinID]*block{},
	}, nil
}

// Actions takes what is to be carried out, in order.
func (m *Machine) Actions() []Action {
	out := m.out
	m.out = nil
	return out
}

// Changed reports, once, that a lookup may answer otherwise than before.
func (m *Machine) Changed() bool {
	c := m.changed
	m.changed = false
	return c
}

// Room reports whether a request can begin: it is not there yet, and there are not too many.
func (m *Machine) Room(req kv.RequestID) bool {
	return m.requests[req] == nil && len(m.requests) < MaxRequests
}

// Begin makes a request known. It reports false if there is no Room.
func (m *Machine) Begin(req kv.RequestID, spec RequestSpec) bool {
	if !m.Room(req) {
		return false
	}
	m.requests[req] = &request{spec: spec}
	return true
}

// Finish says that a request asks and stores nothing more. Its tiers are told once its writes have
// ended, as those may still be stored.
func (m *Machine) Finish(req kv.RequestID) {
	if r := m.requests[req]; r != nil {
		r.finished = true
		m.retire(req, r)
	}
}

// retire ends a request when nothing of it is left to come.
func (m *Machine) retire(req kv.RequestID, r *request) {
	if !r.finished || r.stores > 0 || r.parked > 0 {
		return
	}
	delete(m.requests, req)
	for t := range m.cfg.Tiers {
		m.out = append(m.out, End{Tier: t, Req: req})
	}
}

// Reset forgets every block without waiting for anybody: those in use are forgotten by name at once
// and give their slots back when their users are done.
func (m *Machine) Reset() {
	for _, b := range m.pool.index {
		m.unpark(b, false)
	}
	m.pool.reset()
	m.changed = true
}

// Empty reports whether no block is here, and no job or peer has one.
func (m *Machine) Empty() bool { return len(m.pool.index)+len(m.jobs)+len(m.pins) == 0 }

// Stats counts.
func (m *Machine) Stats() Stats {
	s := m.stats
	s.Slots, s.Free, s.Requests = m.cfg.Slots, len(m.pool.free), len(m.requests)
	for _, b := range m.pool.index {
		switch {
		case b.state == writing:
			s.Writing++
		case b.pins > 0:
			s.Pinned++
			s.Ready++
		default:
			s.Ready++
		}
	}
	for _, j := range m.jobs {
		switch j.kind {
		case jobLoad:
			s.Loads++
		case jobStore:
			s.Stores++
		case jobUse, jobReserve:
			s.Leases++
		}
	}
	s.Quarantined, s.PeerPins, s.Evicted = m.parkedIn, len(m.pins), m.pool.evicted
	return s
}

func (m *Machine) nextID() uint64 {
	m.lastID++
	return m.lastID
}

// open enters a job into the ledger.
func (m *Machine) open(kind jobKind, tier int, req kv.RequestID, blocks []*block) JobID {
	id := JobID(m.nextID())
	m.jobs[id] = &job{kind: kind, tier: tier, req: req, blocks: blocks}
	if kind == jobLoad || kind == jobStore {
		m.inFlight++
	}
	return id
}

// shut takes a job of one kind out of the ledger; nil, and counted, if there is none.
func (m *Machine) shut(id JobID, kind jobKind) *job {
	j := m.jobs[id]
	if j == nil || j.kind != kind {
		m.stats.Strays++
		return nil
	}
	delete(m.jobs, id)
	if kind == jobLoad || kind == jobStore {
		m.inFlight--
	}
	return j
}

func describe(id JobID, req kv.RequestID, blocks []*block) Job {
	j := Job{ID: id, Req: req, Keys: make([]Key, len(blocks)), Slots: make([]Slot, len(blocks))}
	for i, b := range blocks {
		j.Keys[i], j.Slots[i] = b.key, b.slot
	}
	return j
}

func at(flags []bool, i int) bool { return i < len(flags) && flags[i] }
