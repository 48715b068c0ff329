package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// pair is a prefill and a decode engine.
type pair struct{ p, d *Engine }

func newPair(t *testing.T, change func(*Config)) pair {
	t.Helper()
	with := func(role connector.Role) *Engine {
		return newEngine(t, func(c *Config) {
			c.Role = role
			if change != nil {
				change(c)
			}
		})
	}
	return pair{p: with(connector.Producer), d: with(connector.Consumer)}
}

// legs makes the two requests of one hand-off as a router does.
func (x pair) legs(id string, p []kv.Token, maxTokens int) (prefill, decode Request) {
	at := x.p.Coordinates()
	transfer := kv.TransferID("xfer-" + id)
	prefill = Request{ID: kv.RequestID("cmpl-" + id + "-0-aaaaaaaa"), Prompt: p, MaxTokens: 1,
		Params: &kv.TransferParams{DoRemoteDecode: true, TransferID: transfer}}
	decode = Request{ID: kv.RequestID("cmpl-" + id + "-0-bbbbbbbb"), Prompt: p, MaxTokens: maxTokens,
		Params: &kv.TransferParams{DoRemotePrefill: true, RemoteEngineID: at.EngineID, RemoteHost: at.Host, RemotePort: at.Port,
			TPSize: at.TPSize, PPSize: at.PPSize, RemoteRequestID: kv.RequestID(id), TransferID: transfer}}
	return prefill, decode
}

// eachMode runs a test with a pair of each mode.
func eachMode(t *testing.T, change func(*Config), test func(t *testing.T, x pair)) {
	t.Helper()
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			test(t, newPair(t, func(c *Config) {
				c.Mode = mode
				if change != nil {
					change(c)
				}
			}))
		})
	}
}

// begin starts P's leg as a router of the pair's mode does; decode gives D's leg, in push at once and in pull
// when P has answered.
func (x pair) begin(t testing.TB, id string, p []kv.Token, maxTokens int) (prefill *Stream, decode func() (p answer, d Request)) {
	t.Helper()
	if x.p.cfg.Mode == kv.Pull {
		r, leg := pullLegs(id, p, maxTokens)
		s := submit1(t, x.p, r)
		return s, func() (answer, Request) {
			a := read(t, s)
			if a.Params == nil {
				t.Fatalf("P answers %+v", a.Output)
			}
			return a, leg(a)
		}
	}
	r, leg := x.legs(id, p, maxTokens)
	s := submit1(t, x.p, r)
	return s, func() (answer, Request) { return read(t, s), leg }
}

// handOff runs both legs, in push at once, and gives both answers.
func (x pair) handOff(t testing.TB, id string, p []kv.Token, maxTokens int) (prefill, decode answer) {
	if x.p.cfg.Mode == kv.Pull {
		_, leg := x.begin(t, id, p, maxTokens)
		prefill, r := leg()
		return prefill, generate(t, x.d, r)
	}
	a, b := x.legs(id, p, maxTokens)
	var wg sync.WaitGroup
	wg.Go(func() { prefill = generate(t, x.p, a) })
	wg.Go(func() { decode = generate(t, x.d, b) })
	wg.Wait()
	return prefill, decode
}

// settle waits until an engine holds nothing.
func settle(t testing.TB, e *Engine) {
	t.Helper()
	eventually(t, e, func(s Stats) bool {
		return s.BlocksFree == s.BlocksTotal && s.Held+s.Running+s.Waiting+s.WaitingRemote == 0
	})
}

// eventually waits until an engine is as it must become.
func eventually(t testing.TB, e *Engine, ok func(Stats) bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		s := e.Stats()
		if ok(s) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it stays so: %+v", s)
		}
		time.Sleep(time.Millisecond)
	}
}

// longPrompt, if set, stands for the longest prompt that the context allows.
var longPrompt int

// Tokens are those of the model alone, whatever the prompt's length, and D computes the last prompt
// token only.
func TestPush(t *testing.T) {
	fabric := local.New(local.Config{})
	for name, change := range map[string]func(*Config){
		"default": nil,
		"no prefix cache, other layout": func(c *Config) {
			c.NoPrefixCache, c.Layout, c.BlockSize, c.NumBlocks = true, model.LBNHC, 8, 300
		},
		"agents in this process, rotated keys": func(c *Config) {
			c.Keys = model.RotatedKeys
			c.newAgent = func(c Config) (agent.Agent, error) { return fabric.Agent(agent.Name(c.EngineID)) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newPair(t, change)
			long := x.d.MaxContext() - 1
			if longPrompt > 0 {
				long = longPrompt
			}
			for i, n := range []int{1, 15, 16, 17, 100, long} {
				id := fmt.Sprintf("r%d", i)
				maxTokens := min(6, x.d.MaxContext()-n)
				prefill, decode := x.handOff(t, id, prompt(n, 7*i+1), maxTokens)
				want := expect(t, prompt(n, 7*i+1), maxTokens, model.Sampling{})
				checkAnswer(t, id+" prefill", prefill, want[:1])
				checkAnswer(t, id+" decode", decode, want)
				u := decode.Usage
				if u.ComputedPrompt != 1 || u.Cached != 0 || u.External != n-1 {
					t.Errorf("%d tokens: D's usage is %+v", n, u)
				}
				f := decode.Transfer
				if f.Blocks != (n+x.d.cfg.BlockSize-1)/x.d.cfg.BlockSize || f.Transport == "" || f.Why == "" || f.Bytes == 0 {
					t.Errorf("%d tokens: transfer %+v", n, f)
				}
				if p := prefill.Params; p == nil || !p.DoRemotePrefill || p.RemoteEngineID != x.p.Coordinates().EngineID || p.RemoteNumTokens != n {
					t.Errorf("%d tokens: P answers %+v", n, p)
				}
				settle(t, x.p)
				settle(t, x.d)
			}
			if s := x.d.Stats(); s.Peers != 1 || s.Received == 0 || s.ReceiveFailed != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// D's own prefix hit is not transferred again.
func TestPushBehindPrefixHit(t *testing.T) {
	x := newPair(t, nil)
	p := prompt(100, 5)
	x.handOff(t, "a", p[:70], 1)
	_, decode := x.handOff(t, "b", p, 4)
	checkAnswer(t, "behind a hit", decode, expect(t, p, 4, model.Sampling{}))
	if u, f := decode.Usage, decode.Transfer; u.Cached != 64 || u.External != 35 || u.ComputedPrompt != 1 || f.Blocks != 3 {
		t.Errorf("usage %+v, transfer %+v", u, f)
	}
}

func TestPushMany(t *testing.T) {
	x := newPair(t, func(c *Config) { c.NumBlocks = 40 })
	shared := prompt(32, 99)
	var wg sync.WaitGroup
	for i := range 12 {
		p := append(append([]kv.Token{}, shared[:16*(i%3)]...), prompt(10+7*i, i)...)
		wg.Go(func() {
			_, decode := x.handOff(t, fmt.Sprintf("r%d", i), p, 3)
			checkAnswer(t, fmt.Sprintf("r%d", i), decode, expect(t, p, 3, model.Sampling{}))
		})
	}
	wg.Wait()
	settle(t, x.p)
	settle(t, x.d)
}

// Engines of role both push in both directions at once.
func TestPushBothWays(t *testing.T) {
	a, b := newEngine(t, nil), newEngine(t, nil)
	there, back := pair{p: a, d: b}, pair{p: b, d: a}
	var wg sync.WaitGroup
	for i := range 4 {
		p := prompt(33+i, i)
		for name, x := range map[string]pair{"there": there, "back": back} {
			wg.Go(func() {
				_, decode := x.handOff(t, fmt.Sprintf("%s%d", name, i), p, 3)
				checkAnswer(t, name, decode, expect(t, p, 3, model.Sampling{}))
			})
		}
	}
	wg.Wait()
	settle(t, a)
	settle(t, b)
}

// D goes away at every stage: nothing is left on either side.
func TestDecodeAborts(t *testing.T) {
	x := newPair(t, nil)
	t.Run("before P has the request", func(t *testing.T) {
		_, decode := x.legs("early", prompt(50, 1), 5)
		s := submit1(t, x.d, decode)
		s.Close()
		if a := read(t, s); a.Finish != connector.FinishAbort {
			t.Errorf("%+v", a.Output)
		}
		settle(t, x.d)
	})
	t.Run("while P prefills", func(t *testing.T) {
		p := prompt(1500, 2)
		prefill, decode := x.legs("late", p, 5)
		d := submit1(t, x.d, decode)
		s := submit1(t, x.p, prefill)
		d.Close()
		if a := read(t, d); a.Finish != connector.FinishAbort {
			t.Errorf("%+v", a.Output)
		}
		s.Close()
		read(t, s)
		settle(t, x.p)
		settle(t, x.d)
	})
	t.Run("while it decodes", func(t *testing.T) {
		prefill, decode := x.legs("decoding", prompt(50, 3), 1500)
		s, d := submit1(t, x.p, prefill), submit1(t, x.d, decode)
		read(t, s)
		if o, err := d.Next(t.Context()); err != nil || len(o.Tokens) == 0 {
			t.Fatalf("%+v, %v", o, err)
		}
		d.Close()
		if a := read(t, d); a.Finish != connector.FinishAbort || a.Usage.ComputedPrompt != 1 {
			t.Errorf("%+v", a.Output)
		}
		settle(t, x.p)
		settle(t, x.d)
	})
	_, decode := x.handOff(t, "afterwards", prompt(50, 4), 3)
	checkAnswer(t, "afterwards", decode, expect(t, prompt(50, 4), 3, model.Sampling{}))
}

// Clients of either leg go away at any time: what is answered is right as far as it goes, and
// nothing is left.
func TestClientsLeave(t *testing.T) {
	// A D that leaves does not tell P, whose lease must end then.
	t.Parallel()
	x := newPair(t, func(c *Config) { c.NumBlocks, c.Lease = 60, shortLease })
	rng := rand.New(rand.NewPCG(1, 2))
	var wg sync.WaitGroup
	for i := range 24 {
		p := prompt(20+rng.IntN(60), i)
		patience := [2]int{rng.IntN(5), rng.IntN(5)} // outputs read before the client leaves; 4: it stays
		prefill, decode := x.legs(fmt.Sprintf("r%d", i), p, 4)
		want := expect(t, p, 4, model.Sampling{})
		for leg, r := range []Request{prefill, decode} {
			e, reads := []*Engine{x.p, x.d}[leg], patience[leg]
			wg.Go(func() {
				s := submit1(t, e, r)
				var got []kv.Token
				for range reads {
					o, err := s.Next(t.Context())
					if err != nil {
						break
					}
					got = append(got, o.Tokens...)
				}
				if reads < 4 {
					s.Close()
				}
				a := read(t, s)
				got = append(got, a.Tokens...)
				if len(got) > len(want) || !same(got, want[:len(got)]) {
					t.Errorf("%s: %v, want %v", r.ID, got, want)
				}
			})
		}
	}
	wg.Wait()
	settle(t, x.p)
	settle(t, x.d)
	_, decode := x.handOff(t, "afterwards", prompt(50, 4), 3)
	checkAnswer(t, "afterwards", decode, expect(t, prompt(50, 4), 3, model.Sampling{}))
}

// P gives its leg up: D's request ends with an error that says so, at once.
func TestPrefillAborts(t *testing.T) {
	x := newPair(t, nil)
	prefill, decode := x.legs("r", prompt(1800, 1), 5)
	d, p := submit1(t, x.d, decode), submit1(t, x.p, prefill)
	p.Close()
	read(t, p)
	a := read(t, d)
	if a.Finish != connector.FinishError || a.Err == nil || a.Err.Kind != KindTransfer {
		t.Fatalf("%+v", a.Output)
	}
	var cause *connector.Error
	if !errors.As(a.Err, &cause) || cause.Request != decode.ID || a.Err.Phase != string(cause.Phase) {
		t.Errorf("the error is %v", a.Err)
	}
	settle(t, x.p)
	settle(t, x.d)
}

func TestHandshakeFails(t *testing.T) {
	x := newPair(t, nil)
	_, decode := x.legs("r", prompt(40, 1), 5)
	decode.Params.RemoteEngineID = "another"
	a := generate(t, x.d, decode)
	if a.Finish != connector.FinishError || a.Err == nil || a.Err.Phase != string(connector.PhaseHandshake) {
		t.Errorf("%+v", a.Output)
	}
	settle(t, x.d)
}

// P closes while D waits: D's request ends.
func TestPrefillEngineCloses(t *testing.T) {
	x := newPair(t, nil)
	x.handOff(t, "first", prompt(20, 1), 2) // so that they are connected
	_, decode := x.legs("r", prompt(40, 1), 5)
	d := submit1(t, x.d, decode)
	if err := x.p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := read(t, d); a.Finish != connector.FinishError || a.Err.Kind != KindTransfer {
		t.Errorf("%+v", a.Output)
	}
	settle(t, x.d)
}

// The decode engine closes with a bound that is over: a request that waits for KV ends, and P's
// blocks come back.
func TestDecodeEngineCloses(t *testing.T) {
	x := newPair(t, nil)
	_, decode := x.legs("r", prompt(40, 1), 5)
	d := submit1(t, x.d, decode)
	closeNow(t, x.d)
	if a := read(t, d); a.Finish != connector.FinishAbort || a.Err.Kind != KindUnavailable {
		t.Errorf("%+v", a.Output)
	}
}

// Every fault shows in the tokens.
func TestInjectedFaults(t *testing.T) {
	p := prompt(70, 11)
	want := expect(t, p, 12, model.Sampling{})
	for _, fault := range KVFaults {
		t.Run(string(fault), func(t *testing.T) {
			t.Parallel()
			x := newPair(t, func(c *Config) {
				c.NoPrefixCache = true
				if c.Role == connector.Consumer {
					c.InjectKVFault = []KVFault{fault}
				}
			})
			_, decode := x.handOff(t, "r", p, 12)
			if decode.Err != nil || same(decode.Tokens, want) {
				t.Errorf("tokens %v (%v) do not show the fault", decode.Tokens, decode.Err)
			}
		})
	}
}

// lockedBuffer is a log that tests read while engines write.
type lockedBuffer struct {
	mu struct {
		sync.Mutex
		bytes.Buffer
	}
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.Buffer.Write(p)
}

func TestLogLine(t *testing.T) {
	var out lockedBuffer
	x := newPair(t, func(c *Config) {
		if c.Role == connector.Consumer {
			c.Log = slog.New(slog.NewJSONHandler(&out, nil))
		}
	})
	_, decode := x.handOff(t, "r", prompt(40, 1), 3)
	var line map[string]any
	out.mu.Lock()
	defer out.mu.Unlock()
	if err := json.Unmarshal(out.mu.Bytes(), &line); err != nil {
		t.Fatalf("%v in %s", err, out.mu.String())
	}
	for key, want := range map[string]any{
		"msg": LogFinished, LogID: "cmpl-r-0-bbbbbbbb", LogPromptTokens: 40.0, LogCached: 0.0, LogExternal: 39.0, LogComputedPrompt: 1.0,
		LogCompletion: 3.0, LogFinish: "length", LogBlocks: 3.0, LogBytes: float64(decode.Transfer.Bytes),
		LogTransport: decode.Transfer.Transport, LogWhy: decode.Transfer.Why, LogRemoteEngine: string(x.p.Coordinates().EngineID),
	} {
		if line[key] != want {
			t.Errorf("%s is %v, want %v", key, line[key], want)
		}
	}
	for _, key := range []string{LogTransferMS, LogWaitMS, LogGBps} {
		if v, ok := line[key].(float64); !ok || v < 0 {
			t.Errorf("%s is %v", key, line[key])
		}
	}
	if _, ok := line[LogError]; ok {
		t.Errorf("an error without one: %v", line)
	}
}
