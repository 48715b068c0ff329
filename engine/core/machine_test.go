package core

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// A run of the properties here costs microseconds, so that many fit into a second.
func init() { _ = flag.Set("rapid.checks", "1500") }

// world drives a machine with a fake model and fake peers and checks everything that it does.
type world struct {
	t     *rapid.T
	cfg   Config
	m     *Machine
	conn  *fakeConn
	mem   *memory
	batch []Sequence
	done  []Result // of the batch, if it was computed early
	n     int
	reqs  map[kv.RequestID]*tracked
	now   time.Time

	tier *fakeTier

	epoch  int             // how often the prefix cache was reset
	ticket uint64          // of the last reset
	resets map[uint64]bool // that wait
}

type tracked struct {
	Request
	epoch  int // when it got its blocks
	next   int // position where it goes on unless it got other blocks
	lost   int // how often it had lost its blocks by then
	got    []kv.Token
	finish connector.FinishReason
	err    error
	usage  Usage
}

func newWorld(t *rapid.T, cfg Config) *world {
	w := &world{t: t, cfg: cfg, mem: newMemory(cfg), reqs: map[kv.RequestID]*tracked{}, resets: map[uint64]bool{}}
	w.conn = newFakeConn(t.Fatal)
	w.tier = newFakeTier(t.Fatalf, w.mem)
	var err error
	if w.m, err = New(cfg, w.conn); err != nil {
		t.Fatal(err)
	}
	return w
}

func drawConfig(t *rapid.T) Config {
	running := rapid.IntRange(1, 4).Draw(t, "running")
	return Config{
		BlockSize:      rapid.IntRange(1, 4).Draw(t, "block size"),
		NumBlocks:      rapid.IntRange(3, 14).Draw(t, "blocks"),
		MaxBatchTokens: rapid.IntRange(running, 12).Draw(t, "batch"),
		MaxRunning:     running,
		MaxWaiting:     rapid.IntRange(1, 6).Draw(t, "waiting"),
		MaxContext:     rapid.IntRange(8, 40).Draw(t, "context"),
		EOS:            []kv.Token{0},
		PrefixCaching:  rapid.Bool().Draw(t, "caching"),
		LoadFailure:    rapid.SampledFrom([]kv.LoadFailurePolicy{"", kv.FailOnLoadFailure, kv.RecomputeOnLoadFailure}).Draw(t, "policy"),
		ParkTimeout:    time.Duration(rapid.SampledFrom([]int{0, 30}).Draw(t, "park")) * time.Second,
		Tier:           rapid.Bool().Draw(t, "tier"),
		TierTimeout:    20 * time.Second,
	}
}

func (w *world) step(e Event) []Action {
	actions := w.m.Step(w.now, e)
	for _, a := range actions {
		switch a := a.(type) {
		case RunStep:
			w.checkBatch(a.Batch)
			w.batch, w.done = a.Batch, nil
		case Emit:
			w.emit(a.Output)
		case CacheReset:
			w.reset(a)
		default:
			w.tier.take(a, w.epoch)
		}
	}
	for _, q := range w.conn.fresh {
		q.epoch = w.epoch
	}
	w.conn.fresh = nil
	if err := w.m.Check(); err != nil {
		w.t.Fatal(err)
	}
	return actions
}

// reset takes the answer to a ResetCache.
func (w *world) reset(a CacheReset) {
	if !w.resets[a.Ticket] {
		w.t.Fatalf("reset %d is answered, but does not wait", a.Ticket)
	}
	delete(w.resets, a.Ticket)
	if a.Err == nil {
		w.epoch++
	}
}

// checkAge checks that a request that got blocks after a reset of the prefix cache finds nothing
// there that is older, nor anything that was computed behind it.
func (w *world) checkAge(s Sequence) {
	r := w.reqs[s.ID]
	lost := w.lost(s.ID)
	if s.Start != r.next || s.Start == 0 || lost != r.lost {
		r.epoch, r.lost = w.epoch, lost // it has new blocks
	}
	for p := range s.Start {
		if got := w.mem.epochs[w.mem.slot(s.Blocks, p)]; got < r.epoch {
			w.t.Fatalf("%s: position %d is of epoch %d, its blocks of %d", s.ID, p, got, r.epoch)
		}
	}
	r.next = s.Start + len(s.Tokens)
	w.mem.stamp(s.Blocks, s.Start, r.next, r.epoch)
}

// lost is how often a request that has not ended lost its blocks.
func (w *world) lost(id kv.RequestID) int { return w.m.requests[id].usage.Preemptions }

func (w *world) checkBatch(batch []Sequence) {
	if w.batch != nil {
		w.t.Fatal("two steps in flight")
	}
	if len(batch) == 0 || len(batch) > w.cfg.MaxRunning {
		w.t.Fatalf("a batch of %d", len(batch))
	}
	tokens := 0
	for _, s := range batch {
		tokens += len(s.Tokens)
		r := w.reqs[s.ID]
		all := slices.Concat(r.Prompt, r.got)
		end := s.Start + len(s.Tokens)
		if len(s.Tokens) == 0 || end > len(all) || !slices.Equal(s.Tokens, all[s.Start:end]) || s.Sample != (end == len(all)) {
			w.t.Fatalf("%s: computes %v at %d of %v, sample %v", s.ID, s.Tokens, s.Start, all, s.Sample)
		}
		if len(s.Blocks) != (end+w.cfg.BlockSize-1)/w.cfg.BlockSize {
			w.t.Fatalf("%s: %d tokens in %d blocks", s.ID, end, len(s.Blocks))
		}
		w.checkAge(s)
	}
	if tokens > w.cfg.MaxBatchTokens {
		w.t.Fatalf("%d tokens in a step of at most %d", tokens, w.cfg.MaxBatchTokens)
	}
}

func (w *world) emit(o Output) {
	r := w.reqs[o.ID]
	if r == nil || r.finish != "" {
		w.t.Fatalf("news of %s after its end", o.ID)
	}
	r.got = append(r.got, o.Tokens...)
	r.finish, r.err, r.usage = o.Finish, o.Err, o.Usage
	want := answer(r.Prompt, r.MaxTokens, w.cfg.Context(), append(slices.Clone(r.StopTokens), w.eos(r)...))
	if len(r.got) > len(want) || !slices.Equal(r.got, want[:len(r.got)]) {
		w.t.Fatalf("%s: answered %v, alone it is %v", o.ID, r.got, want)
	}
	w.checkLoad(r, o)
	switch o.Finish {
	case connector.FinishStop, connector.FinishLength:
		w.checkEnd(r, o, want)
	case connector.FinishError, connector.FinishAbort:
		if o.Err == nil {
			w.t.Fatalf("%s ends as %s without an error", o.ID, o.Finish)
		}
	}
}

// checkLoad checks that a failed load has done to the request what its policy says.
func (w *world) checkLoad(r *tracked, o Output) {
	if o.Finish == "" {
		return
	}
	policy := w.cfg.LoadFailure
	if r.Params != nil && r.Params.LoadFailurePolicy != "" {
		policy = r.Params.LoadFailurePolicy
	}
	if r.Params != nil && r.Params.DoRemoteDecode {
		policy = kv.RecomputeOnLoadFailure
	}
	var failed *connector.Error
	if errors.As(o.Err, &failed) && policy == kv.RecomputeOnLoadFailure || o.LoadErr != nil && policy != kv.RecomputeOnLoadFailure {
		w.t.Fatalf("%s: policy %q, ends with %v after %v", o.ID, policy, o.Err, o.LoadErr)
	}
	if (o.LoadErr != nil) != (o.Usage.Recomputed > 0) || o.LoadErr != nil && o.Usage.External > 0 {
		w.t.Fatalf("%s: load failure %v, usage %+v", o.ID, o.LoadErr, o.Usage)
	}
}

func (w *world) checkEnd(r *tracked, o Output, want []kv.Token) {
	last := want[len(want)-1]
	stopped := slices.Contains(r.StopTokens, last) || slices.Contains(w.eos(r), last)
	if len(r.got) != len(want) || stopped != (o.Finish == connector.FinishStop) || o.Err != nil {
		w.t.Fatalf("%s: %v ends as %s (%v), want %v", o.ID, r.got, o.Finish, o.Err, want)
	}
	u := o.Usage
	if u.Preemptions == 0 && u.Cached+u.External+u.Tier+u.ComputedPrompt != u.Prompt || u.ComputedPrompt < 1 ||
		u.Completion != len(want) || u.Prompt != len(r.Prompt) {
		w.t.Fatalf("%s: usage %+v", o.ID, u)
	}
}

func (w *world) eos(r *tracked) []kv.Token {
	if r.IgnoreEOS {
		return nil
	}
	return w.cfg.EOS
}

// add brings a request. Prompts are made to share prefixes often.
func (w *world) add(t *rapid.T) {
	w.n++
	r := Request{
		ID:        kv.RequestID(fmt.Sprintf("r%d", w.n)),
		MaxTokens: rapid.IntRange(0, 6).Draw(t, "max tokens"),
		IgnoreEOS: rapid.Bool().Draw(t, "ignore eos"),
	}
	n := rapid.IntRange(1, 20).Draw(t, "prompt")
	fork := rapid.IntRange(0, n).Draw(t, "fork")
	variant := rapid.IntRange(0, 2).Draw(t, "variant")
	for i := range n {
		x := i % 5
		if i >= fork {
			x += variant
		}
		r.Prompt = append(r.Prompt, kv.Token(x+1))
	}
	if rapid.Bool().Draw(t, "stop") {
		r.StopTokens = []kv.Token{kv.Token(rapid.IntRange(1, fakeVocab).Draw(t, "stop token"))}
	}
	switch rapid.IntRange(0, 2).Draw(t, "hand-off") {
	case 1:
		r.Params = &kv.TransferParams{DoRemoteDecode: true}
		if rapid.Bool().Draw(t, "earlier turn") {
			r.Params.RemoteBlockIDs, r.Params.RemoteNumTokens = kv.BlockIDs{{1}}, rapid.IntRange(0, 22).Draw(t, "of tokens")
		}
	case 2:
		r.Params = &kv.TransferParams{DoRemotePrefill: true, RemoteEngineID: "P"}
		r.Params.LoadFailurePolicy = rapid.SampledFrom([]kv.LoadFailurePolicy{"", "", kv.FailOnLoadFailure, kv.RecomputeOnLoadFailure}).Draw(t, "own policy")
	}
	if rapid.IntRange(0, 4).Draw(t, "bounds") == 0 {
		most := rapid.IntRange(0, 12).Draw(t, "most")
		r.Tier.MaxLoad = &most
		if rapid.Bool().Draw(t, "of stores") {
			r.Tier = TierSpec{MaxStore: &most}
		}
	}
	r.Tier.Whole = rapid.IntRange(0, 3).Draw(t, "whole") == 0
	w.conn.refuse = nil
	if rapid.IntRange(0, 9).Draw(t, "refuse") == 0 {
		w.conn.refuse = errors.New("refused")
	}
	w.reqs[r.ID] = &tracked{Request: r}
	actions := w.step(Add{Request: r})
	refused := slices.ContainsFunc(actions, func(a Action) bool { x, ok := a.(Refused); return ok && x.ID == r.ID })
	fits := (n+w.cfg.BlockSize-1)/w.cfg.BlockSize <= w.cfg.NumBlocks && n < w.cfg.Context()
	if !fits && !refused {
		t.Fatalf("a prompt of %d tokens was taken", n)
	}
	if refused {
		delete(w.reqs, r.ID)
	}
}

// pick draws one of the connector's requests.
func (w *world) pick(t *rapid.T, ok func(*fakeReq) bool) *fakeReq {
	var ids []kv.RequestID
	for id, q := range w.conn.reqs {
		if ok(q) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	slices.Sort(ids)
	return w.conn.reqs[rapid.SampledFrom(ids).Draw(t, "request")]
}

func isReceiving(q *fakeReq) bool { return q.receiving }
func isLeased(q *fakeReq) bool    { return q.finished && q.holding && !q.receiving }

// scribble is a write under way: until it is over the blocks hold anything.
func (w *world) scribble(t *rapid.T) {
	q := w.pick(t, isReceiving)
	if q == nil {
		t.Skip()
	}
	w.tear(q, rapid.Uint64().Draw(t, "garbage"))
}

func (w *world) tear(q *fakeReq, garbage uint64) {
	for _, b := range q.blocks[q.computed/w.cfg.BlockSize:] {
		for i := range w.cfg.BlockSize {
			garbage = mix(garbage, uint64(i))
			w.mem.slots[int(b)*w.cfg.BlockSize+i] = garbage
		}
	}
}

// settle ends a receive, well or badly.
func (w *world) settle(q *fakeReq, fail bool) {
	rep := connector.ReceiveReport{ID: q.ID}
	if fail {
		rep.Err = &connector.Error{Request: q.ID, Peer: "P", Phase: connector.PhaseTransfer, Reason: "cut"}
		w.tear(q, 5)
	} else {
		all := entries(w.reqs[q.ID].Prompt)[:q.computed+q.external]
		from := q.computed / w.cfg.BlockSize * w.cfg.BlockSize
		w.mem.write(q.blocks, from, all[from:])
		w.mem.stamp(q.blocks, from, len(all), q.epoch)
		if r := w.reqs[q.ID]; !q.finished {
			r.epoch, r.next, r.lost = q.epoch, min(q.computed+q.external, len(r.Prompt)-1), w.lost(q.ID)
		}
	}
	w.step(ConnectorOutput{connector.WorkerOutput{Recv: []connector.ReceiveReport{rep}}})
}

// release is the peer's reading of leased blocks, and the end of the lease.
func (w *world) release(q *fakeReq) {
	tokens := w.reqs[q.ID].Prompt
	if q.turn {
		tokens = slices.Concat(tokens, w.reqs[q.ID].got)
		tokens = tokens[:len(tokens)-1] // the KV of the last one was never computed
		w.checkKept(q, tokens)
	}
	want := entries(tokens)
	if got := w.mem.read(q.blocks, len(want)); !slices.Equal(got, want) {
		w.t.Fatalf("%s: leased blocks were changed", q.ID)
	}
	w.step(ConnectorOutput{connector.WorkerOutput{Sent: []connector.SentReport{{ID: q.ID}}}})
}

// checkKept checks what the connector was told of blocks that are kept for a next turn.
func (w *world) checkKept(q *fakeReq, tokens []kv.Token) {
	if q.whole != Digest(tokens, Keys{}) || len(q.prefixes) != len(tokens)/w.cfg.BlockSize {
		w.t.Fatalf("%s: a digest of %d tokens is wrong, or %d prefixes", q.ID, len(tokens), len(q.prefixes))
	}
	for i, d := range q.prefixes {
		if d != Digest(tokens[:(i+1)*w.cfg.BlockSize], Keys{}) {
			w.t.Fatalf("%s: the digest of %d blocks is wrong", q.ID, i+1)
		}
	}
}

// compute runs the model, at once or not before the step is reported: nothing may depend on when.
func (w *world) compute() {
	if w.batch == nil || w.done != nil {
		return
	}
	for _, s := range w.batch {
		w.done = append(w.done, w.mem.compute(s))
	}
}

func (w *world) report() {
	w.compute()
	done := w.done
	w.batch, w.done = nil, nil
	w.step(StepDone{Results: done})
}

// pass lets time pass and what is due happen.
func (w *world) pass(d time.Duration) {
	w.now = w.now.Add(d)
	if at, ok := w.m.Deadline(); ok && !w.now.Before(at) {
		w.step(Tick{})
	}
}

// drain lets everything end and checks that nothing is left.
func (w *world) drain(fail bool) {
	for turn := 0; !w.m.Quiet(); turn++ {
		if turn > 2000 {
			w.t.Fatalf("it does not end: %+v", w.m.Stats())
		}
		for _, id := range w.ids() {
			if q := w.conn.reqs[id]; q != nil && isReceiving(q) {
				w.settle(q, fail)
			} else if q != nil && isLeased(q) {
				w.release(q)
			}
		}
		w.answerTier(func(int) int { return 0 })
		if w.batch != nil {
			w.report()
		}
	}
	w.answerTier(func(n int) int { return n }) // whose requests have ended
	w.tier.checkQuiet()
	s := w.m.Stats()
	if s.BlocksFree != s.BlocksTotal || s.Running+s.Waiting+s.WaitingRemote+s.Held != 0 || s.StrayOutcomes != 0 {
		w.t.Fatalf("at the end: %+v", s)
	}
	for id, r := range w.reqs {
		if r.finish == "" {
			w.t.Fatalf("%s never ended", id)
		}
	}
	if len(w.resets) > 0 {
		w.t.Fatalf("resets still wait: %v", w.resets)
	}
	for id := range w.conn.reqs {
		w.t.Fatalf("the connector was not told the end of %s", id)
	}
}

// giveUp releases a hold, or what is none. Its blocks stay until the workers say that nothing reads them.
func (w *world) giveUp(t *rapid.T) {
	id := kv.RequestID(fmt.Sprintf("r%d", rapid.IntRange(max(1, w.n-8), w.n).Draw(t, "which")))
	lease := kv.Generation(rapid.IntRange(fakeLease-1, fakeLease).Draw(t, "lease"))
	q := w.conn.reqs[id]
	want := q != nil && isLeased(q) && !q.released && lease == fakeLease
	before := w.m.Stats().Held
	var answers []HoldReleased
	for _, a := range w.step(ReleaseHold{ID: id, Lease: lease}) {
		if a, ok := a.(HoldReleased); ok {
			answers = append(answers, a)
		}
	}
	if len(answers) != 1 || answers[0] != (HoldReleased{id, want}) || w.m.Stats().Held != before {
		t.Fatalf("release of %s, lease %d: %v, want %v", id, lease, answers, want)
	}
}

func (w *world) ids() []kv.RequestID {
	var ids []kv.RequestID
	for id := range w.reqs {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Whatever happens in whatever order: every request ends exactly once with the answer that it would
// have had alone, leased blocks stay as they are, and all blocks come back.
func TestMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, drawConfig(t))
		if rapid.Bool().Draw(t, "partly external") {
			w.conn.external = 5
		}
		w.conn.both = rapid.Bool().Draw(t, "bidirectional")
		t.Repeat(map[string]func(*rapid.T){
			"add":  w.add,
			"add2": w.add,
			"compute": func(t *rapid.T) {
				if w.batch == nil {
					t.Skip()
				}
				w.compute()
			},
			"report": func(t *rapid.T) {
				if w.batch == nil {
					t.Skip()
				}
				w.report()
			},
			"broken step": func(t *rapid.T) {
				if w.batch == nil {
					t.Skip()
				}
				if rapid.IntRange(0, 4).Draw(t, "rarely") > 0 {
					return // a Skip after a draw would end the sequence
				}
				w.batch, w.done = nil, nil
				w.step(StepDone{Err: errors.New("broken")})
			},
			"abort": func(t *rapid.T) {
				if w.n == 0 {
					t.Skip()
				}
				id := kv.RequestID(fmt.Sprintf("r%d", rapid.IntRange(max(1, w.n-8), w.n).Draw(t, "which")))
				w.step(Abort{ID: id, Err: errors.New("client gone")})
			},
			"time": func(t *rapid.T) { w.pass(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second) },
			"reset": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "rarely") > 0 {
					return
				}
				w.ticket++
				w.resets[w.ticket] = true
				w.step(ResetCache{Ticket: w.ticket, Wait: rapid.Bool().Draw(t, "wait")})
			},
			"give up reset": func(t *rapid.T) {
				if w.ticket == 0 {
					t.Skip()
				}
				w.step(GiveUpReset{Ticket: w.ticket})
				if w.resets[w.ticket] {
					t.Fatal("it still waits")
				}
			},
			"scribble": w.scribble,
			"tier": func(t *rapid.T) {
				if len(w.tier.open) == 0 {
					t.Skip()
				}
				w.answerTierOne(t)
			},
			"settle": func(t *rapid.T) {
				if q := w.pick(t, isReceiving); q != nil {
					w.settle(q, rapid.IntRange(0, 3).Draw(t, "fail") == 0)
				}
			},
			"give up": func(t *rapid.T) {
				if w.n > 0 {
					w.giveUp(t)
				}
			},
			"release": func(t *rapid.T) {
				if q := w.pick(t, isLeased); q != nil {
					w.release(q)
				}
			},
		})
		w.drain(rapid.Bool().Draw(t, "peers are gone"))
	})
}

// What is kept for next turns that never come is in nobody's way: the workers give back what they are told
// to, and every request ends.
func TestTurnsMakeWay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := drawConfig(t)
		cfg.ParkTimeout, cfg.Tier = 0, false
		w := newWorld(t, cfg)
		w.conn.both = true
		for range rapid.IntRange(1, 12).Draw(t, "requests") {
			w.add(t)
		}
		if rapid.Bool().Draw(t, "reset") {
			w.ticket++
			w.resets[w.ticket] = true
			w.step(ResetCache{Ticket: w.ticket, Wait: true})
		}
		if rapid.Bool().Draw(t, "end") {
			w.step(Drain{})
		}
		for idle := false; !idle; {
			idle = true
			for _, id := range w.ids() {
				switch q := w.conn.reqs[id]; {
				case q == nil:
				case isReceiving(q):
					w.settle(q, false)
					idle = false
				case isLeased(q) && (q.released || !q.turn):
					w.release(q)
					idle = false
				}
			}
			if w.batch != nil {
				w.report()
				idle = false
			}
		}
		for id, r := range w.reqs {
			if r.finish == "" {
				t.Fatalf("%s waits for turns that do not come: %+v", id, w.m.Stats())
			}
		}
		if len(w.resets) > 0 || w.m.turns.over && !w.m.Quiet() {
			t.Fatalf("a reset or the end of the engine waits for turns that do not come: %+v", w.m.Stats())
		}
	})
}

// A request that needs every block ends although small requests whose KV comes from peers arrive
// without a pause, before and after it.
func TestNobodyStarves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, Config{BlockSize: 2, NumBlocks: 8, MaxBatchTokens: 4, MaxRunning: rapid.IntRange(1, 3).Draw(t, "running"),
			MaxWaiting: 100, MaxContext: 17, PrefixCaching: rapid.Bool().Draw(t, "caching")})
		small := func() {
			w.n++
			r := Request{ID: kv.RequestID(fmt.Sprintf("r%d", w.n)), Prompt: []kv.Token{1, kv.Token(w.n % 7), 3}, MaxTokens: 3, IgnoreEOS: true}
			if rapid.Bool().Draw(t, "remote") {
				r.Params = &kv.TransferParams{DoRemotePrefill: true}
			}
			w.reqs[r.ID] = &tracked{Request: r}
			w.step(Add{Request: r})
		}
		small()
		small()
		big := Request{ID: "big", IgnoreEOS: true, Prompt: make([]kv.Token, 9)}
		w.reqs["big"] = &tracked{Request: big}
		w.step(Add{Request: big})
		for turn := 0; w.reqs["big"].finish == ""; turn++ {
			if turn > 300 {
				t.Fatalf("it starves: %+v", w.m.Stats())
			}
			if turn%2 == 0 && w.m.Stats().Waiting < 50 {
				small()
			}
			if q := w.pick(t, isReceiving); q != nil && turn%3 == 0 {
				w.settle(q, false)
			}
			if w.batch != nil {
				w.report()
			}
		}
		if w.reqs["big"].finish != connector.FinishLength {
			t.Fatalf("it ended as %s: %v", w.reqs["big"].finish, w.reqs["big"].err)
		}
		w.drain(false)
	})
}

// Peers that never send anything and never go away: with the park timeout, whoever waits for blocks
// gets them, so that at the end only receives are left.
func TestParkedLoadsEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := drawConfig(t)
		cfg.ParkTimeout = time.Minute
		w := newWorld(t, cfg)
		for range rapid.IntRange(1, 12).Draw(t, "requests") {
			w.add(t)
		}
		for turn := 0; ; turn++ {
			if turn > 500 {
				t.Fatalf("it does not end: %+v", w.m.Stats())
			}
			over := w.batch == nil
			for _, id := range w.ids() {
				if q := w.conn.reqs[id]; q != nil && (isLeased(q) || isReceiving(q) && q.finished) {
					over = false
					if isLeased(q) {
						w.release(q)
					} else {
						w.settle(q, false) // the workers have revoked
					}
				}
			}
			if len(w.tier.open) > 0 {
				over = false
				w.answerTier(func(n int) int { return n })
			}
			if w.batch != nil {
				w.report()
			}
			at, due := w.m.Deadline()
			if due {
				w.pass(at.Sub(w.now))
			}
			if over && !due {
				break
			}
		}
		if s := w.m.Stats(); s.Waiting+s.Running+s.Held > 0 {
			t.Fatalf("nothing will happen any more, but %+v", s)
		}
		w.drain(rapid.Bool().Draw(t, "peers are gone"))
	})
}

func TestWithoutConnector(t *testing.T) {
	m, err := New(Config{BlockSize: 4, NumBlocks: 4, MaxBatchTokens: 8, MaxRunning: 2, MaxWaiting: 2, MaxContext: 16}, nil)
	if err != nil {
		t.Fatal(err)
	}
	m.Step(time.Time{}, Add{Request{ID: "a", Prompt: []kv.Token{1}, MaxTokens: 1, Params: &kv.TransferParams{DoRemoteDecode: true}}})
	acts := m.Step(time.Time{}, StepDone{Results: []Result{{Token: 3}}})
	if last, ok := acts[len(acts)-1].(Emit); !ok || last.Finish != connector.FinishLength || last.Params != nil {
		t.Errorf("got %v", acts)
	}
	m.Step(time.Time{}, Tick{})
	m.Step(time.Time{}, ConnectorOutput{})
	if _, ok := m.Deadline(); ok || !m.Quiet() {
		t.Error("something is left")
	}
}

func TestConfigValidate(t *testing.T) {
	good := Config{BlockSize: 1, NumBlocks: 1, MaxBatchTokens: 2, MaxRunning: 2, MaxWaiting: 1, MaxContext: 2}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Config){
		"block size": func(c *Config) { c.BlockSize = 0 }, "blocks": func(c *Config) { c.NumBlocks = -1 },
		"batch": func(c *Config) { c.MaxBatchTokens = 1 }, "running": func(c *Config) { c.MaxRunning = 0 },
		"waiting": func(c *Config) { c.MaxWaiting = 0 }, "context": func(c *Config) { c.MaxContext = 1 },
		"policy": func(c *Config) { c.LoadFailure = "retry" }, "park": func(c *Config) { c.ParkTimeout = -1 },
	} {
		c := good
		spoil(&c)
		if c.Validate() == nil {
			t.Errorf("%s: accepted", name)
		}
		if _, err := New(c, nil); err == nil {
			t.Errorf("%s: made a machine", name)
		}
	}
}

// TestTogether: the first of several is refused unless there is room for all, so that none of them begins; more
// than may wait need an empty queue.
func TestTogether(t *testing.T) {
	for _, c := range []struct {
		waiting, together int
		refused           bool
	}{{0, 0, false}, {3, 0, false}, {3, 1, false}, {4, 0, true}, {4, 1, true}, {2, 2, false}, {3, 2, true}, {1, 4, true}, {0, 4, false}, {0, 9, false}, {1, 9, true}} {
		m, err := New(Config{BlockSize: 4, NumBlocks: 4, MaxBatchTokens: 8, MaxRunning: 1, MaxWaiting: 4, MaxContext: 16}, nil)
		if err != nil {
			t.Fatal(err)
		}
		add := func(id string, together int) bool {
			var full *QueueFullError
			for _, a := range m.Step(time.Time{}, Add{Request{ID: kv.RequestID(id), Prompt: []kv.Token{1}, MaxTokens: 1, Together: together}}) {
				if r, ok := a.(Refused); ok && !errors.As(r.Err, &full) {
					t.Errorf("%v", r.Err)
				}
			}
			return full != nil
		}
		add("running", 0)
		for i := range c.waiting {
			add(fmt.Sprint("waiting ", i), 0)
		}
		if got := add("first", c.together); got != c.refused {
			t.Errorf("%d of 4 wait, %d come: refused %v", c.waiting, c.together, got)
		}
	}
}
