package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// Machine is the engine's scheduler: which request gets which blocks and when it is computed. It
// has no clock and does no I/O. One goroutine owns it and calls all of its methods.
type Machine struct {
	cfg  Config
	pool *Pool
	conn Connector // nil: no hand-offs

	requests map[kv.RequestID]*request
	waiting  []*request // by arrival
	running  []*request // by arrival
	remote   int        // requests whose KV is on its way
	held     int        // ended requests whose blocks are kept

	flight   []flying // the step in flight, in the order of its batch
	inFlight bool
	stalled  bool // the last running request could not get a block in the last scheduling
	starved  bool // in the last scheduling, somebody could not get blocks
	parking  parking
	tier     tierBook
	resets   []uint64 // tickets of cache resets that wait
	turns    turnBook

	arrivals uint64
	actions  []Action
	stats    Stats
}

type state uint8

const (
	waiting state = iota // in Machine.waiting; with blocks if its KV came from a peer
	remote               // waits for its KV
	loading              // waits for a copy out of the tier
	running              // in Machine.running
	held                 // ended, its blocks are kept
	ended
)

// request is one request while the machine knows it.
type request struct {
	Request
	arrival uint64
	state   state

	tokens   []kv.Token // prompt, then what was sampled
	blocks   []kv.BlockID
	computed int           // tokens whose KV is in blocks
	hashes   []Hash        // of the first full blocks of tokens, as far as known
	offered  int           // blocks given to the prefix cache, as far as it wants them
	starved  bool          // it could not get blocks when it was last tried
	stale    bool          // blocks has KV from before a cache reset
	turn     kv.Generation // lease of its blocks, if they are kept for a next turn
	letGo    bool          // and somebody else needs them

	admitted bool // it has had blocks
	counted  bool // usage.Cached is known
	external int  // tokens that a peer was asked for
	tier     tiered
	lost     *connector.Error // its receive was given up, but may still be written to
	left     bool             // the connector was told its end
	loadErr  *connector.Error // why its KV did not come, if it goes on without
	usage    Usage
	transfer connector.TransferFacts
}

// flying is a request's part in the step in flight. It has references of its own on the blocks, so
// that what the step reads and writes is reused by nobody, whatever becomes of the request.
type flying struct {
	r      *request
	blocks []kv.BlockID
	n      int // tokens computed
	sample bool
}

// New makes a machine. conn may be nil: then parameters of requests are ignored.
func New(cfg Config, conn Connector) (*Machine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Machine{
		cfg: cfg, conn: conn,
		pool:     NewPool(cfg.NumBlocks, cfg.PrefixCaching),
		requests: map[kv.RequestID]*request{},
		tier:     tierBook{copies: map[uint64]*copying{}},
		stats:    Stats{Finished: map[connector.FinishReason]uint64{}},
	}, nil
}

// Step takes one event and gives what to do about it. now must not go back.
func (m *Machine) Step(now time.Time, e Event) []Action {
	m.actions = nil
	progress := false
	switch e := e.(type) {
	case Add:
		if err := m.add(now, e.Request); err != nil {
			m.do(Refused{ID: e.ID, Err: err})
		}
	case Abort:
		if r := m.requests[e.ID]; r != nil && r.state != held {
			m.finish(now, r, connector.FinishAbort, e.Err)
		}
	case ReleaseHold:
		m.do(HoldReleased{ID: e.ID, Released: m.conn != nil && m.conn.Release(e.ID, e.Lease)})
	case StepDone:
		m.stepDone(now, e)
	case ConnectorOutput:
		if m.conn != nil {
			progress = m.apply(now, m.conn.Update(now, e.WorkerOutput))
		}
	case ResetCache:
		m.resetCache(e)
	case GiveUpReset:
		m.giveUpReset(e.Ticket)
	case TierFound:
		m.tierFound(e)
	case TierProgress:
		m.tierProgress(now, e)
	case TierLoaded:
		m.tierLoaded(e)
	case TierStored:
		m.tierStored(e)
	case Drain:
		m.turns.over = true
	case Tick:
		m.tierExpire(now)
		if m.conn != nil {
			progress = m.apply(now, m.conn.Expire(now))
		}
	}
	m.resetWaiting()
	batch := m.schedule(now)
	if m.watchParking(now, progress) {
		batch = m.schedule(now)
	}
	m.reclaim()
	if m.conn != nil {
		if meta, ok := m.conn.Metadata(now); ok {
			// Before the answers: whoever has one may ask the workers for what it names at once.
			m.actions = slices.Insert(m.actions, 0, Action(SendMeta{Meta: meta}))
		}
	}
	if len(batch) > 0 {
		m.do(RunStep{Batch: batch})
	}
	actions := m.actions
	m.actions = nil
	return actions
}

// Deadline is when to call Step with Tick; false if there is nothing to wait for.
func (m *Machine) Deadline() (time.Time, bool) {
	at, ok := m.tierDeadline()
	sooner := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if m.conn != nil {
		if t, due := m.conn.Deadline(); due {
			sooner(t)
		}
	}
	if m.parking.on {
		sooner(m.parking.since.Add(m.cfg.ParkTimeout))
	}
	return at, ok
}

// Stats is a snapshot.
func (m *Machine) Stats() Stats {
	s := m.stats
	s.Finished = make(map[connector.FinishReason]uint64, len(m.stats.Finished))
	for k, v := range m.stats.Finished {
		s.Finished[k] = v
	}
	s.BlocksFree, s.BlocksTotal, s.BlocksCached = m.pool.Free(), m.pool.Total(), m.pool.Cached()
	s.Running, s.Waiting, s.WaitingRemote, s.Held = len(m.running), len(m.waiting), m.remote, m.held
	s.Looking, s.Loading, s.Copies = len(m.tier.looking), m.tier.loading, len(m.tier.copies)
	return s
}

// Live is the number of requests that have not ended.
func (m *Machine) Live() int { return len(m.requests) - m.held }

// Quiet reports that nothing is left: no request lives, no blocks are held, no step and no copy is in
// flight.
func (m *Machine) Quiet() bool {
	return len(m.requests) == 0 && !m.inFlight && len(m.tier.copies) == 0
}

// Busy tells whether a step is in flight.
func (m *Machine) Busy() bool { return m.inFlight }

// IDs is the requests that have not ended, by arrival.
func (m *Machine) IDs() []kv.RequestID {
	var live []*request
	for _, r := range m.requests {
		if r.state != held {
			live = append(live, r)
		}
	}
	slices.SortFunc(live, byArrival)
	ids := make([]kv.RequestID, len(live))
	for i, r := range live {
		ids[i] = r.ID
	}
	return ids
}

// Receiving is the blocks of a request whose KV is on its way: the first prefix of them was found in
// the prefix cache, the rest is the peer's to write. ok is false for any other request.
func (m *Machine) Receiving(id kv.RequestID) (blocks []kv.BlockID, prefix int, ok bool) {
	r := m.requests[id]
	if r == nil || r.state != remote {
		return nil, 0, false
	}
	return slices.Clone(r.blocks), r.computed / m.cfg.BlockSize, true
}

func (m *Machine) do(a Action) { m.actions = append(m.actions, a) }

func (m *Machine) add(now time.Time, in Request) error {
	switch n, need := len(in.Prompt), m.blocksFor(len(in.Prompt)); {
	case n == 0:
		return ErrEmptyPrompt
	case m.requests[in.ID] != nil:
		return ErrDuplicate
	case need > m.cfg.NumBlocks:
		m.giveBack(now, in)
		return &NeverFitsError{Prompt: n, Need: need, Total: m.cfg.NumBlocks}
	case n >= m.cfg.Context():
		m.giveBack(now, in)
		return &TooLongError{Prompt: n, Context: m.cfg.Context()}
	case len(m.waiting)+m.remote+m.tier.loading+min(max(in.Together, 1), m.cfg.MaxWaiting) > m.cfg.MaxWaiting:
		return &QueueFullError{Limit: m.cfg.MaxWaiting, Together: in.Together}
	}
	if m.conn == nil {
		in.Params = nil
	}
	if in.Params != nil {
		if err := m.arrived(now, in); err != nil {
			return err
		}
	}
	m.arrivals++
	r := &request{Request: in, arrival: m.arrivals, tokens: slices.Clip(in.Prompt)}
	r.usage.Prompt = len(in.Prompt)
	m.requests[in.ID] = r
	m.waiting = append(m.waiting, r)
	m.stats.PromptTokens += uint64(len(in.Prompt))
	m.tierBegin(now, r)
	return nil
}

func (m *Machine) arrived(now time.Time, in Request) error {
	r := connector.Request{ID: in.ID, Params: *in.Params, PromptTokens: len(in.Prompt), Digest: Digest(handedOver(in), in.Keys)}
	if n := connector.EarlierTokens(in.Params, len(in.Prompt), m.cfg.BlockSize); n > 0 {
		r.Earlier = Digest(in.Prompt[:n], in.Keys)
	}
	return m.conn.Arrived(now, r)
}

// giveBack has a prefill engine told that a decode request which can never run here does not need its
// KV: as if it had come and been aborted. One that finds the queue full may be sent elsewhere.
func (m *Machine) giveBack(now time.Time, in Request) {
	if m.conn == nil || in.Params == nil || !in.Params.DoRemotePrefill {
		return
	}
	if m.arrived(now, in) == nil {
		m.conn.Finished(now, in.ID, connector.FinishAbort, kv.BlockIDs{nil}, 0)
	}
}

// handedOver is the tokens of a prompt whose KV is handed over: all, unless a decode leg is told of
// fewer.
func handedOver(in Request) []kv.Token {
	if n := in.Params.RemoteNumTokens; in.Params.DoRemotePrefill && n > 0 && n < len(in.Prompt) {
		return in.Prompt[:n]
	}
	return in.Prompt
}

// finish ends a request in any state: its reader gets the last output with what was sampled last,
// its blocks go back unless the connector wants them held.
func (m *Machine) finish(now time.Time, r *request, why connector.FinishReason, err error, last ...kv.Token) {
	m.detach(r)
	m.tierEnd(r)
	out := Output{ID: r.ID, Tokens: last, Finish: why, Err: err, Transfer: r.transfer}
	if r.loadErr != nil {
		out.LoadErr = r.loadErr
	}
	hold := r.lost != nil
	if r.Params != nil && !r.left {
		hold, out.Params = m.conn.Finished(now, r.ID, why, kv.BlockIDs{slices.Clone(r.blocks)}, r.computed)
		if hold && out.Params != nil && out.Params.DoRemoteDecode {
			m.keep(r, out.Params)
		}
	}
	r.usage.Blocks = len(r.blocks)
	out.Usage = r.usage
	m.stats.Finished[why]++
	m.do(Emit{Output: out})
	if hold {
		r.state = held
		m.held++
		return
	}
	m.drop(r)
}

// detach takes a request out of the queue that its state names.
func (m *Machine) detach(r *request) {
	switch r.state {
	case waiting:
		m.waiting = remove(m.waiting, r)
	case running:
		m.running = remove(m.running, r)
	case remote:
		m.remote--
	case loading:
		m.tier.loading--
	case held:
		m.held--
	}
}

// strip takes a request out of its queue and its blocks from it.
func (m *Machine) strip(r *request) {
	m.detach(r)
	m.pool.Release(r.blocks)
	r.blocks, r.computed, r.offered, r.stale = nil, 0, 0, false
}

// drop gives a request's blocks back and forgets it.
func (m *Machine) drop(r *request) {
	m.pool.Release(r.blocks)
	r.blocks = nil
	r.state = ended
	m.turns.forget(r)
	delete(m.requests, r.ID)
}

// apply carries out what the connector is certain of. It reports whether a receive or hold ended.
func (m *Machine) apply(now time.Time, outcomes []connector.Outcome) (progress bool) {
	for _, o := range outcomes {
		r := m.requests[o.ID]
		switch {
		case r != nil && r.state == held:
			// Whatever it is called, it says that nobody reads or writes the blocks any more.
			m.detach(r)
			m.drop(r)
			progress = true
		case r != nil && r.state == remote && r.lost == nil && o.Kind == connector.Received:
			r.transfer = o.Transfer
			m.received(r)
			progress = true
		case r != nil && r.state == remote:
			m.loadFailed(now, r, o.Err)
			progress = true
		default:
			m.stats.StrayOutcomes++
		}
	}
	return progress
}

// received makes a request ready for the batch: its KV is in place, and the last prompt token is
// left to compute, because its logits are not KV.
func (m *Machine) received(r *request) {
	m.detach(r)
	m.stats.Received++
	had := r.computed
	r.computed = min(had+r.external, len(r.tokens)-1)
	r.usage.External = r.computed - had
	m.stats.ExternalTokens += uint64(r.usage.External)
	m.offer(r)
	m.tierStore(r)
	m.enqueue(r)
}

// stepDone books what the step in flight has computed.
func (m *Machine) stepDone(now time.Time, e StepDone) {
	if !m.inFlight {
		panic("engine core: StepDone without a step in flight")
	}
	if e.Err == nil && len(e.Results) != len(m.flight) {
		panic(fmt.Sprintf("engine core: StepDone with %d results for %d sequences", len(e.Results), len(m.flight)))
	}
	for i, f := range m.flight {
		switch {
		case f.r.state != running: // aborted meanwhile
		case e.Err != nil:
			m.finish(now, f.r, connector.FinishError, &ModelError{Err: e.Err})
		default:
			m.advance(now, f, e.Results[i])
		}
	}
	for _, f := range m.flight {
		m.pool.Release(f.blocks)
	}
	m.flight, m.inFlight = nil, false
	m.stats.Steps++
}

// advance books one sequence of a finished step.
func (m *Machine) advance(now time.Time, f flying, res Result) {
	r := f.r
	if f.sample && res.Err != nil {
		m.finish(now, r, connector.FinishError, &ModelError{Err: res.Err})
		return
	}
	prompt := max(0, min(r.computed+f.n, len(r.Prompt))-r.computed)
	r.usage.ComputedPrompt += prompt
	m.stats.ComputedPrompt += uint64(prompt)
	r.computed += f.n
	m.offer(r)
	m.tierStore(r)
	if !f.sample {
		return
	}
	r.tokens = append(r.tokens, res.Token)
	r.usage.Completion++
	m.stats.CompletionTokens++
	switch {
	case res.Stop, slices.Contains(r.StopTokens, res.Token), !r.IgnoreEOS && slices.Contains(m.cfg.EOS, res.Token):
		m.finish(now, r, connector.FinishStop, nil, res.Token)
	case r.MaxTokens > 0 && r.usage.Completion >= r.MaxTokens, len(r.tokens) >= m.cfg.Context():
		m.finish(now, r, connector.FinishLength, nil, res.Token)
	default:
		m.do(Emit{Output: Output{ID: r.ID, Tokens: []kv.Token{res.Token}}})
	}
}

// offer gives blocks that are full of computed tokens to the prefix cache. Nobody writes them any
// more: the next token goes behind them.
func (m *Machine) offer(r *request) {
	if !m.cfg.PrefixCaching || r.stale {
		return
	}
	full := r.computed / m.cfg.BlockSize
	for hashes := m.hashTo(r, full); r.offered < full; r.offered++ {
		m.pool.Cache(r.blocks[r.offered], hashes[r.offered])
	}
}

// hashTo gives the hashes of the first n blocks of a request's tokens.
func (m *Machine) hashTo(r *request, n int) []Hash {
	blockSize := m.cfg.BlockSize
	for i := len(r.hashes); i < n; i++ {
		parent := r.Keys.root(m.cfg.HashSeed)
		if i > 0 {
			parent = r.hashes[i-1]
		}
		r.hashes = append(r.hashes, chain(parent, r.tokens[i*blockSize:(i+1)*blockSize]))
	}
	return r.hashes[:n]
}

func (m *Machine) blocksFor(tokens int) int { return (tokens + m.cfg.BlockSize - 1) / m.cfg.BlockSize }

// enqueue puts a request among the waiting ones, where its arrival places it.
func (m *Machine) enqueue(r *request) {
	r.state = waiting
	m.waiting = insert(m.waiting, r)
}

func byArrival(a, b *request) int {
	switch {
	case a.arrival < b.arrival:
		return -1
	case a.arrival > b.arrival:
		return 1
	}
	return 0
}

func insert(list []*request, r *request) []*request {
	i, _ := slices.BinarySearchFunc(list, r, byArrival)
	return slices.Insert(list, i, r)
}

func remove(list []*request, r *request) []*request {
	i, ok := slices.BinarySearchFunc(list, r, byArrival)
	if !ok {
		panic(fmt.Sprintf("engine core: request %s is in no queue", r.ID))
	}
	return slices.Delete(list, i, i+1)
}
