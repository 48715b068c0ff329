package tier

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
)

// Config is what a Manager needs.
type Config struct {
	// Memory holds the blocks, BlockLen bytes each; a rest at its end is not used. It must stay valid
	// until Close has returned.
	Memory   []byte
	BlockLen int
	// Secondaries in the order in which they are asked. The Manager starts and closes them.
	Secondaries []Secondary
	// PeerPins is how many blocks peers may hold by lookups. 0: half of all.
	PeerPins int
	// OnChange is called when a Lookup that said Pending may say something else. It must not block
	// and must not call the Manager; nil: nobody is told.
	OnChange func()
	// VerifyUse makes Use compare the blocks with their checksums first. A damaged one is forgotten, and
	// the Use fails. It costs reading each block once more.
	VerifyUse bool
	// InjectFault damages each block that is committed, one of the faults in turn per block, after its
	// checksum was taken. It is a self-test, as of `kvferry up --check`: whoever gets such a block, an
	// engine by Use or a peer by a fetch, must find it to be a miss. It implies VerifyUse.
	InjectFault []Fault
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	if c.BlockLen < 1 {
		return fmt.Errorf("cpu tier: blocks of %d bytes", c.BlockLen)
	}
	names := map[string]bool{}
	for _, s := range c.Secondaries {
		if names[s.Name()] {
			return fmt.Errorf("cpu tier: two tiers are called %s", s.Name())
		}
		names[s.Name()] = true
	}
	for _, f := range c.InjectFault {
		if f != Unseen && !slices.Contains(Faults, f) {
			return fmt.Errorf("cpu tier: the fault %q is unknown, there are %q and %q", f, Faults, Unseen)
		}
	}
	return c.core().Validate()
}

func (c Config) core() core.Config {
	return core.Config{Slots: len(c.Memory) / max(1, c.BlockLen), Tiers: len(c.Secondaries), PeerPins: c.PeerPins}
}

// Manager is the CPU tier. Its methods may be called from any goroutine; only Close blocks.
type Manager struct {
	cfg Config
	mu  struct {
		sync.Mutex
		m      *core.Machine
		closed bool
		faults uint64 // injected
	}
}

// New makes the tier and starts those behind it. If one cannot start, those before it are closed.
func New(cfg Config) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := core.New(cfg.core())
	if err != nil {
		return nil, err
	}
	t := &Manager{cfg: cfg}
	t.mu.m = machine
	for i, s := range cfg.Secondaries {
		if err := s.Start(&host{t, i}); err != nil {
			for _, started := range cfg.Secondaries[:i] {
				err = errors.Join(err, started.Close())
			}
			return nil, fmt.Errorf("start tier %s: %w", s.Name(), err)
		}
	}
	return t, nil
}

// Begin makes a request known to every tier. Finish follows.
func (t *Manager) Begin(req Request) error {
	spec := core.RequestSpec{Through: req.Through, Prefix: req.Prefix}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return ErrClosed
	}
	if !t.mu.m.Room(req.ID) { // no tier hears of it, as none will hear of its end
		return fmt.Errorf("cpu tier: request %s is known already, or there are %d", req.ID, core.MaxRequests)
	}
	interests := make([]Interest, len(t.cfg.Secondaries))
	for i, s := range t.cfg.Secondaries {
		interests[i] = s.Begin(req)
		allowed := req.LoadOnlyFrom == nil || slices.Contains(req.LoadOnlyFrom, s.Name())
		spec.NoLoad = append(spec.NoLoad, !interests[i].Load || !allowed)
		spec.NoStore = append(spec.NoStore, !interests[i].Store)
		spec.Whole = append(spec.Whole, interests[i].Whole)
	}
	t.mu.m.Begin(req.ID, spec)
	return nil
}

// Finish says that a request asks and stores nothing more.
func (t *Manager) Finish(req kv.RequestID) { t.do(func(m *core.Machine) { m.Finish(req) }) }

// Lookup says for each key, in order, whether the request can have its block: Hit for Use, Pending to
// ask again after OnChange. It begins whatever is needed to make a Pending one a Hit or a Miss. Behind the first Miss
// a request with a Prefix has nothing but misses.
func (t *Manager) Lookup(req kv.RequestID, keys []core.Key) (out []core.Verdict) {
	t.do(func(m *core.Machine) { out = m.Lookup(req, keys, prober{t}) }, func() {
		for _, s := range t.cfg.Secondaries {
			s.Flush(req)
		}
	})
	if out == nil {
		out = make([]core.Verdict, len(keys))
	}
	return out
}

// Use lets the engine read the blocks of keys, all or none, until EndUse. It fails when one of them is
// not there any more, or was damaged (Config.VerifyUse).
func (t *Manager) Use(keys []core.Key) (id core.JobID, slots []core.Slot, ok bool) {
	var sums []core.Sum
	t.do(func(m *core.Machine) {
		if id, slots, ok = m.Use(keys); ok {
			_, sums = m.Blocks(id)
		}
	})
	if !ok || !t.cfg.VerifyUse && len(t.cfg.InjectFault) == 0 {
		return id, slots, ok
	}
	var damaged []core.Key
	for i, s := range slots {
		if sums[i].Known && core.SumOf(t.Block(s)) != sums[i] {
			damaged = append(damaged, keys[i])
		}
	}
	if len(damaged) == 0 {
		return id, slots, true
	}
	t.do(func(m *core.Machine) {
		m.EndUse(id)
		m.Forget(damaged)
	})
	return 0, nil, false
}

// EndUse ends a Use.
func (t *Manager) EndUse(id core.JobID) { t.do(func(m *core.Machine) { m.EndUse(id) }) }

// Touch notes the use of those of keys, in prefix order, that are here: they are evicted later.
func (t *Manager) Touch(keys []core.Key) { t.do(func(m *core.Machine) { m.Touch(keys) }) }

// Reserve makes room to write those blocks of a request that are not here, until Commit.
func (t *Manager) Reserve(req kv.RequestID, keys []core.Key) (res core.Reservation, ok bool) {
	t.do(func(m *core.Machine) { res, ok = m.Reserve(req, keys) })
	return res, ok
}

// Commit ends a Reservation; ok says that its blocks are written whole. The engine writes no more. It
// reads the blocks, for the checksums that stay with them, without holding up anybody else.
func (t *Manager) Commit(id core.JobID, ok bool) {
	var slots []core.Slot
	if ok {
		t.do(func(m *core.Machine) { slots, _ = m.Blocks(id) })
	}
	faults := t.faultsOf(len(slots))
	t.inject(slots, faults, true)
	sums := t.sums(slots)
	t.inject(slots, faults, false)
	t.do(func(m *core.Machine) {
		m.SetSums(id, sums)
		m.Commit(id, ok)
	})
}

func (t *Manager) sums(slots []core.Slot) []core.Sum {
	sums := make([]core.Sum, len(slots))
	for i, s := range slots {
		sums[i] = core.SumOf(t.Block(s))
	}
	return sums
}

// Reset forgets all blocks, and waits for nobody.
func (t *Manager) Reset() { t.do(func(m *core.Machine) { m.Reset() }) }

// Block is a slot's memory.
func (t *Manager) Block(s core.Slot) []byte {
	at := int(s) * t.cfg.BlockLen
	return t.cfg.Memory[at : at+t.cfg.BlockLen : at+t.cfg.BlockLen]
}

// Empty reports whether no block is in memory, and no job or peer has one. It is quick, whatever the memory's size.
func (t *Manager) Empty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.m.Empty()
}

// Stats counts.
func (t *Manager) Stats() core.Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.m.Stats()
}

// Close makes every call from now on do nothing and find nothing, and closes the tiers. When it
// returns, none of them touches the memory.
func (t *Manager) Close() error {
	t.mu.Lock()
	first := !t.mu.closed
	t.mu.closed = true
	t.mu.Unlock()
	if !first {
		return nil
	}
	var err error
	for _, s := range t.cfg.Secondaries {
		err = errors.Join(err, s.Close())
	}
	return err
}

// do changes the book, carries out what follows from it, and then what comes last.
func (t *Manager) do(f func(*core.Machine), last ...func()) {
	t.mu.Lock()
	if t.mu.closed {
		t.mu.Unlock()
		return
	}
	f(t.mu.m)
	for _, a := range t.mu.m.Actions() {
		switch a := a.(type) {
		case core.Load:
			t.cfg.Secondaries[a.Tier].Load(a.Job)
		case core.Store:
			t.cfg.Secondaries[a.Tier].Store(a.Job)
		case core.End:
			t.cfg.Secondaries[a.Tier].End(a.Req)
		case core.Unwanted:
			t.cfg.Secondaries[a.Tier].Unwanted(a.Req, a.Keys)
		}
	}
	for _, f := range last {
		f()
	}
	changed := t.mu.m.Changed()
	if changed {
		for _, s := range t.cfg.Secondaries {
			s.Changed()
		}
	}
	t.mu.Unlock()
	if changed && t.cfg.OnChange != nil {
		t.cfg.OnChange()
	}
}

// prober asks the tiers on the machine's behalf, with the lock held.
type prober struct{ t *Manager }

func (p prober) Probe(tier int, req kv.RequestID, key core.Key) core.Verdict {
	return p.t.cfg.Secondaries[tier].Probe(req, key)
}

// host is one tier's Host.
type host struct {
	t    *Manager
	tier int
}

func (h *host) Block(s core.Slot) []byte { return h.t.Block(s) }

func (h *host) LoadEnded(id core.JobID, good []bool, stopped bool) {
	var slots []core.Slot
	if slices.Contains(good, true) {
		h.t.do(func(m *core.Machine) { slots, _ = m.Blocks(id) })
	}
	sums := make([]core.Sum, len(slots))
	for i, s := range slots {
		if i < len(good) && good[i] {
			sums[i] = core.SumOf(h.t.Block(s))
		}
	}
	h.LoadSummed(id, good, sums, stopped)
}

func (h *host) LoadSummed(id core.JobID, good []bool, sums []core.Sum, stopped bool) {
	h.t.do(func(m *core.Machine) {
		m.SetSums(id, sums)
		m.LoadEnded(id, good, stopped)
	})
}

func (h *host) LoadStopped(id core.JobID) { h.t.do(func(m *core.Machine) { m.LoadStopped(id) }) }

func (h *host) StoreEnded(id core.JobID, ok bool) {
	h.t.do(func(m *core.Machine) { m.StoreEnded(id, ok) })
}

func (h *host) Serve(keys []core.Key, most int) (out []core.Served) {
	h.t.do(func(m *core.Machine) { out = m.Serve(h.tier, keys, most, prober{h.t}) })
	if out == nil {
		out = make([]core.Served, len(keys))
	}
	return out
}

func (h *host) Recent(most int) []core.Key {
	var ranks map[core.Key]uint64
	h.t.do(func(m *core.Machine) { ranks = m.Recent() })
	keys := slices.SortedFunc(maps.Keys(ranks), func(a, b core.Key) int { return cmp.Compare(ranks[b], ranks[a]) })
	return keys[:min(most, len(keys))]
}

func (h *host) Unpin(pins []core.PinID) { h.t.do(func(m *core.Machine) { m.Unpin(pins) }) }

func (h *host) Wake() {
	if f := h.t.cfg.OnChange; f != nil {
		f()
	}
}
