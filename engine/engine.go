package engine

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// Engine is one running engine. Its methods may be called from any goroutine.
type Engine struct {
	cfg      Config // with defaults
	parts    *parts
	coords   Coordinates
	context  int // tokens
	adapters map[string]*model.Adapter

	inbox   chan message
	steps   chan step       // to the model goroutine; closed to end it
	results chan stepResult // from it
	ended   chan struct{}   // closed when the loop has ended
	modeled chan struct{}   // closed when the model goroutine has ended
	final   Stats           // set before ended is closed

	tickets atomic.Uint64 // of cache resets
	closing atomic.Bool
	close   struct {
		sync.Once
		err error
	}
}

// New starts an engine: its transfer agent, its side channel and its loop. It reports everything
// that is wrong with the configuration, and an address in use by name. The caller ends the engine
// with Close.
func New(cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	shape := cfg.Model.Config()
	adapters := map[string]*model.Adapter{}
	for _, name := range cfg.Adapters {
		var err error
		if adapters[name], err = model.SeededAdapter(shape, name); err != nil {
			return nil, err
		}
	}
	p, err := assemble(cfg)
	if err != nil {
		return nil, err
	}
	machineConfig := core.Config{
		BlockSize: cfg.BlockSize, NumBlocks: cfg.NumBlocks, MaxBatchTokens: cfg.MaxBatchTokens, MaxRunning: cfg.MaxRunning,
		MaxWaiting: cfg.MaxQueue, MaxContext: shape.MaxPosition, EOS: shape.EOS, PrefixCaching: !cfg.NoPrefixCache,
		LoadFailure: cfg.LoadFailurePolicy, ParkTimeout: cfg.ParkTimeout,
		Tier: cfg.Tier.on(), TierTimeout: cfg.Tier.Timeout, HashSeed: cfg.Tier.HashSeed,
	}
	machine, err := core.New(machineConfig, p.half)
	if err != nil {
		ended, end := context.WithCancel(context.Background())
		end()
		_ = p.close(ended)
		return nil, err
	}
	e := &Engine{
		cfg: cfg, parts: p, coords: p.coordinates(cfg), context: machineConfig.Context(), adapters: adapters,
		inbox: make(chan message, inboxDepth), steps: make(chan step, 1), results: make(chan stepResult, 1),
		ended: make(chan struct{}), modeled: make(chan struct{}),
	}
	go e.runModel()
	go newLoop(e, machine).run()
	return e, nil
}

// Submit admits a request, or refuses it with a *RequestError: KindInvalid, KindOverload or
// KindUnavailable. It does not wait for the model. When ctx ends, the request is aborted: it is the
// client's context and not one of this call only.
func (e *Engine) Submit(ctx context.Context, r Request) (*Stream, error) {
	if err := e.check(&r); err != nil {
		return nil, err
	}
	unavailable := &RequestError{Request: r.ID, Kind: KindUnavailable, Phase: "submit", Err: errClosing}
	if e.closing.Load() {
		return nil, unavailable
	}
	l := newLive(e, r)
	reply := make(chan *RequestError, 1)
	select {
	case e.inbox <- submit{live: l, reply: reply}:
	case <-e.ended:
		return nil, unavailable
	}
	select {
	case err := <-reply:
		if err != nil {
			return nil, err
		}
	case <-e.ended:
		return nil, unavailable
	}
	l.follow(ctx)
	return l.stream, nil
}

// Coordinates is what a router must know. It does not change.
func (e *Engine) Coordinates() Coordinates { return e.coords }

// Stats is a snapshot, taken by the loop. After Close it is the last one.
func (e *Engine) Stats() Stats {
	reply := make(chan Stats, 1)
	select {
	case e.inbox <- ask{reply: reply}:
	case <-e.ended:
		return e.final
	}
	select {
	case s := <-reply:
		return s
	case <-e.ended:
		return e.final
	}
}

// Release lets go what an ended request holds for a peer under a lease, as the Params of its last Output
// name it (RemoteRequestID, Lease): nobody will ask for it. The blocks come back when nothing reads them
// any more, which does not wait for the end of the lease; a peer that asks all the same is told. It
// answers false, and nothing happens, if there is no such hold: the request runs still, or the hold has
// ended or was released before. A closed engine holds nothing and answers an error.
func (e *Engine) Release(id kv.RequestID, lease kv.Generation) (bool, error) {
	reply := make(chan bool, 1)
	e.send(release{id: id, lease: lease, reply: reply})
	select {
	case ok := <-reply:
		return ok, nil
	case <-e.ended:
		return false, errClosing
	}
}

// ResetPrefixCache forgets what every block of the prefix cache holds and tells how many blocks that
// were: nothing that was computed or received before is found there afterwards, by any prompt.
// The CPU tier's memory is forgotten with it; files and peers keep theirs, which later prompts may load.
// Requests that run go on. While KV is on its way or blocks are held for peers it fails with a
// *CacheBusyError; with wait, only when ctx ends. A reset that waits keeps new hand-offs waiting
// for their blocks, so that its time comes. A closing engine answers that it closes.
func (e *Engine) ResetPrefixCache(ctx context.Context, wait bool) (blocks int, err error) {
	ticket := e.tickets.Add(1)
	reply := make(chan core.CacheReset, 1)
	e.send(reset{ticket: ticket, wait: wait, reply: reply})
	done := ctx.Done()
	for {
		select {
		case r := <-reply:
			return r.Blocks, r.Err
		case <-done:
			done = nil
			e.send(giveUpReset{ticket})
		case <-e.ended:
			return 0, errClosing
		}
	}
}

// Model describes the model that is served.
func (e *Engine) Model() ModelInfo {
	shape := e.cfg.Model.Config()
	return ModelInfo{Name: e.cfg.ServedName, Adapters: slices.Clone(e.cfg.Adapters), MaxContext: e.context, Vocab: shape.Vocab, EOS: shape.EOS}
}

// Tokenizer is the model's. It is immutable.
func (e *Engine) Tokenizer() *model.Tokenizer { return e.cfg.Model.Tokenizer() }

// MaxContext is the number of tokens that prompt and answer may have together: the model's context
// or what the blocks can hold, whichever is less. A prompt may have one less.
func (e *Engine) MaxContext() int { return e.context }

// Ready reports nil when requests can be served: the loop runs and the side channel listens. After
// Close has been called it says so.
func (e *Engine) Ready() error {
	if e.closing.Load() {
		return errClosing
	}
	return nil
}

// Close refuses new requests at once, lets those that live end until ctx does, aborts the others
// and stops everything. Blocks held for a peer are waited for until ctx ends, too. It returns when
// no goroutine of the engine is left and its memory is unmapped. It may be called again, also to
// cut an earlier call short; all calls return the same.
func (e *Engine) Close(ctx context.Context) error {
	e.closing.Store(true)
	e.send(drain{})
	select {
	case <-e.ended:
	case <-ctx.Done():
		e.send(giveUp{})
		<-e.ended
	}
	e.close.Do(func() {
		close(e.steps)
		<-e.modeled // nobody computes in the cache any more
		e.close.err = e.parts.close(ctx)
	})
	return e.close.err
}

// send gives a message to the loop, which never blocks; nothing happens if it has ended.
func (e *Engine) send(m message) {
	select {
	case e.inbox <- m:
	case <-e.ended:
	}
}
