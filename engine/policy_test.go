package engine

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// recompute is the change of an engine that computes what its peer does not bring.
func recompute(c *Config) { c.LoadFailurePolicy = kv.RecomputeOnLoadFailure }

// P dies before, while and after it has the request. Under `recompute` D's tokens are those of an
// undisturbed run, under `fail` its client gets an error that names the phase; neither leaves
// anything in the prefix cache, so that the prompt and its prefixes are answered rightly afterwards.
func TestPrefillDies(t *testing.T) {
	const n = 80
	for _, policy := range []kv.LoadFailurePolicy{kv.FailOnLoadFailure, kv.RecomputeOnLoadFailure} {
		for name, die := range map[string]func(t *testing.T, x pair, prefill Request){
			"before it has the request": func(t *testing.T, x pair, _ Request) { closeNow(t, x.p) },
			"while it prefills": func(t *testing.T, x pair, prefill Request) {
				prefill.Prompt = prompt(1900, 3) // of the same transfer, but never finished
				s := submit1(t, x.p, prefill)
				closeNow(t, x.p)
				read(t, s)
			},
		} {
			t.Run(string(policy)+"/"+name, func(t *testing.T) {
				t.Parallel()
				x := newPair(t, func(c *Config) { c.LoadFailurePolicy = policy })
				x.handOff(t, "first", prompt(20, 1), 2) // so that they are connected
				settle(t, x.p)
				p := prompt(n, 9)
				want := expect(t, p, 4, model.Sampling{})
				prefill, decode := x.legs("r", p, 4)
				s := submit1(t, x.d, decode)
				die(t, x, prefill)
				checkPolicy(t, policy, read(t, s), want)
				settle(t, x.d)

				// P is dead for good: everything that D answers from now on is its own.
				for _, m := range []int{n, n - 1, 64, 33, 16} {
					a := generate(t, x.d, Request{ID: kv.RequestID(fmt.Sprintf("again%d", m)), Prompt: p[:m], MaxTokens: 4})
					checkAnswer(t, fmt.Sprintf("the first %d tokens", m), a, expect(t, p[:m], 4, model.Sampling{}))
					if policy == kv.FailOnLoadFailure && m == n && a.Usage.Cached != 0 {
						t.Errorf("a failed load left %d tokens in the prefix cache", a.Usage.Cached)
					}
				}
				_, decode = x.legs("dead", p[:50], 4)
				checkPolicy(t, policy, generate(t, x.d, decode), expect(t, p[:50], 4, model.Sampling{}))
				settle(t, x.d)
			})
		}
	}
}

func checkPolicy(t *testing.T, policy kv.LoadFailurePolicy, a answer, want []kv.Token) {
	t.Helper()
	if policy == kv.FailOnLoadFailure {
		if a.Finish != connector.FinishError || a.Err == nil || a.Err.Kind != KindTransfer || a.Err.Phase == "" || len(a.Tokens) > 0 || a.LoadErr != nil {
			t.Errorf("%+v", a.Output)
		}
		return
	}
	checkAnswer(t, "recomputed", a, want)
	u := a.Usage
	if a.LoadErr == nil || a.LoadErr.Phase == "" || u.Recomputed == 0 || u.External != 0 || u.Cached+u.ComputedPrompt != u.Prompt {
		t.Errorf("%v, %+v", a.LoadErr, u)
	}
}

// A request's own policy goes before its engine's.
func TestPolicyOfRequest(t *testing.T) {
	x := newPair(t, recompute)
	y := pair{p: x.p, d: newEngine(t, func(c *Config) { c.Role = connector.Consumer })}
	for _, c := range []struct {
		name string
		d    *Engine
		own  kv.LoadFailurePolicy
		want kv.LoadFailurePolicy
	}{
		{"fail in an engine that recomputes", x.d, kv.FailOnLoadFailure, kv.FailOnLoadFailure},
		{"recompute in an engine that fails", y.d, kv.RecomputeOnLoadFailure, kv.RecomputeOnLoadFailure},
		{"of an engine that recomputes", x.d, "", kv.RecomputeOnLoadFailure},
		{"of an engine that fails", y.d, "", kv.FailOnLoadFailure},
	} {
		p := prompt(60, 5)
		_, decode := x.legs("r", p, 4)
		decode.Params.RemoteEngineID = "another"
		decode.Params.LoadFailurePolicy = c.own
		t.Log(c.name)
		checkPolicy(t, c.want, generate(t, c.d, decode), expect(t, p, 4, model.Sampling{}))
		settle(t, c.d)
	}
}

// P's client leaves while D waits: D goes on by itself.
func TestRecomputeWhenPrefillAborts(t *testing.T) {
	x := newPair(t, recompute)
	p := prompt(90, 1)
	prefill, decode := x.legs("r", p, 5)
	prefill.Prompt = prompt(1900, 1)
	d, s := submit1(t, x.d, decode), submit1(t, x.p, prefill)
	s.Close()
	read(t, s)
	checkPolicy(t, kv.RecomputeOnLoadFailure, read(t, d), expect(t, p, 5, model.Sampling{}))
	settle(t, x.p)
	settle(t, x.d)
	if s := x.d.Stats(); s.Recomputed != 1 || s.ReceiveFailed != 1 {
		t.Errorf("%+v", s)
	}
}

func TestLogLineOfRecomputation(t *testing.T) {
	var out lockedBuffer
	x := newPair(t, func(c *Config) {
		recompute(c)
		if c.Role == connector.Consumer {
			c.Log = slog.New(slog.NewJSONHandler(&out, nil))
		}
	})
	_, decode := x.legs("r", prompt(40, 1), 3)
	decode.Params.RemoteEngineID = "another"
	generate(t, x.d, decode)
	var line map[string]any
	out.mu.Lock()
	defer out.mu.Unlock()
	if err := json.Unmarshal(out.mu.Bytes(), &line); err != nil {
		t.Fatalf("%v in %s", err, out.mu.String())
	}
	if line[LogRecomputed] != 40.0 || line[LogRecomputedAfter] != string(connector.PhaseHandshake) || line[LogRecomputedWhy] == "" ||
		line[LogFinish] != "length" || line["level"] != "WARN" {
		t.Errorf("%v", line)
	}
}

// D's pool is full of loads that never come: whoever waits for their blocks gets them when the loads
// have been silent for too long, or have been in the way for too long although P may live.
func TestParkedLoadsEnd(t *testing.T) {
	for want, change := range map[connector.Phase]func(*Config){
		connector.PhaseWait:  func(c *Config) { c.RegistrationTimeout, c.ParkTimeout = time.Second, time.Hour },
		connector.PhaseLimit: func(c *Config) { c.ParkTimeout = time.Second },
	} {
		t.Run(string(want), func(t *testing.T) {
			t.Parallel()
			x := newPair(t, func(c *Config) {
				if c.NumBlocks = 8; c.Role == connector.Consumer {
					change(c)
				}
			})
			var parked []*Stream
			for i := range 2 {
				_, decode := x.legs(fmt.Sprintf("parked%d", i), prompt(60, i), 2)
				parked = append(parked, submit1(t, x.d, decode))
			}
			p := prompt(110, 7)
			own := submit1(t, x.d, Request{ID: "own", Prompt: p, MaxTokens: 3})
			checkAnswer(t, "a request behind them", read(t, own), expect(t, p, 3, model.Sampling{}))
			for _, s := range parked {
				if a := read(t, s); a.Finish != connector.FinishError || a.Err.Kind != KindTransfer || a.Err.Phase != string(want) {
					t.Errorf("a parked load ended as %+v", a.Output)
				}
			}
			settle(t, x.d)
			if want == connector.PhaseLimit { // with the other, a slow P would be silent for too long
				_, decode := x.handOff(t, "afterwards", p, 3)
				checkAnswer(t, "afterwards", decode, expect(t, p, 3, model.Sampling{}))
			}
		})
	}
}

// Both live, and each holds the blocks that the other's requests need: P's pool is full of what D has
// no room to receive, D's of loads that P has no room to compute. D gives loads up, and everything
// ends.
func TestPoolsThatWaitForEachOther(t *testing.T) {
	for _, policy := range []kv.LoadFailurePolicy{kv.FailOnLoadFailure, kv.RecomputeOnLoadFailure} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			x := newPair(t, func(c *Config) { c.NumBlocks, c.ParkTimeout, c.LoadFailurePolicy = 8, time.Second, policy })
			var prefills, decodes [4]Request
			var onP, onD [4]*Stream
			for i := range 4 {
				prefills[i], decodes[i] = x.legs(fmt.Sprintf("r%d", i), prompt(60, i), 3)
			}
			for i := range 4 { // D has room for the first two
				onD[i] = submit1(t, x.d, decodes[i])
			}
			for _, i := range []int{2, 3, 0, 1} { // and P for the last two
				onP[i] = submit1(t, x.p, prefills[i])
			}
			failed := 0
			for i := range 4 {
				want := expect(t, prefills[i].Prompt, 3, model.Sampling{})
				a := read(t, onD[i])
				if policy == kv.FailOnLoadFailure && a.Err != nil {
					failed++
					if a.Err.Phase != string(connector.PhaseLimit) {
						t.Errorf("%d: %v", i, a.Err)
					}
					continue
				}
				checkAnswer(t, fmt.Sprintf("D's %d", i), a, want)
			}
			if policy == kv.FailOnLoadFailure && failed == 0 || x.d.Stats().Unparked == 0 {
				t.Errorf("%d requests failed; %+v", failed, x.d.Stats())
			}
			for i, s := range onP {
				checkAnswer(t, fmt.Sprintf("P's %d", i), read(t, s), expect(t, prefills[i].Prompt, 1, model.Sampling{}))
			}
			settle(t, x.d)
			settle(t, x.p)
		})
	}
}

// A request of D that waits for blocks, and so never was registered, is aborted: both sides have
// their blocks again, P after its lease at the latest.
func TestAbortBeforeScheduling(t *testing.T) {
	t.Parallel()
	x := newPair(t, func(c *Config) { c.NumBlocks, c.Lease = 8, shortLease })
	prefill, decode := x.legs("r", prompt(60, 2), 3)
	checkAnswer(t, "P", generate(t, x.p, prefill), expect(t, prefill.Prompt, 1, model.Sampling{}))
	_, parked := x.legs("parked", prompt(80, 1), 3) // P waits a lease for its prefill
	other := submit1(t, x.d, parked)
	s := submit1(t, x.d, decode)
	if got := x.d.Stats(); got.Waiting != 1 || got.WaitingRemote != 1 {
		t.Fatalf("it does not wait for blocks: %+v", got)
	}
	s.Close()
	if a := read(t, s); a.Finish != connector.FinishAbort || a.Usage.Blocks != 0 {
		t.Errorf("%+v", a.Output)
	}
	other.Close()
	read(t, other)
	settle(t, x.d)
	settle(t, x.p)
}
