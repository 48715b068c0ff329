package engine

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

func newPullPair(t *testing.T, change func(*Config)) pair {
	t.Helper()
	return newPair(t, func(c *Config) {
		c.Mode = kv.Pull
		if change != nil {
			change(c)
		}
	})
}

// pullLegs makes the requests of one sequential hand-off; D's gets its parameters from P's answer.
func pullLegs(id string, p []kv.Token, maxTokens int) (prefill Request, decode func(answer) Request) {
	prefill = Request{ID: kv.RequestID("cmpl-" + id + "-0-aaaaaaaa"), Prompt: p, MaxTokens: 1, Params: &kv.TransferParams{DoRemoteDecode: true}}
	return prefill, func(a answer) Request {
		params := *a.Params
		return Request{ID: kv.RequestID("cmpl-" + id + "-0-bbbbbbbb"), Prompt: p, MaxTokens: maxTokens, Params: &params}
	}
}

// prefilled runs P's leg and gives D's.
func (x pair) prefilled(t testing.TB, id string, p []kv.Token, maxTokens int) Request {
	t.Helper()
	prefill, decode := pullLegs(id, p, maxTokens)
	a := generate(t, x.p, prefill)
	if a.Err != nil || a.Params == nil {
		t.Fatalf("P answers %+v", a.Output)
	}
	return decode(a)
}

func (x pair) pull(t testing.TB, id string, p []kv.Token, maxTokens int) answer {
	t.Helper()
	return generate(t, x.d, x.prefilled(t, id, p, maxTokens))
}

// Tokens are those of the model alone, whatever the prompt's length, and D computes the last prompt
// token only.
func TestPull(t *testing.T) {
	fabric := local.New(local.Config{})
	for name, change := range map[string]func(*Config){
		"shm": func(c *Config) { c.Transport = TransportSHM },
		"tcp": func(c *Config) { c.Transport = TransportTCP },
		"auto, no prefix cache, other layout": func(c *Config) {
			c.NoPrefixCache, c.Layout, c.BlockSize, c.NumBlocks = true, model.LBNHC, 8, 300
		},
		"agents in this process, rotated keys": func(c *Config) {
			c.Keys = model.RotatedKeys
			c.newAgent = func(c Config) (agent.Agent, error) { return fabric.Agent(agent.Name(c.EngineID)) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newPullPair(t, change)
			if c := x.p.Coordinates(); c.TransferMode != kv.Pull {
				t.Errorf("coordinates %+v", c)
			}
			long := x.d.MaxContext() - 1
			if name != "shm" {
				long = 300 // one with a full context is enough
			}
			if longPrompt > 0 {
				long = longPrompt
			}
			for i, n := range []int{1, 15, 16, 17, 100, long} {
				id := fmt.Sprintf("r%d", i)
				maxTokens := min(6, x.d.MaxContext()-n)
				decode := x.pull(t, id, prompt(n, 7*i+1), maxTokens)
				checkAnswer(t, id, decode, expect(t, prompt(n, 7*i+1), maxTokens, model.Sampling{}))
				u := decode.Usage
				if u.ComputedPrompt != 1 || u.Cached != 0 || u.External != n-1 {
					t.Errorf("%d tokens: D's usage is %+v", n, u)
				}
				f := decode.Transfer
				if f.Blocks != (n+x.d.cfg.BlockSize-1)/x.d.cfg.BlockSize || f.Transport == "" || f.Why == "" || f.Bytes == 0 {
					t.Errorf("%d tokens: transfer %+v", n, f)
				}
				settle(t, x.p)
				settle(t, x.d)
			}
			if s := x.d.Stats(); s.Received == 0 || s.ReceiveFailed != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// What D has in its prefix cache is not read; of a prompt that is there but for its last token nothing
// is, and P is told all the same (B-029).
func TestPullBehindPrefixHit(t *testing.T) {
	x := newPullPair(t, func(c *Config) { c.Lease = 5 * time.Minute })
	p := prompt(100, 5)
	x.pull(t, "a", p[:70], 1)
	decode := x.pull(t, "b", p, 4)
	checkAnswer(t, "behind a hit", decode, expect(t, p, 4, model.Sampling{}))
	if u, f := decode.Usage, decode.Transfer; u.Cached != 64 || u.External != 35 || u.ComputedPrompt != 1 || f.Blocks != 3 {
		t.Errorf("usage %+v, transfer %+v", u, f)
	}
	settle(t, x.p)
	decode = x.pull(t, "c", p[:97], 4)
	checkAnswer(t, "all but one token", decode, expect(t, p[:97], 4, model.Sampling{}))
	if u := decode.Usage; u.Cached != 96 || u.External != 0 || u.ComputedPrompt != 1 {
		t.Errorf("usage %+v", u)
	}
	settle(t, x.p)
	settle(t, x.d)
}

// A decode prompt that goes on behind P's: what P has is read, the rest computed.
func TestPullOfABeginning(t *testing.T) {
	x := newPullPair(t, nil)
	p := prompt(150, 5)
	for i, n := range []int{1, 16, 64, 70, 149} {
		prefill, decode := pullLegs(fmt.Sprintf("r%d", i), append([]kv.Token{kv.Token(40 + i)}, p[:n-1]...), 4)
		r := decode(generate(t, x.p, prefill))
		r.Prompt = append([]kv.Token{kv.Token(40 + i)}, p...)
		a := generate(t, x.d, r)
		checkAnswer(t, string(r.ID), a, expect(t, r.Prompt, 4, model.Sampling{}))
		if u := a.Usage; u.External != n || u.ComputedPrompt != len(r.Prompt)-n {
			t.Errorf("%d of %d tokens: usage %+v", n, len(r.Prompt), u)
		}
		settle(t, x.p)
	}
	settle(t, x.d)
}

func TestPullMany(t *testing.T) {
	x := newPullPair(t, func(c *Config) { c.NumBlocks = 80 })
	shared := prompt(32, 99)
	var wg sync.WaitGroup
	for i := range 12 {
		p := append(append([]kv.Token{}, shared[:16*(i%3)]...), prompt(10+7*i, i)...)
		wg.Go(func() {
			decode := x.pull(t, fmt.Sprintf("r%d", i), p, 3)
			checkAnswer(t, fmt.Sprintf("r%d", i), decode, expect(t, p, 3, model.Sampling{}))
		})
	}
	wg.Wait()
	settle(t, x.p)
	settle(t, x.d)
}

// Engines of role both pull in both directions at once.
func TestPullBothWays(t *testing.T) {
	pulls := func(c *Config) { c.Mode = kv.Pull }
	a, b := newEngine(t, pulls), newEngine(t, pulls)
	there, back := pair{p: a, d: b}, pair{p: b, d: a}
	var wg sync.WaitGroup
	for i := range 4 {
		p := prompt(33+i, i)
		for name, x := range map[string]pair{"there": there, "back": back} {
			wg.Go(func() {
				decode := x.pull(t, fmt.Sprintf("%s%d", name, i), p, 3)
				checkAnswer(t, name, decode, expect(t, p, 3, model.Sampling{}))
			})
		}
	}
	wg.Wait()
	settle(t, a)
	settle(t, b)
}

// Several answers to one prompt take one hand-off: each reads, and P keeps its blocks until all have
// (H9, B-027), also when some of them are given up.
func TestPullSiblings(t *testing.T) {
	x := newPullPair(t, func(c *Config) { c.Lease = 5 * time.Minute })
	p := prompt(90, 3)
	decode := x.prefilled(t, "r", p, 4)
	const n = 4
	decode.Params.Readers = n
	streams := make([]*Stream, n)
	for i := range n {
		r, params := decode, *decode.Params
		r.ID, r.Params = kv.RequestID(fmt.Sprintf("%d_%s", i, decode.ID)), &params
		streams[i] = submit1(t, x.d, r)
		if i == 2 {
			streams[i].Close()
		}
	}
	for i, s := range streams {
		a := read(t, s)
		if i == 2 {
			continue
		}
		checkAnswer(t, fmt.Sprint(i), a, expect(t, p, 4, model.Sampling{}))
	}
	settle(t, x.p)
	settle(t, x.d)
}

// A D whose queue has no room for all answers of a hand-off takes none: P has heard of none of them, and whoever
// asks again with the same parameters, there or elsewhere, gets all.
func TestPullSiblingsRefusedTogether(t *testing.T) {
	full := make(chan struct{}) // no step of D ends before
	x := newPullPair(t, func(c *Config) {
		c.Lease = 5 * time.Minute
		if c.Role == connector.Consumer {
			c.MaxQueue, c.MaxRunning = 4, 1
			c.onStep = func() { <-full }
		}
	})
	p := prompt(90, 3)
	decode := x.prefilled(t, "r", p, 4)
	const n = 4
	decode.Params.Readers = n
	var busy []*Stream
	for i := range 2 {
		busy = append(busy, submit1(t, x.d, Request{ID: kv.RequestID(fmt.Sprint("busy", i)), Prompt: prompt(20, 10+i), MaxTokens: 200}))
	}
	sibling := func(i int) Request {
		r, params := decode, *decode.Params
		r.ID, r.Params = kv.RequestID(fmt.Sprintf("%d_%s", i, decode.ID)), &params
		if i == 0 {
			r.Together = n
		}
		return r
	}
	var refused *RequestError
	if _, err := x.d.Submit(t.Context(), sibling(0)); !errors.As(err, &refused) || refused.Kind != KindOverload || !strings.Contains(err.Error(), "no room for all 4 answers") {
		t.Errorf("%v", err)
	}
	close(full)
	for _, s := range busy {
		s.Close()
		read(t, s)
	}
	if held := x.p.Stats().Held; held != 1 {
		t.Errorf("P holds %d requests", held)
	}
	streams := make([]*Stream, n)
	for i := range n {
		streams[i] = submit1(t, x.d, sibling(i))
	}
	for i, s := range streams {
		checkAnswer(t, fmt.Sprint(i), read(t, s), expect(t, p, 4, model.Sampling{}))
	}
	settle(t, x.p)
	settle(t, x.d)
}

// D goes away at every stage: P's blocks come home long before their lease ends.
func TestPullAborts(t *testing.T) {
	t.Parallel()
	x := newPullPair(t, func(c *Config) { c.Lease = 5 * time.Minute })
	t.Run("before it is scheduled", func(t *testing.T) {
		// Somebody has all of D's blocks.
		hog := submit1(t, x.d, Request{ID: "hog", Prompt: prompt(1800, 9), MaxTokens: 200})
		more := submit1(t, x.d, Request{ID: "hog2", Prompt: prompt(700, 8), MaxTokens: 100})
		decode := x.prefilled(t, "queued", prompt(300, 1), 5)
		d := submit1(t, x.d, decode)
		d.Close()
		if a := read(t, d); a.Finish != connector.FinishAbort {
			t.Errorf("%+v", a.Output)
		}
		settle(t, x.p)
		hog.Close()
		more.Close()
		read(t, hog)
		read(t, more)
		settle(t, x.d)
	})
	t.Run("at once", func(t *testing.T) {
		for i := range 20 {
			decode := x.prefilled(t, fmt.Sprintf("r%d", i), prompt(100+i, i), 5)
			d := submit1(t, x.d, decode)
			time.Sleep(time.Duration(i*50) * time.Microsecond) // somewhere in claim and READ
			d.Close()
			want := expect(t, prompt(100+i, i), 5, model.Sampling{})
			if a := read(t, d); len(a.Tokens) > len(want) || !same(a.Tokens, want[:len(a.Tokens)]) {
				t.Errorf("%v, want %v", a.Tokens, want)
			}
		}
		settle(t, x.p)
		settle(t, x.d)
	})
	decode := x.pull(t, "afterwards", prompt(50, 4), 3)
	checkAnswer(t, "afterwards", decode, expect(t, prompt(50, 4), 3, model.Sampling{}))
}

// A decode request that can never run gives P's blocks back at once (B-019).
func TestPullRefusedByD(t *testing.T) {
	x := newPullPair(t, func(c *Config) {
		c.Lease = 5 * time.Minute
		if c.Role == connector.Consumer {
			c.NumBlocks = 5
		}
	})
	decode := x.prefilled(t, "r", prompt(100, 1), 3)
	var refused *RequestError
	if _, err := x.d.Submit(t.Context(), decode); !errors.As(err, &refused) || refused.Kind != KindInvalid {
		t.Errorf("%v", err)
	}
	settle(t, x.p)
}

// The lease ends between the legs, and its blocks are used again: D never answers with other KV, but
// with an error that names the lease, or computes.
func TestPullAfterLease(t *testing.T) {
	for _, policy := range []kv.LoadFailurePolicy{kv.FailOnLoadFailure, kv.RecomputeOnLoadFailure} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			x := newPullPair(t, func(c *Config) {
				c.Lease, c.LoadFailurePolicy, c.NumBlocks = time.Second, policy, 20
			})
			p := prompt(200, 5)
			decode := x.prefilled(t, "r", p, 4)
			settle(t, x.p) // the lease has ended
			generate(t, x.p, Request{ID: "other", Prompt: prompt(300, 6), MaxTokens: 1})
			a := generate(t, x.d, decode)
			if policy == kv.RecomputeOnLoadFailure {
				checkAnswer(t, "recomputed", a, expect(t, p, 4, model.Sampling{}))
				if a.LoadErr == nil || a.LoadErr.Phase != connector.PhaseLease || a.Usage.ComputedPrompt != 200 {
					t.Errorf("%+v", a.Output)
				}
			} else if a.Err == nil || a.Err.Kind != KindTransfer || a.Err.Phase != string(connector.PhaseLease) {
				t.Errorf("%+v", a.Output)
			}
			settle(t, x.d)
		})
	}
}

// A decode request that waits longer than P's lease keeps P's blocks by its beats.
func TestPullWaitsLongerThanTheLease(t *testing.T) {
	if testing.Short() {
		t.Skip("computes for long under the race detector")
	}
	t.Parallel()
	x := newPullPair(t, func(c *Config) { c.Lease, c.NumBlocks = shortLease, 64 })
	var hogs []*Stream // each has most of D's blocks
	for i := range 30 {
		hogs = append(hogs, submit1(t, x.d, Request{ID: kv.RequestID(fmt.Sprint("hog", i)), Prompt: prompt(700, i+9), MaxTokens: 300, IgnoreEOS: true}))
	}
	p := prompt(600, 5)
	decode := x.prefilled(t, "r", p, 2)
	d := submit1(t, x.d, decode)
	for until := time.Now().Add(2 * x.p.cfg.Lease); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		if s := x.p.Stats(); s.Held != 1 {
			t.Fatalf("P does not hold the request any more: %+v", s)
		}
	}
	if s := x.d.Stats(); s.Waiting < 2 {
		t.Errorf("the request had nothing to wait for: %+v", s)
	}
	for _, hog := range hogs {
		hog.Close()
		read(t, hog)
	}
	checkAnswer(t, "after a long wait", read(t, d), expect(t, p, 2, model.Sampling{}))
	settle(t, x.p)
	settle(t, x.d)
}

// Parameters that are not those of P's answer.
func TestPullRefusals(t *testing.T) {
	t.Parallel()
	x := newPullPair(t, nil)
	p := prompt(70, 5)
	for name, c := range map[string]struct {
		change func(*Request)
		phase  connector.Phase
		says   string
	}{
		"another prompt":        {func(r *Request) { r.Prompt = prompt(70, 6) }, connector.PhaseParams, "prompts differ"},
		"another salt":          {func(r *Request) { r.CacheSalt = "x" }, connector.PhaseParams, "prompts differ"},
		"swapped blocks":        {func(r *Request) { b := r.Params.RemoteBlockIDs[0]; b[0], b[1] = b[1], b[0] }, connector.PhaseParams, "remote_block_ids"},
		"a block beyond P's":    {func(r *Request) { r.Params.RemoteBlockIDs[0][1] = 100000 }, connector.PhaseParams, "beyond"},
		"too few blocks":        {func(r *Request) { r.Params.RemoteBlockIDs[0] = r.Params.RemoteBlockIDs[0][:2] }, connector.PhaseParams, "kernel blocks"},
		"another request":       {func(r *Request) { r.Params.RemoteRequestID = "cmpl-other-0-aaaaaaaa" }, connector.PhaseLease, "does not keep"},
		"an earlier lease":      {func(r *Request) { r.Params.Lease-- }, connector.PhaseLease, "lease"},
		"fewer tokens than P's": {func(r *Request) { r.Params.RemoteNumTokens = 64 }, connector.PhaseParams, "prompts differ"},
	} {
		t.Run(name, func(t *testing.T) {
			decode := x.prefilled(t, strings.ReplaceAll(name, " ", "-"), p, 3)
			bad := decode
			params := *decode.Params
			params.RemoteBlockIDs = params.RemoteBlockIDs.Clone()
			bad.Params = &params
			bad.ID += "x"
			c.change(&bad)
			a := generate(t, x.d, bad)
			if a.Err == nil || a.Err.Phase != string(c.phase) || !strings.Contains(a.Err.Error(), c.says) {
				t.Errorf("%+v: %v", a.Output, a.Err)
			}
			settle(t, x.d)
			// P has kept its blocks for the right request.
			if ok, err := x.p.Release(decode.Params.RemoteRequestID, decode.Params.Lease); !ok || err != nil {
				t.Errorf("P has let the blocks go: %v, %v", ok, err)
			}
		})
	}
}

// A push and a pull engine refuse each other, and say which side has which mode.
func TestModesRefuseEachOther(t *testing.T) {
	p := newEngine(t, func(c *Config) { c.Role, c.Mode = connector.Producer, kv.Pull })
	d := newEngine(t, func(c *Config) { c.Role = connector.Consumer })
	x := pair{p: p, d: d}
	_, decode := x.legs("r", prompt(40, 1), 5)
	a := generate(t, d, decode)
	if a.Err == nil || a.Err.Phase != string(connector.PhaseHandshake) || !strings.Contains(a.Err.Error(), "its transfer mode is pull, ours") {
		t.Errorf("a push D at a pull P: %v", a.Err)
	}
	q := x.prefilled(t, "q", prompt(40, 1), 5)
	_, err := d.Submit(t.Context(), q)
	var refused *RequestError
	if !errors.As(err, &refused) || refused.Kind != KindInvalid || !strings.Contains(err.Error(), `transfer_mode is "pull"`) {
		t.Errorf("parameters of a pull P at a push D: %v", err)
	}
	closeNow(t, p)
}

func TestPullPrefillEngineCloses(t *testing.T) {
	x := newPullPair(t, nil)
	x.pull(t, "first", prompt(20, 1), 2) // so that they are connected
	decode := x.prefilled(t, "r", prompt(40, 1), 5)
	closeNow(t, x.p)
	if a := generate(t, x.d, decode); a.Finish != connector.FinishError || a.Err.Kind != KindTransfer {
		t.Errorf("%+v", a.Output)
	}
	settle(t, x.d)
}

// The decode engine goes: P's blocks wait for their lease.
func TestPullDecodeEngineCloses(t *testing.T) {
	t.Parallel()
	x := newPullPair(t, func(c *Config) { c.Lease = shortLease })
	decode := x.prefilled(t, "r", prompt(40, 1), 5)
	d := submit1(t, x.d, decode)
	closeNow(t, x.d)
	read(t, d)
	settle(t, x.p)
}

// A decode engine that ends right after its answer has told P that it has read: its last words arrive.
func TestPullThenClose(t *testing.T) {
	for i := range 20 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			x := newPullPair(t, func(c *Config) { c.Lease = 5 * time.Minute })
			x.pull(t, "r", prompt(40, i), 1)
			if err := x.d.Close(t.Context()); err != nil {
				t.Error(err)
			}
			settle(t, x.p)
		})
	}
}
