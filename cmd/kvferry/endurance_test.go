package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/kv"
)

const (
	enduranceClients = 14
	// enduranceBound ends a request that hangs: it is much longer than all waits of the site together.
	enduranceBound = 60 * time.Second
	// faultShadow is how long a fault may be felt by requests that come after it: three heartbeats until a
	// peer is given up, and one request that finds the router's knowledge old.
	faultShadow = 4 * time.Second
)

// enduranceRecord is what became of one request.
type enduranceRecord struct {
	*enduranceRequest
	got        *enduranceAnswer
	err        error
	left       bool
	begin, end time.Time
}

// endurance is one run in one mode.
type endurance struct {
	t       *testing.T
	site    *enduranceSite
	plan    []enduranceRequest
	records []enduranceRecord
	begun   []chan struct{}
	faults  []enduranceFault
	spans   []span
	problem []string
	client  *enduranceClient
	wanted  map[string]*enduranceAnswer // of the single engine
}

// runEndurance sends n requests in each mode, at once, and tells what it saw of each in one line.
func runEndurance(t *testing.T, seed uint64, n int) {
	start := time.Now()
	before := goleak.IgnoreCurrent()
	var runs sync.WaitGroup
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		runs.Go(func() { endure(t, mode, seed, n) })
	}
	runs.Wait()
	if err := goleak.Find(before); err != nil {
		t.Errorf("goroutines are left: %v", err)
	}
	t.Logf("soak: seed %d, %d requests in each mode, %s", seed, n, elapsed(start))
}

// endure is the run in one mode.
func endure(t *testing.T, mode kv.TransferMode, seed uint64, n int) {
	site, err := newEnduranceSite(mode)
	if err != nil {
		t.Error(err)
		return
	}
	e := &endurance{t: t, site: site, faults: enduranceFaults(n), records: make([]enduranceRecord, n), begun: make([]chan struct{}, n), wanted: map[string]*enduranceAnswer{}}
	for i := range e.begun {
		e.begun[i] = make(chan struct{})
	}
	context := min(site.prefill[0].engine().MaxContext(), site.decode[0].engine().MaxContext())
	e.plan = planEndurance(rand.New(rand.NewPCG(seed, 0)), mode, n, context)
	client := newEnduranceClient()
	e.send(client)
	e.client = client
	e.home()
	tally := e.judge()
	figures := e.figures()
	client.close()
	site.close()
	for _, h := range site.engines() {
		for _, l := range h.lives {
			e.problem = append(e.problem, l.ledger.balance()...)
		}
	}
	for i, p := range e.problem {
		if i == 30 {
			t.Errorf("%s: and %d more", mode, len(e.problem)-i)
			break
		}
		t.Errorf("%s: %s", mode, p)
	}
	t.Logf("soak: %s: %d requests (%s): %s; %s; %d faults; %d problems",
		mode, n, describePlan(e.plan), tally, figures, len(e.spans), len(e.problem))
}

func (e *endurance) failf(format string, args ...any) {
	e.problem = append(e.problem, fmt.Sprintf(format, args...))
}

// send sends all requests while the faults come.
func (e *endurance) send(client *enduranceClient) {
	var faults sync.WaitGroup
	faults.Go(func() {
		for _, f := range e.faults {
			<-e.begun[f.at]
			from := time.Now()
			if err := f.do(e.site); err != nil {
				e.failf("%s: %v", f.what, err)
				return
			}
			e.spans = append(e.spans, span{from, time.Now().Add(faultShadow)})
		}
	})
	next := make(chan int)
	var clients sync.WaitGroup
	for range enduranceClients {
		clients.Go(func() {
			for i := range next {
				close(e.begun[i])
				e.records[i] = e.one(client, &e.plan[i])
			}
		})
	}
	for i := range e.plan {
		if i == len(e.plan)-len(e.plan)/20 { // the calm end begins when no fault is felt any more
			faults.Wait()
			if n := len(e.spans); n > 0 {
				time.Sleep(time.Until(e.spans[n-1].to))
			}
		}
		next <- i
	}
	close(next)
	clients.Wait()
}

func (e *endurance) one(client *enduranceClient, r *enduranceRequest) enduranceRecord {
	ctx, cancel := context.WithTimeout(e.t.Context(), enduranceBound)
	defer cancel()
	if r.leaves > 0 {
		timer := time.AfterFunc(r.leaves, cancel)
		defer timer.Stop()
	}
	rec := enduranceRecord{enduranceRequest: r, begin: time.Now()}
	switch r.kind {
	case asked:
		rec.got, rec.err = client.ask(ctx, e.site.routerURL, fmt.Sprintf("q%d", r.number), r.body.json(r.stream))
	case local:
		rec.got, rec.err = client.ask(ctx, e.site.engines()[r.engines[0]+2*r.engines[1]].url, fmt.Sprintf("q%d", r.number), r.body.json(r.stream))
	default:
		rec.got, rec.err = client.byHand(ctx, e.site, r)
	}
	rec.left = r.leaves > 0 && errors.Is(ctx.Err(), context.Canceled)
	rec.end = time.Now()
	return rec
}

// home waits until nothing is left of any request, at most until every lease has ended.
func (e *endurance) home() {
	deadline := time.Now().Add(3 * enduranceLease)
	for _, h := range e.site.engines() {
		for {
			s := h.engine().Stats()
			if s.BlocksFree == s.BlocksTotal && s.Held+s.Running+s.Waiting+s.WaitingRemote == 0 {
				break
			}
			if time.Now().After(deadline) {
				e.failf("%s keeps %d of %d blocks: %+v", h.name, s.BlocksTotal-s.BlocksFree, s.BlocksTotal, s)
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// cause is why a request may have failed, or P's lease of it ended: something that the run did; "" if nothing.
func (e *endurance) cause(r *enduranceRecord) string {
	switch {
	case r.left:
		return "its client left"
	case r.faulty():
		return r.kind
	case slices.ContainsFunc(e.spans, func(s span) bool { return r.begin.Before(s.to) && r.end.After(s.from) }):
		return "fault"
	case r.err != nil && strings.Contains(r.err.Error(), "give the engine more KV blocks"):
		return "pool too small" // as is meant (F18)
	}
	return ""
}

// judge looks at every answer, and at every lease and receive that did not end well.
func (e *endurance) judge() string {
	right, left := 0, 0
	errs := map[string]int{}
	for i := range e.records {
		r := &e.records[i]
		verdict, problem := e.verdict(r)
		switch {
		case problem != "":
			e.failf("request %d (%s%v, %d+%d tokens): %s", i, r.kind, r.engines, len(r.body.prompts[0]), r.body.maxTokens, problem)
		case verdict == right_:
			right++
		case verdict == left_:
			left++
		default:
			errs[verdict]++
		}
	}
	causes, expired := map[string]int{}, map[string]int{}
	for _, h := range e.site.engines() {
		for _, l := range h.lives {
			l.ledger.mu.Lock()
			for _, id := range l.ledger.mu.expired {
				expired[e.explain(h.name+": the lease of", id, "expired")]++
			}
			for _, f := range l.ledger.mu.failed {
				if f.Phase != "cancel" {
					causes[e.explain(h.name+": the receive of", f.Request, f.Err.Error())]++
				}
			}
			l.ledger.mu.Unlock()
		}
	}
	return fmt.Sprintf("%d right, %d left by their clients, honest errors: %s; failed receives: %s; expired leases: %s",
		right, left, counts(errs), counts(causes), counts(expired))
}

const (
	right_ = "right"
	left_  = "left"
)

func (e *endurance) explain(what string, id kv.RequestID, how string) string {
	n := numberOf(id)
	if n < 0 || n >= len(e.records) {
		e.failf("%s %s: %s; no request of the run", what, id, how)
		return "unknown"
	}
	c := e.cause(&e.records[n])
	if c == "" {
		r := &e.records[n]
		e.failf("%s %s: %s, and the run did nothing to it (%d+%d tokens, its client got: %v)", what, id, how, len(r.body.prompts[0]), r.body.maxTokens, r.err)
	}
	return cmp.Or(c, "UNEXPLAINED")
}

// verdict is what an answer is worth, or what is wrong with it.
func (e *endurance) verdict(r *enduranceRecord) (verdict, problem string) {
	want, err := e.want(r.enduranceRequest)
	if err != nil {
		return "", fmt.Sprintf("the single engine gave no answer: %v", err)
	}
	if r.got != nil && !r.got.isPart(want) {
		return "", fmt.Sprintf("got %v, a single engine gives %v", r.got.tokens, want.tokens)
	}
	var told *answerError
	switch {
	case r.err == nil && r.kind == noDecode:
		return right_, ""
	case r.err == nil && !r.got.isWhole(want):
		return "", fmt.Sprintf("got %v and no error, a single engine gives %v", r.got.tokens, want.tokens)
	case r.err == nil:
		return right_, ""
	case r.left:
		return left_, ""
	case e.cause(r) == "":
		return "", fmt.Sprintf("failed after %v although the run did nothing to it: %v", r.end.Sub(r.begin).Round(time.Millisecond), r.err)
	case !errors.As(r.err, &told):
		return "", fmt.Sprintf("no answer: %v", r.err)
	case told.Message == "" || !honestStatus(told):
		return "", fmt.Sprintf("an error that names nothing, or that no fault explains: %+v", *told)
	}
	return told.phase(), ""
}

// want is the single engine's answer, asked for once.
func (e *endurance) want(r *enduranceRequest) (*enduranceAnswer, error) {
	body := r.whole()
	key := fmt.Sprint(body)
	if a := e.wanted[key]; a != nil {
		return a, nil
	}
	a, err := e.client.ask(e.t.Context(), e.site.single.url, "single", body)
	if err == nil {
		e.wanted[key] = a
	}
	return a, err
}

// figures are what the engines did, so that a run that tests nothing shows.
func (e *endurance) figures() string {
	transports, total := map[string]int{}, map[string]int{}
	var preempted [2]uint64
	for i, h := range e.site.engines() {
		for _, l := range h.lives {
			preempted[i/2] += l.Stats().Preemptions
			l.ledger.mu.Lock()
			for k, v := range l.ledger.mu.received {
				transports[k] += v
			}
			for _, k := range []string{"transfer_done", "transfer_failed", "lease_taken", "lease_refused", "blocks_quarantined"} {
				total[k] += l.ledger.mu.count[k]
			}
			l.ledger.mu.Unlock()
		}
	}
	chance := len(e.plan) < 1000 // a short run may have no preemptions
	if !chance && (preempted[0] == 0 || preempted[1] == 0) || total["transfer_done"] == 0 {
		e.failf("nothing was tested: %v preemptions on P and D, %v", preempted, total)
	}
	return fmt.Sprintf("KV came by %s; %s; %d preemptions on P, %d on D", counts(transports), counts(total), preempted[0], preempted[1])
}

func counts(m map[string]int) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%s %d", k, m[k]))
	}
	return cmp.Or(strings.Join(parts, ", "), "none")
}

// The short share of TestSoakRequests: every answer is a single engine's or an error that the run has
// caused, every lease that expires and every receive that fails has such a cause, too, and nothing is left.
func TestEndurance(t *testing.T) {
	runEndurance(t, 1, 120)
}
