package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvferry/kvferry/engine"
)

const (
	// fireTimeout ends a fault check of fireRequests that hangs, so that the command ends within 50 s.
	fireTimeout = 45 * time.Second
	// requestBound is within what time every request must have ended: the longest fault, the
	// prefills that wait behind it, and an engine's patience with a silent peer.
	requestBound = 15 * time.Second
	// fireClients is how many requests are in flight at most.
	fireClients = 8
	// oracleClients is how many requests the single engine computes at a time.
	oracleClients = 4
	// homeBound is how long blocks may take to come home after the last request: no longer than a
	// lease and the silence after which a peer is given up.
	homeBound = 4 * fireLease
	// leastRight is the share of requests under fire, one in leastRight, that must be right in a check of
	// fireRequests: a pair that does not recover between two faults is honest, too. A shorter check has its
	// faults so close together that on a slow machine nearly all of its requests meet one.
	leastRight = 8
)

// fireFlags are those of `up --check --faults`.
type fireFlags struct {
	seed     uint64
	requests int
}

// fireChecker puts a trio under fire and judges every answer.
type fireChecker struct {
	flags    upFlags
	out      *lockedWriter
	progress *progress

	site   *site
	single *child
	total  map[*server]float64 // blocks of each engine

	fire, calm []fireRequest
	turns      fireTurns
	faults     []plannedFault
	begun      []chan struct{} // one for each request under fire

	ended      func() error // of the command: a signal has come
	transports string       // how KV came
	inflicted  []plannedFault
	routerDown []span
	problems   []string
	tally      tally
}

// runFireCheck is `kvferry up --check --faults`. It prints the schedule first and one summary line
// last.
func runFireCheck(ctx context.Context, w io.Writer, f upFlags) error {
	start := time.Now()
	bound := fireTimeout * time.Duration(max(f.fire.requests, fireRequests)) / fireRequests
	ended := ctx.Err
	ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("the check did not end within %v", bound))
	defer cancel()
	if f.fire.requests < calmShare {
		return usagef("--requests %d: a fault check needs at least %d", f.fire.requests, calmShare)
	}
	c := &fireChecker{flags: f, out: newLockedWriter(w), progress: newProgress(w), total: map[*server]float64{}, ended: ended}
	c.out.verbose = f.verbose
	c.out.quiet = !f.verbose
	c.run(ctx)
	c.progress.clear()
	if c.ended() != nil {
		return interrupted(c.problems)
	}
	problems := slices.Concat(c.tally.faults, c.problems) // wrong tokens first
	summary := fmt.Sprintf("seed %d, %d requests: %s; slowest %.1f s of %v; faults: %s; KV came: %s; %s",
		f.fire.seed, len(c.fire)+len(c.calm)+len(c.turns.mu.answers), &c.tally, c.tally.slowest.Seconds(), requestBound, countFaults(c.inflicted), c.transports, elapsed(start))
	if len(problems) > 0 {
		c.out.linef("fault check FAILED: %d faults, the first: %s; %s", len(problems), problems[0], summary)
		return errors.New("the pair did not stand the faults")
	}
	c.out.linef("fault check passed: every request ended right or with an honest error, all blocks home: %s", summary)
	return nil
}

func (c *fireChecker) failf(format string, args ...any) {
	if c.ended() != nil {
		return // what fails now fails by a signal
	}
	msg := fmt.Sprintf(format, args...)
	c.problems = append(c.problems, msg)
	c.progress.clear()
	c.out.linef("FAULT %s", msg)
}

func (c *fireChecker) run(ctx context.Context) {
	defer func() {
		if err := c.stop(); err != nil {
			c.failf("stop: %v", err)
		}
	}()
	if err := c.start(ctx); err != nil {
		c.failf("start: %v", err)
		return
	}
	oracle := make(chan []*completion, 1)
	go func() { oracle <- c.oracle(ctx) }()
	fire := c.underFire(ctx)
	calm := c.afterwards(ctx, fire)
	if c.flags.pair.bidirectional {
		c.converse(ctx)
	}
	want := <-oracle
	if c.ended() != nil {
		return
	}
	if err := context.Cause(ctx); err != nil {
		c.failf("%v", err)
	}
	c.judge(ctx, want, fire, calm)
	var err error
	if c.transports, err = c.site.transports(c.flags.pair.transport, c.flags.fire.requests < fireRequests); err != nil {
		c.failf("%v", err)
	}
	if c.flags.pair.bidirectional {
		if err := resetCache(ctx, c.site.decode.url()); err != nil {
			c.failf("turns: %v", err)
		}
	}
	if err := c.home(ctx); err != nil {
		c.failf("blocks: %v", err)
	}
	if err := c.site.ended(); err != nil {
		c.failf("a server died that nobody had killed: %v", err)
	}
}

// start brings up the trio and the single engine and makes the schedule.
func (c *fireChecker) start(ctx context.Context) error {
	c.progress.show("starting three engines and a router")
	o := c.flags.pair
	o.lease = fireLease
	o.noDecodeCache = len(o.kvFaults) > 0
	o.readAll = true // a turn has few tokens that the prefill engine lacks
	var errs [2]error
	var wg sync.WaitGroup
	wg.Go(func() { c.site, errs[0] = startSite(ctx, o, c.out) })
	wg.Go(func() {
		c.single, errs[1] = startChild(ctx, "the single engine", c.out.passWarnings("single"), o.engineArgs("both")...)
	})
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	for _, v := range c.engines() {
		var err error
		if c.total[v], err = gauge(ctx, v.url(), freeBlocks); err != nil {
			return err
		}
	}
	maxContext, err := strconv.Atoi(c.single.ready["context"])
	if err != nil {
		return fmt.Errorf("the single engine's ready line has no context: %v", c.single.ready)
	}
	n := c.flags.fire.requests - c.flags.fire.requests/calmShare
	if o.bidirectional {
		n -= n / 3 // as many, about, are later turns of the others
	}
	rng := rand.New(rand.NewPCG(c.flags.fire.seed, 0))
	c.faults = planFaults(rng, n)
	if o.transport == engine.TransportSHM { // no relay is on its way
		c.faults = slices.DeleteFunc(c.faults, func(f plannedFault) bool { return f.kind == cutAgents || f.kind == holdAgents })
	}
	c.fire = planRequests(rng, n, o.blockSize, maxContext)
	if c.turns.context = maxContext; o.bidirectional {
		planTurns(c.flags.fire.seed, c.fire)
	}
	c.begun = make([]chan struct{}, n)
	for i := range c.begun {
		c.begun[i] = make(chan struct{})
	}
	c.out.linef("schedule of seed %d: %v", c.flags.fire.seed, c.faults)
	return nil
}

func (c *fireChecker) engines() []*server { return []*server{c.site.prefill, c.site.decode} }

func (c *fireChecker) stop() error {
	var errs []error
	if c.site != nil {
		errs = append(errs, c.site.stop())
	}
	if c.single != nil {
		c.single.stop()
		errs = append(errs, c.single.err)
	}
	return errors.Join(errs...)
}

// oracle asks the single engine for every answer; nil where it gave none.
func (c *fireChecker) oracle(ctx context.Context) []*completion {
	want := make([]*completion, len(c.fire))
	c.each(oracleClients, len(want), func(i int) {
		a := c.ask(ctx, c.single.ready["url"], c.fire[i])
		if a.err == nil {
			want[i] = a.got
		}
	})
	return want
}

// each calls do for every number below n, at most clients at a time.
func (c *fireChecker) each(clients, n int, do func(int)) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// underFire sends the requests while the faults come, and returns when both have ended.
func (c *fireChecker) underFire(ctx context.Context) []*fireAnswer {
	var faults sync.WaitGroup
	faults.Go(func() { c.inflict(ctx) })
	answers := make([]*fireAnswer, len(c.fire))
	router := c.site.router.url()
	var mu struct {
		sync.Mutex
		due time.Time // of the next request
	}
	c.each(fireClients, len(c.fire), func(i int) {
		r := c.fire[i]
		mu.Lock()
		mu.due = later(mu.due, time.Now().Add(-fireSpacing)).Add(r.after)
		wait := time.Until(mu.due)
		mu.Unlock()
		sleep(ctx, wait)
		c.progress.show(fmt.Sprintf("[%d/%d] under fire", i+1, len(c.fire)))
		close(c.begun[i])
		leave := ctx
		if r.abort > 0 {
			var cancel context.CancelFunc
			leave, cancel = context.WithTimeoutCause(ctx, r.abort, context.Canceled)
			defer cancel()
		}
		answers[i] = c.ask(leave, router, r)
		answers[i].left = r.abort > 0 && leave.Err() != nil
		c.goOn(ctx, router, answers[i])
	})
	faults.Wait()
	return answers
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// inflict carries out the schedule.
func (c *fireChecker) inflict(ctx context.Context) {
	for _, f := range c.faults {
		select {
		case <-c.begun[f.at]:
		case <-ctx.Done():
			return
		}
		if !sleep(ctx, f.delay) {
			return
		}
		from := time.Now()
		err := c.site.inflict(ctx, f)
		if f.kind == killRouter {
			c.routerDown = append(c.routerDown, span{from, time.Now()})
		}
		if err != nil {
			c.failf("%v: %v", f, err)
			return
		}
		c.inflicted = append(c.inflicted, f)
	}
}

// afterwards sends requests once all faults are over. Every one must be right.
func (c *fireChecker) afterwards(ctx context.Context, fire []*fireAnswer) []*fireAnswer {
	c.progress.show("after the fire")
	var failed []int
	for i, a := range fire {
		if a.err != nil {
			failed = append(failed, i)
		}
	}
	c.calm = planCalm(c.fire, failed, c.flags.fire.requests/calmShare)
	if err := waitReady(ctx, c.site.router.url()); err != nil {
		c.failf("after the last fault: %v", err)
	}
	answers := make([]*fireAnswer, len(c.calm))
	c.each(fireClients, len(c.calm), func(i int) { answers[i] = c.ask(ctx, c.site.router.url(), c.calm[i]) })
	return answers
}

// waitReady waits until a router says that both roles can be reached.
func waitReady(ctx context.Context, router string) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, router+"/ready", nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
		if !sleep(ctx, settlePoll) {
			return fmt.Errorf("the router is not ready within %v: %w", settleTimeout, err)
		}
	}
}

// ask sends one request and waits for its end, a little longer than it may take.
func (c *fireChecker) ask(ctx context.Context, to string, r fireRequest) *fireAnswer {
	ctx, cancel := context.WithTimeout(ctx, requestBound+time.Second)
	defer cancel()
	a := &fireAnswer{fireRequest: r, begin: time.Now()}
	a.got, a.err = complete(ctx, to, completionRequest{
		Model: c.single.ready["model"], Prompt: r.body(), MaxTokens: r.maxTokens, ReturnTokenIDs: true, IgnoreEOS: true, Stream: r.stream,
		ConversationID: r.conversation,
	})
	a.end = time.Now()
	return a
}

// judge makes the verdicts.
func (c *fireChecker) judge(ctx context.Context, want []*completion, fire, calm []*fireAnswer) {
	own := func(tokens []int) int {
		return slices.IndexFunc(want, func(w *completion) bool { return w != nil && len(tokens) > 1 && isPrefix(tokens, w.Tokens) })
	}
	verdictOf := func(a *fireAnswer) verdict {
		w := want[a.number]
		if w == nil {
			return verdict{fault: fmt.Sprintf("request #%d: the single engine gave no answer", a.number)}
		}
		return judge(a, w, requestBound, c.routerDown, own)
	}
	for _, a := range fire {
		c.tally.add(a, verdictOf(a))
	}
	if n := c.tally.right; n*leastRight < len(fire) && c.flags.fire.requests >= fireRequests {
		c.failf("only %d of %d requests under fire are right", n, len(fire))
	}
	for _, a := range calm {
		v := verdictOf(a)
		if v.fault == "" && v.class != right {
			v.fault = fmt.Sprintf("request #%d, sent again after the last fault: %v", a.number, a.err)
		}
		c.tally.add(a, v)
	}
	c.judgeTurns(ctx, own)
	for _, f := range c.tally.faults {
		c.out.linef("FAULT %s", f)
	}
}

// home waits until all blocks of the two engines are free again.
func (c *fireChecker) home(ctx context.Context) error {
	c.progress.show("blocks come home")
	ctx, cancel := context.WithTimeout(ctx, homeBound)
	defer cancel()
	for _, v := range c.engines() {
		for {
			free, err := gauge(ctx, v.url(), freeBlocks)
			if err == nil && free == c.total[v] {
				break
			}
			if !sleep(ctx, settlePoll) {
				return fmt.Errorf("the %s engine has %v free blocks of %v %v after the last request (%v)", v.name, free, c.total[v], homeBound, err)
			}
		}
	}
	return nil
}
