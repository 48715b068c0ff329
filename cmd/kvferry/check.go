package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvferry/kvferry/engine"
)

const (
	// checkTimeout ends a check that hangs. It leaves room for stopping the processes, so that the
	// whole command ends within 45 s.
	checkTimeout = 40 * time.Second
	// settleTimeout is how long blocks may take to come home after the last answer: well below any
	// lease, so that a block that only a lease gives back is found.
	settleTimeout = 5 * time.Second
	settlePoll    = 20 * time.Millisecond
	freeBlocks    = "kvferry_engine_blocks_free"

	computedPrompt = "kvferry_engine_computed_prompt_tokens_total"
)

// checker compares a pair with a single engine.
type checker struct {
	began    time.Time
	flags    upFlags
	out      *lockedWriter
	progress *progress

	pair         *pair
	single       *child
	mutant       *child // a decode engine that damages what it receives
	mutantRouter *child
	baseline     map[*child]float64

	ended    func() error // of the command: a signal has come
	requests int
	turns    int // of a conversation that P has read back
	failures []string
}

// runCheck is `kvferry up --check`. It prints one summary line last.
func runCheck(ctx context.Context, w io.Writer, f upFlags) error {
	c := newChecker(ctx, w, f)
	cases, err := c.check(ctx, c, "the pair and the single engine do not agree")
	if err != nil {
		return err
	}
	turns := ""
	if c.turns > 0 {
		turns = fmt.Sprintf(" %d turns read back from D,", c.turns)
	}
	c.out.linef("check passed: %d cases, %d requests equal to a single engine token by token, %d mutants caught, %s over %s, at most 1 prompt token computed on D,%s all blocks home, %s",
		len(cases), c.requests, len(engine.KVFaults), f.pair.mode, chosenTransport(f.pair.transport), turns, elapsed(c.began))
	return nil
}

// checkSite is the engines that a check tries its cases on.
type checkSite interface {
	start(ctx context.Context) error
	run(ctx context.Context, cases []checkCase)
	stop() error
}

func newChecker(ctx context.Context, w io.Writer, f upFlags) *checker {
	c := &checker{flags: f, out: newLockedWriter(w), progress: newProgress(w), baseline: map[*child]float64{}, ended: ctx.Err, began: time.Now()}
	c.out.verbose, c.out.quiet = f.verbose, !f.verbose
	return c
}

// check starts a site, tries the cases on it and stops it. It prints the summary line of a check that has
// failed, whose error is disagree.
func (c *checker) check(ctx context.Context, s checkSite, disagree string) (cases []checkCase, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, checkTimeout, fmt.Errorf("the check did not end within %v", checkTimeout))
	defer cancel()
	if err := s.start(ctx); err != nil {
		c.failf("start: %v", err)
	} else if cases, err = c.cases(); err != nil {
		c.failf("start: %v", err)
	} else {
		s.run(ctx, cases)
	}
	if err := s.stop(); err != nil {
		c.failf("stop: %v", err)
	}
	c.progress.clear()
	if c.interrupted() {
		return nil, interrupted(c.failures)
	}
	if n := len(c.failures); n > 0 {
		c.out.linef("check FAILED: %d faults in %d cases, %d requests; the first: %s; %s", n, len(cases), c.requests, c.failures[0], elapsed(c.began))
		return nil, errors.New(disagree)
	}
	return cases, nil
}

// chosenTransport is what a transport setting must lead to between two engines on this machine.
func chosenTransport(setting string) string {
	if setting == engine.TransportAuto {
		return engine.TransportSHM
	}
	return setting
}

// interrupted tells whether what fails from now on fails by a signal.
func (c *checker) interrupted() bool { return c.ended() != nil }

// interrupted is the end of a check that a signal has ended, with the faults that it had found before.
func interrupted(faults []string) error {
	if len(faults) > 0 {
		return fmt.Errorf("interrupted; the check had found %d faults before, the first: %s", len(faults), faults[0])
	}
	return errors.New("interrupted before the check could tell")
}

func (c *checker) failf(format string, args ...any) {
	if c.interrupted() {
		return
	}
	msg := fmt.Sprintf(format, args...)
	c.failures = append(c.failures, msg)
	c.progress.clear()
	c.out.linef("FAULT %s", msg)
}

// start brings up the pair, the single engine, and a second decode engine and router for mutants.
func (c *checker) start(ctx context.Context) error {
	c.progress.show("starting five engines and routers")
	o := c.flags.pair
	o.noDecodeCache = len(o.kvFaults) > 0
	o.readAll = true // each of the cases is to go from engine to engine
	mutated := o
	mutated.noDecodeCache, mutated.kvFaults = true, nil
	for _, f := range engine.KVFaults {
		mutated.kvFaults = append(mutated.kvFaults, string(f))
	}
	var errs [3]error
	var wg sync.WaitGroup
	wg.Go(func() { c.pair, errs[0] = startPair(ctx, "127.0.0.1:0", o, c.out) })
	wg.Go(func() {
		c.single, errs[1] = startChild(ctx, "the single engine", c.out.passWarnings("single"), o.engineArgs("both")...)
	})
	wg.Go(func() {
		c.mutant, errs[2] = startChild(ctx, "the mutant engine", c.out.passWarnings("mutant"), mutated.engineArgs("decode")...)
	})
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	var err error
	c.mutantRouter, err = startChild(ctx, "the mutants' router", c.out.passWarnings("router"), "router", "--listen", "127.0.0.1:0", "--log-format", "json",
		"--prefill", c.pair.prefill.ready["url"], "--decode", c.mutant.ready["url"])
	if err != nil {
		return err
	}
	for _, e := range c.engines() {
		if c.baseline[e], err = gauge(ctx, e.ready["url"], freeBlocks); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) engines() []*child {
	return []*child{c.pair.prefill, c.pair.decode, c.single, c.mutant}
}

func (c *checker) stop() error {
	var errs []error
	if c.pair != nil {
		errs = append(errs, c.pair.stop())
	}
	for _, p := range []*child{c.mutantRouter, c.mutant, c.single} {
		if p != nil {
			p.stop()
			errs = append(errs, p.err)
		}
	}
	return errors.Join(errs...)
}

// cases are the fixed prompts for the context that the engines really have.
func (c *checker) cases() ([]checkCase, error) {
	context, err := strconv.Atoi(c.single.ready["context"])
	if err != nil {
		return nil, fmt.Errorf("the single engine's ready line has no context: %v", c.single.ready)
	}
	return checkCases(c.flags.pair.blockSize, context), nil
}

func (c *checker) run(ctx context.Context, cases []checkCase) {
	c.selfTest(ctx)
	for i, tc := range cases {
		if ctx.Err() != nil {
			c.failf("case %d of %d not run: %v", i+1, len(cases), context.Cause(ctx))
			return
		}
		c.progress.show(fmt.Sprintf("[%d/%d] %s", i+1, len(cases), tc.name))
		if err := c.runCase(ctx, tc); err != nil {
			c.failf("%s: %v", tc.name, err)
		}
	}
	if c.flags.pair.bidirectional {
		c.progress.show("turns of a conversation")
		if err := c.conversation(ctx); err != nil {
			c.failf("conversation: %v", err)
		}
	}
	if err := c.settled(ctx, c.engines()...); err != nil {
		c.failf("blocks: %v", err)
	}
}

// selfTest sends one prompt per mutant through the damaging engine. If the tokens stay the same, the
// check could not see such damage, and must not pass.
func (c *checker) selfTest(ctx context.Context) {
	tc := checkCase{name: "self-test", prompts: []string{text(90, 6*c.flags.pair.blockSize+1)}, maxTokens: 32, ignoreEOS: true}
	want, err := c.ask(ctx, c.single.ready, tc, tc.prompts[0], nil)
	if err != nil {
		c.failf("self-test: single engine: %v", err)
		return
	}
	for _, fault := range engine.KVFaults {
		c.progress.show("self-test: " + string(fault))
		got, err := c.ask(ctx, c.mutantRouter.ready, tc, tc.prompts[0], nil)
		if err != nil {
			c.failf("self-test: %s: %v", fault, err)
			return
		}
		if slices.Equal(got.Tokens, want.Tokens) {
			c.failf("self-test: mutant %s does not change the tokens, so this check cannot see such damage", fault)
		}
	}
}

// runCase sends the case's prompts to the single engine and to the pair, and compares.
func (c *checker) runCase(ctx context.Context, tc checkCase) error {
	want, stops, err := c.wanted(ctx, tc)
	if err != nil {
		return err
	}
	got, err := c.askAll(ctx, c.pair.router.ready, tc, stops)
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	for i := range got {
		c.requests++
		if !slices.Equal(got[i].Tokens, want[i].Tokens) || got[i].Finish != want[i].Finish {
			return fmt.Errorf("prompt %d: the pair gives %v (%s), a single engine %v (%s)", i, got[i].Tokens, got[i].Finish, want[i].Tokens, want[i].Finish)
		}
		if err := c.checkDecode(ctx, got[i]); err != nil {
			return fmt.Errorf("prompt %d: %w", i, err)
		}
	}
	return nil
}

// wanted is what a single engine answers to the case's prompts, and the stop tokens that were sent.
func (c *checker) wanted(ctx context.Context, tc checkCase) (want []*completion, stops [][]int, err error) {
	if want, err = c.askAll(ctx, c.single.ready, tc, nil); err == nil && tc.stopFirst {
		for _, w := range want {
			stops = append(stops, w.Tokens[:1])
		}
		want, err = c.askAll(ctx, c.single.ready, tc, stops)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("single engine: %w", err)
	}
	return want, stops, nil
}

// checkDecode looks at what the decode engine says of a request: an equal answer is worth nothing
// if D computed the prompt itself.
func (c *checker) checkDecode(ctx context.Context, got *completion) error {
	line, err := c.pair.decodeLog.wait(ctx, got.ID, settleTimeout)
	switch {
	case err != nil:
		return fmt.Errorf("decode engine: %w", err)
	case line.ComputedPrompt > 1:
		return fmt.Errorf("the decode engine computed %d prompt tokens itself, at most 1 is allowed: %s", line.ComputedPrompt, line)
	case line.Blocks < 1:
		return fmt.Errorf("no block came from the prefill engine: %s", line)
	case line.Transport != chosenTransport(c.flags.pair.transport):
		return fmt.Errorf("the KV came over %q, not over the chosen %q: %s", line.Transport, chosenTransport(c.flags.pair.transport), line)
	}
	return nil
}

// askAll sends all prompts of a case at once.
func (c *checker) askAll(ctx context.Context, to readyLine, tc checkCase, stops [][]int) ([]*completion, error) {
	return c.each(tc, stops, func(prompt string, stop []int) (*completion, error) { return c.ask(ctx, to, tc, prompt, stop) })
}

// each asks for all prompts of a case at once.
func (c *checker) each(tc checkCase, stops [][]int, ask func(prompt string, stop []int) (*completion, error)) ([]*completion, error) {
	answers := make([]*completion, len(tc.prompts))
	errs := make([]error, len(tc.prompts))
	var wg sync.WaitGroup
	for i, prompt := range tc.prompts {
		var stop []int
		if stops != nil {
			stop = stops[i]
		}
		wg.Go(func() { answers[i], errs[i] = ask(prompt, stop) })
	}
	wg.Wait()
	return answers, errors.Join(errs...)
}

func (c *checker) ask(ctx context.Context, to readyLine, tc checkCase, prompt string, stop []int) (*completion, error) {
	return c.askWith(ctx, to, tc, prompt, stop, nil)
}

// askWith is ask with kv_transfer_params.
func (c *checker) askWith(ctx context.Context, to readyLine, tc checkCase, prompt string, stop []int, kv any) (*completion, error) {
	got, err := complete(ctx, to["url"], completionRequest{
		Model: c.single.ready["model"], Prompt: prompt, MaxTokens: tc.maxTokens, ReturnTokenIDs: true,
		StopTokenIDs: stop, IgnoreEOS: tc.ignoreEOS, Stream: tc.stream, KV: kv,
	})
	if err != nil {
		return nil, err
	}
	if len(got.Tokens) == 0 {
		return nil, fmt.Errorf("the answer to %.20q… has no tokens", prompt)
	}
	return got, nil
}

// settled waits until each engine has as many free blocks as before the first request.
func (c *checker) settled(ctx context.Context, engines ...*child) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for _, e := range engines {
		for {
			free, err := gauge(ctx, e.ready["url"], freeBlocks)
			if err == nil && free == c.baseline[e] {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s has %v free blocks, %v before the first request (%v)", e.name, free, c.baseline[e], err)
			case <-time.After(settlePoll):
			}
		}
	}
	return nil
}
