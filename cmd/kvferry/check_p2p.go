package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/tier"
)

const tierReady = "kvferry_tier_blocks_ready"

// tierInUse are the blocks of a CPU tier that are neither free nor just kept: none, when all is done.
var tierInUse = []string{"kvferry_tier_blocks_writing", "kvferry_tier_blocks_pinned", "kvferry_tier_blocks_quarantined", "kvferry_tier_peer_pins"}

// rackChecker compares two engines that share CPU caches with a single engine that has none.
type rackChecker struct {
	*checker
	rack    *rack
	damaged *child       // damages what it keeps, after the checksum was taken
	unseen  *child       // before it was: no checksum sees that
	asked   atomic.Int64 // ids of transactions
	tokens  int          // that came from peers
}

// runRackCheck is `kvferry up --topology p2p --check`. It prints one summary line last.
func runRackCheck(ctx context.Context, w io.Writer, f upFlags) error {
	c := &rackChecker{checker: newChecker(ctx, w, f)}
	cases, err := c.check(ctx, c, "two engines that share KV blocks and a single engine do not agree")
	if err != nil {
		return err
	}
	c.out.linef("check passed: %d cases, %d requests equal to a single engine token by token, %d tokens from %s over %s, at most one block computed, %d mutants caught, all blocks home, %s",
		len(cases), c.requests, c.tokens, c.from(), chosenTransport(f.pair.transport), len(tier.Faults), elapsed(c.began))
	return nil
}

// from says where the second engine gets blocks.
func (c *rackChecker) from() string {
	if c.rack.store != nil {
		return "the store"
	}
	return "the other engine's CPU cache"
}

// start brings up the engines of the topology, the single one, and two that damage what they keep.
func (c *rackChecker) start(ctx context.Context) error {
	c.progress.show("starting five engines")
	o := rackOptions{pair: c.flags.pair, cpuCache: c.flags.cpuCache, withStore: c.flags.topology == topologyStore, faults: c.flags.tierFaults}
	var err error
	if c.rack, err = startRack(ctx, [2]string{"127.0.0.1:0", "127.0.0.1:0"}, o, c.out); err != nil {
		return err
	}
	var faults []string
	for _, f := range tier.Faults {
		faults = append(faults, string(f))
	}
	var errs [3]error
	var starting sync.WaitGroup
	starting.Go(func() {
		c.single, errs[0] = startChild(ctx, "the single engine", c.out.passWarnings("single"), c.flags.pair.engineArgs("both")...)
	})
	starting.Go(func() {
		c.damaged, _, errs[1] = c.rack.startEngine(ctx, "the damaging engine", "127.0.0.1:0", "--inject-tier-fault", strings.Join(faults, ","))
	})
	starting.Go(func() {
		c.unseen, _, errs[2] = c.rack.startEngine(ctx, "the lying engine", "127.0.0.1:0", "--inject-tier-fault", string(tier.Unseen))
	})
	starting.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	for _, e := range append(c.engines(), c.single) {
		if c.baseline[e], err = gauge(ctx, e.ready["url"], freeBlocks); err != nil {
			return err
		}
	}
	return nil
}

// engines are those with a CPU cache.
func (c *rackChecker) engines() []*child {
	return []*child{c.rack.first, c.rack.second, c.damaged, c.unseen}
}

func (c *rackChecker) stop() error {
	var errs []error
	for _, p := range []*child{c.damaged, c.unseen, c.single} {
		if p != nil {
			p.stop()
			errs = append(errs, p.err)
		}
	}
	if c.rack != nil {
		errs = append(errs, c.rack.stop())
	}
	return errors.Join(errs...)
}

func (c *rackChecker) run(ctx context.Context, cases []checkCase) {
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
	if c.tokens == 0 && len(c.failures) == 0 {
		c.failf("not one token came from %s", c.from())
	}
	c.mutants(ctx)
	if err := c.home(ctx, append(c.engines(), c.single)...); err != nil {
		c.failf("blocks: %v", err)
	}
}

// selfTest has the second engine load blocks whose damage no checksum sees, as if there were no
// checksums. If the tokens stay the same, the check could not see damage, and must not pass.
func (c *rackChecker) selfTest(ctx context.Context) {
	c.progress.show("self-test")
	tc := checkCase{name: "self-test", prompts: []string{text(90, 6*c.flags.pair.blockSize+1)}, maxTokens: 8, ignoreEOS: true}
	want, got, line, err := c.secondHand(ctx, c.unseen, tc)
	switch {
	case err != nil:
		c.failf("self-test: %v", err)
	case slices.Equal(want.Tokens, got.Tokens):
		c.failf("self-test: damage without a checksum does not change the tokens, so this check cannot see it: %s", line.tierString())
	}
}

// mutants have damaged blocks offered to the second engine: each must be caught by its checksum, and
// computed.
func (c *rackChecker) mutants(ctx context.Context) {
	for i, f := range tier.Faults {
		c.progress.show("mutant: " + string(f))
		// One block each: the engine damages one after the other by the faults in turn.
		tc := checkCase{name: string(f), prompts: []string{text(91+i, c.flags.pair.blockSize+3)}, maxTokens: 8, ignoreEOS: true}
		want, got, line, err := c.secondHand(ctx, c.damaged, tc)
		switch {
		case err != nil:
			c.failf("mutant %s: %v", f, err)
		case !slices.Equal(want.Tokens, got.Tokens):
			c.failf("mutant %s: a damaged block gave %v, a single engine gives %v", f, got.Tokens, want.Tokens)
		case line.TierTokens > 0:
			c.failf("mutant %s: a damaged block was loaded: %s", f, line.tierString())
		}
	}
}

// secondHand has one engine compute a prompt and the second answer it with the first one as its source. It
// gives a single engine's answer, the second's, and what that one says of it.
func (c *rackChecker) secondHand(ctx context.Context, source *child, tc checkCase) (want, got *completion, line requestLine, err error) {
	if want, err = c.ask(ctx, c.single.ready, tc, tc.prompts[0], nil); err != nil {
		return nil, nil, line, fmt.Errorf("single engine: %w", err)
	}
	if _, err = c.ask(ctx, source.ready, tc, tc.prompts[0], nil); err != nil {
		return nil, nil, line, fmt.Errorf("%s: %w", source.name, err)
	}
	if err = c.kept(ctx, source); err != nil {
		return nil, nil, line, err
	}
	if got, err = c.askSecond(ctx, source, tc, tc.prompts[0], nil); err != nil {
		return nil, nil, line, fmt.Errorf("engine 2: %w", err)
	}
	line, err = c.rack.logs[c.rack.second].wait(ctx, got.ID, settleTimeout)
	return want, got, line, err
}

// kept waits until what an engine has computed is in its CPU cache, and with the store where there is one.
func (c *rackChecker) kept(ctx context.Context, e *child) error {
	if err := c.home(ctx, e); err != nil || c.rack.store == nil {
		return err
	}
	if e == c.damaged { // the store must have tried, and refused, all of it
		return c.await(ctx, "kvferry_store_loads_failed_total", e)
	}
	return c.await(ctx, "kvferry_store_blocks", c.rack.first, c.unseen)
}

// await waits until a number of the store is as high as that of the blocks of all these engines.
func (c *rackChecker) await(ctx context.Context, name string, engines ...*child) error {
	want := 0.0
	for _, e := range engines {
		n, err := gauge(ctx, e.ready["url"], tierReady)
		if err != nil {
			return err
		}
		want += n
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for {
		got, err := gaugeSum(ctx, c.rack.store.ready["url"], name)
		if err == nil && got >= want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the store's %s is %v, must become %v (%v)", name, got, want, err)
		case <-time.After(settlePoll):
		}
	}
}

// home waits until engines have as many free blocks as before the first request, and nothing in their
// CPU caches is in use.
func (c *rackChecker) home(ctx context.Context, engines ...*child) error {
	if err := c.settled(ctx, engines...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for _, e := range engines {
		for e != c.single {
			inUse, told := map[string]float64{}, 0
			err := eachMetric(ctx, e.ready["url"], func(metric string, v float64) {
				if !slices.Contains(tierInUse, metric) {
					return
				}
				if told++; v != 0 {
					inUse[metric] = v
				}
			})
			if err == nil && told < len(tierInUse) {
				return fmt.Errorf("%s tells %d of the numbers %v of its CPU cache", e.name, told, tierInUse)
			}
			if err == nil && len(inUse) == 0 {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("the CPU cache of %s is still in use: %v (%v)", e.name, inUse, err)
			case <-time.After(settlePoll):
			}
		}
	}
	return nil
}

// runCase sends the case's prompts to the single engine, to the first, and to the second, and compares.
func (c *rackChecker) runCase(ctx context.Context, tc checkCase) error {
	want, stops, err := c.wanted(ctx, tc)
	if err != nil {
		return err
	}
	first, err := c.askAll(ctx, c.rack.first.ready, tc, stops)
	if err != nil {
		return fmt.Errorf("engine 1: %w", err)
	}
	if err := c.kept(ctx, c.rack.first); err != nil {
		return fmt.Errorf("engine 1: %w", err)
	}
	second, err := c.each(tc, stops, func(prompt string, stop []int) (*completion, error) {
		return c.askSecond(ctx, c.rack.first, tc, prompt, stop)
	})
	if err != nil {
		return fmt.Errorf("engine 2: %w", err)
	}
	for i := range want {
		for name, got := range map[string]*completion{"engine 1": first[i], "engine 2": second[i]} {
			c.requests++
			if !slices.Equal(got.Tokens, want[i].Tokens) || got.Finish != want[i].Finish {
				return fmt.Errorf("prompt %d: %s gives %v (%s), a single engine %v (%s)", i, name, got.Tokens, got.Finish, want[i].Tokens, want[i].Finish)
			}
		}
		if err := c.checkSecond(ctx, second[i]); err != nil {
			return fmt.Errorf("prompt %d: engine 2: %w", i, err)
		}
	}
	return nil
}

// checkSecond looks at what the second engine says of a request: an equal answer is worth nothing if it
// has computed the prompt itself.
func (c *rackChecker) checkSecond(ctx context.Context, got *completion) error {
	line, err := c.rack.logs[c.rack.second].wait(ctx, got.ID, settleTimeout)
	if err != nil {
		return err
	}
	if line.ComputedPrompt > c.flags.pair.blockSize {
		return fmt.Errorf("it computed %d prompt tokens itself, at most a block of %d is allowed: %s", line.ComputedPrompt, c.flags.pair.blockSize, line.tierString())
	}
	c.tokens += line.tierTokens("p2p")
	return nil
}

// askSecond asks the second engine, with a source where there is no store.
func (c *rackChecker) askSecond(ctx context.Context, source *child, tc checkCase, prompt string, stop []int) (*completion, error) {
	if c.rack.store != nil {
		return c.ask(ctx, c.rack.second.ready, tc, prompt, stop)
	}
	params, err := sourceOf(source, fmt.Sprintf("check-%d", c.asked.Add(1)))
	if err != nil {
		return nil, err
	}
	return c.askWith(ctx, c.rack.second.ready, tc, prompt, stop, params)
}
