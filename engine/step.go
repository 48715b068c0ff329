package engine

import (
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/engine/model"
)

// step is one batch for the model goroutine.
type step struct {
	batch    []core.Sequence
	sampling []model.Sampling // per sequence
	adapters []*model.Adapter // per sequence; nil: none
}

// stepResult is what came of it, per sequence; err, if set, is of all.
type stepResult struct {
	results  []core.Result
	sampled  []bool
	logProbs []float64
	err      error
}

// runModel is the model goroutine: it owns the runner, the sampler and, while a step is in flight,
// the blocks of its batch. results has room for the one step that can be in flight.
func (e *Engine) runModel() {
	defer close(e.modeled)
	m := &stepper{
		runner: model.NewRunner(e.cfg.Model, e.cfg.Threads),
		cache:  e.parts.cache,
	}
	if e.cfg.Dedicated {
		defer m.runner.Dedicate(func() { lowerPriority(e.cfg.Nice) })()
	}
	for s := range e.steps {
		if e.cfg.onStep != nil {
			e.cfg.onStep()
		}
		e.results <- m.compute(s)
	}
}

// lowerPriority makes the calling thread nicer to others than it was. That it may not costs only what it
// is for.
func lowerPriority(by int) {
	if by == 0 {
		return
	}
	thread := unix.Gettid()
	if now, err := unix.Getpriority(unix.PRIO_PROCESS, thread); err == nil {
		now = 20 - now // the system call answers so that no answer is negative
		_ = unix.Setpriority(unix.PRIO_PROCESS, thread, min(now+by, 19))
	}
}

// stepper computes steps. It belongs to the model goroutine.
type stepper struct {
	runner  *model.Runner
	cache   *model.Cache
	sampler model.Sampler
	logits  model.Logits
	input   []model.Sequence
}

func (m *stepper) compute(s step) stepResult {
	m.input = m.input[:0]
	for i, q := range s.batch {
		m.input = append(m.input, model.Sequence{Tokens: q.Tokens, Start: q.Start, Blocks: q.Blocks, Logits: q.Sample, Adapter: s.adapters[i]})
	}
	if err := m.runner.Forward(m.cache, m.input, &m.logits); err != nil {
		return stepResult{err: err}
	}
	r := stepResult{
		results:  make([]core.Result, len(s.batch)),
		sampled:  make([]bool, len(s.batch)),
		logProbs: make([]float64, len(s.batch)),
	}
	for i, q := range s.batch {
		if !q.Sample {
			continue
		}
		choice, err := m.sampler.Choose(m.logits.Row(i), s.sampling[i], q.Start+len(q.Tokens))
		r.results[i] = core.Result{Token: choice.Token, Err: err}
		r.sampled[i], r.logProbs[i] = true, choice.LogProb
	}
	return r
}
