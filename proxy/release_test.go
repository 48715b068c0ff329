package proxy

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// keepingParams are those of a P that can be told to let go.
func keepingParams(mode kv.TransferMode, id string) string {
	p := strings.Replace(pullParams, `"pull"`, `"`+string(mode)+`"`, 1)
	p = strings.Replace(p, `"cmpl-1-0-98a6d2fc"`, fmt.Sprintf("%q", id), 1)
	return strings.Replace(p, `"kvferry_lease": 12`, `"kvferry_lease": 12, "kvferry_release": "t-`+id+`"`, 1)
}

func releaseOf(id string) string {
	return fmt.Sprintf(`{"request_id":%q,"lease":12,"token":"t-%s"}`, id, id)
}

func keyReleaseOf(s *seen) string {
	return fmt.Sprintf(`{"key":%q}`, s.header.Get(wire.ReleaseKeyHeader))
}

// keepingEngine is a P that keeps the KV of each leg under the leg's own id.
func keepingEngine(t *testing.T, mode kv.TransferMode) *engine {
	p := newEngine(t, wire.PrefillLeg, func(_ *engine, w http.ResponseWriter, _ *http.Request, s *seen) {
		_, _ = io.WriteString(w, `{"id":"x","kv_transfer_params":`+keepingParams(mode, s.id)+`}`)
	})
	p.mode = mode
	return p
}

// allReleased waits until P was told of every leg that it has answered, each once, and that nothing else is
// said to it.
func (r *rig) allReleased(t *testing.T, p *engine) {
	t.Helper()
	var want, got []string
	byKey := map[string]string{} // of a leg that was cut before its answer was read
	for _, s := range p.legs() {
		want = append(want, releaseOf(s.id))
		byKey[keyReleaseOf(s)] = releaseOf(s.id)
	}
	for range want {
		told := await(t, "a release", p.told)
		got = append(got, cmp.Or(byKey[told], told))
	}
	r.settled(t)
	r.words.Wait()
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) || len(p.told) != 0 {
		t.Errorf("P was told\n%v and %d more, want\n%v", got, len(p.told), want)
	}
	if n := r.releases.Load(); n != 0 {
		t.Errorf("%d releases are still counted", n)
	}
}

// TestReleased: whatever a D does instead of answering, the client gets its error, and P is told, whose
// answer was there before or came while its leg was ended.
func TestReleased(t *testing.T) {
	type answers = func(*engine, http.ResponseWriter, *http.Request, *seen)
	for name, c := range map[string]struct {
		answer answers // nil: nobody listens there
		status int
	}{
		"refuses with 400":       {status(400, openAIError), 400},
		"refuses with 429":       {status(429, openAIError), 429},
		"refuses with 503":       {status(503, openAIError), 503},
		"cannot be reached":      {nil, 503},
		"dies":                   {die, 502},
		"answers what is no use": {text("<html>"), 502},
		"cuts its answer":        {cutAnswer, 502},
		"ends without a word":    {events(), 502},
	} {
		for _, how := range []string{"push", "pull", "sequential push"} {
			if c.answer == nil && how == "push" {
				continue // it is over before P has anything
			}
			t.Run(name+", "+how, func(t *testing.T) {
				t.Parallel()
				mode := kv.TransferMode(strings.TrimPrefix(how, "sequential "))
				p := keepingEngine(t, mode)
				cfg := Config{Prefill: []Target{{URL: p.URL}}, Sequential: how == "sequential push"}
				if c.answer == nil {
					cfg.Decode = []Target{{URL: "http://" + closedPort(t), Peer: &core.Peer{Mode: mode}}}
				} else {
					answered := make(chan struct{}, 16)
					keep := p.answer
					p.answer = func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
						keep(e, w, req, s)
						_ = http.NewResponseController(w).Flush()
						answered <- struct{}{}
					}
					d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
						<-answered
						c.answer(e, w, req, s)
					})
					d.mode = mode
					cfg.Decode = []Target{{URL: d.URL}}
				}
				r := newRig(t, cfg)
				resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
				if err != nil || resp.StatusCode != c.status {
					t.Fatalf("%v, %+v, %s", err, resp, got)
				}
				r.allReleased(t, p)
				if _, metrics := r.fetch(t, "/metrics"); !strings.Contains(metrics, `kvferry_router_releases_total{result="released"}`) {
					t.Error("it is not counted")
				}
			})
		}
	}
}

// TestNotReleased: a P whose answer does not say that it can be told is not told, nor is one whose D has
// answered, or has begun to.
func TestNotReleased(t *testing.T) {
	keeping := func(change ...string) func(*engine, http.ResponseWriter, *http.Request, *seen) {
		return text(`{"id":"x","kv_transfer_params":` + strings.NewReplacer(change...).Replace(keepingParams(kv.Pull, "r")) + `}`)
	}
	for name, c := range map[string]struct {
		prefill, decode func(*engine, http.ResponseWriter, *http.Request, *seen)
	}{
		"a stock P":               {keeping(`"kvferry_lease": 12, "kvferry_release": "t-r",`, ""), status(429, openAIError)},
		"a P of an older version": {keeping(`, "kvferry_release": "t-r"`, ""), status(429, openAIError)},
		"no lease":                {keeping(`"kvferry_lease": 12,`, ""), status(429, openAIError)},
		"no KV":                   {keeping("[[4, 5]]", "[[]]"), status(429, openAIError)},
		"D answers":               {keeping(), goodDecode},
		"D streams":               {keeping(), events("data: 1\n\n", "data: [DONE]\n\n")},
		"D breaks its stream":     {keeping(), events("data: 1\n\n", "DIE")},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := newEngine(t, wire.PrefillLeg, c.prefill), newEngine(t, wire.DecodeLeg, c.decode)
			r := pullPair(t, p, d)
			if _, _, err := r.post(t, "/v1/completions", `{"prompt":"x","stream":true}`); err != nil {
				t.Fatal(err)
			}
			r.settled(t)
			r.words.Wait()
			if n := len(p.told); n != 0 {
				t.Errorf("P was told %d times: %s", n, <-p.told)
			}
		})
	}
}

// TestReleasedWhenModesDiffer: the answer of P itself shows that it is of no use.
func TestReleasedWhenModesDiffer(t *testing.T) {
	p, d := keepingEngine(t, kv.Pull), newEngine(t, wire.DecodeLeg, hang)
	r := newRig(t, Config{
		Prefill: []Target{{URL: p.URL, Peer: &core.Peer{EngineID: "p", Host: "h", Port: 1, TPSize: 1, Mode: kv.Push}}},
		Decode:  []Target{{URL: d.URL, Peer: &core.Peer{}}},
	})
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil {
		t.Fatal(err)
	}
	checkError(t, resp, got, 502, "prefill", p.addr(), "its answer says transfer_mode pull, but the pair works in push")
	r.allReleased(t, p)
}

// TestReleasedWhenClientLeaves: P is told as soon as it has answered; a D that has no leg yet gets none.
func TestReleasedWhenClientLeaves(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		for _, when := range []string{"as P's answer is under way", "as P has answered", "as D works"} {
			t.Run(when+", "+string(mode), func(t *testing.T) {
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				var r *rig
				p, d := keepingEngine(t, mode), newEngine(t, wire.DecodeLeg, hang)
				p.mode, d.mode = mode, mode
				whole := p.answer
				p.answer = func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
					switch when {
					case "as P's answer is under way":
						r.leaveMidAnswer(t, w, leave)
						whole(e, w, req, s)
					case "as P has answered":
						whole(e, w, req, s)
						_ = http.NewResponseController(w).Flush()
						leave()
					default:
						whole(e, w, req, s)
					}
				}
				r = pair(t, p, d)
				done := make(chan struct{})
				go func() {
					defer close(done)
					if resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x"}`); err == nil {
						resp.Body.Close()
					}
				}()
				if when == "as D works" {
					leg := await(t, "D's leg", d.arrived)
					<-await(t, "P's leg", p.arrived).gone
					leave()
					await(t, "the end of D's leg", leg.gone)
				}
				r.allReleased(t, p)
				<-done
				if n := len(d.legs()); mode == kv.Pull && when == "as P's answer is under way" && n != 0 {
					t.Errorf("D got %d legs of what P was told to let go", n)
				}
			})
		}
	}
}

// leaveMidAnswer sends the beginning of P's answer, has the client leave when the router has read it, and
// returns when the router knows that it has left.
func (r *rig) leaveMidAnswer(t *testing.T, w http.ResponseWriter, leave func()) {
	heard := make(chan struct{})
	r.hear(halfAnswer, heard)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Half", "1")
	_, _ = io.WriteString(w, " ")
	_ = http.NewResponseController(w).Flush()
	await(t, "the router reads P's header", heard)
	leave()
	for end := time.Now().Add(patience); !r.toldOff(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Error("the router does not notice that the client has left")
			return
		}
	}
}

const halfAnswer = "X-Half: 1"

// toldOff tells whether P's leg was cancelled because the client left.
func (r *rig) toldOff() bool {
	families, err := r.metrics.registry.Gather()
	if err != nil {
		return false
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == "kvferry_router_leg_cancels_total" && l.GetValue() == "the client left" {
					return true
				}
			}
		}
	}
	return false
}

// hear closes a channel when the router has read words on any of its connections to engines.
func (r *rig) hear(words string, heard chan struct{}) { r.ears.Store(&ear{words, heard}) }

type ear struct {
	words string
	heard chan struct{}
}

// listen lets hear work; for newRig.
func (r *rig) listen() {
	dial := r.transport.DialContext
	r.transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &heardConn{c, &r.ears}, nil
	}
}

type heardConn struct {
	net.Conn
	ears *atomic.Pointer[ear]
}

func (c *heardConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if e := c.ears.Load(); e != nil && bytes.Contains(b[:n], []byte(e.words)) && c.ears.CompareAndSwap(e, nil) {
		close(e.heard)
	}
	return n, err
}

// TestReleasedParts: one answer of several fails; whatever P keeps for any of them is released.
func TestReleasedParts(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			var working atomic.Int32
			all := make(chan struct{})
			p := keepingEngine(t, mode)
			d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				if working.Add(1) == 6 {
					close(all)
				}
				<-all
				if promptOf(t, s) == "bad" {
					for range 6 { // each P has answered
						<-await(t, "P's leg", p.arrived).gone
					}
					status(429, openAIError)(e, w, req, s)
					return
				}
				hang(e, w, req, s)
			})
			d.mode = mode
			r := pair(t, p, d)
			resp, got, err := r.post(t, "/v1/completions", `{"prompt":["a","b","c","d","e","bad"]}`)
			if err != nil || resp.StatusCode != 429 {
				t.Fatalf("%v %+v %s", err, resp, got)
			}
			r.allReleased(t, p)
			if n := len(p.legs()); n != 6 {
				t.Errorf("P got %d legs", n)
			}
		})
	}
}

// TestReleaseFails: it is tried once, said in the log, and costs the client nothing.
func TestReleaseFails(t *testing.T) {
	for name, c := range map[string]struct {
		letGo  func(http.ResponseWriter, *http.Request)
		result string
		log    string
	}{
		"over":    {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"released":false}`) }, "over", ""},
		"refused": {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusForbidden) }, "failed", "answered 403: no"},
		"garbage": {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }, "failed", "cannot be read"},
		"no end":  {func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, maxReleaseAnswer+1)) }, "failed", "is larger than"},
		"it dies": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "failed", "EOF"},
		"redirect": {func(w http.ResponseWriter, req *http.Request) {
			http.Redirect(w, req, "/elsewhere", http.StatusTemporaryRedirect)
		}, "failed", "answered 307"},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := keepingEngine(t, kv.Pull), newEngine(t, wire.DecodeLeg, status(429, openAIError))
			p.letGo = c.letGo
			r := pullPair(t, p, d)
			r.transport.DisableKeepAlives = true // of a kept connection that dies net/http tries another
			resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`, "Authorization", "Bearer k")
			if err != nil || resp.StatusCode != 429 {
				t.Fatalf("%v %+v %s", err, resp, got)
			}
			r.allReleased(t, p)
			if _, metrics := r.fetch(t, "/metrics"); !strings.Contains(metrics, `kvferry_router_releases_total{result="`+c.result+`"} 1`) {
				t.Error("it is not counted")
			}
			const line = "a prefill engine was not told to let go; KV that it keeps stays until its lease ends"
			if log := r.logs.String(); strings.Contains(log, line) != (c.log != "") || !strings.Contains(log, c.log) {
				t.Errorf("log: %s", log)
			}
		})
	}
}

// TestCloseFinishesReleases: a router that is told to end right after D's refusal has told P all the same.
func TestCloseFinishesReleases(t *testing.T) {
	p, d := keepingEngine(t, kv.Pull), newEngine(t, wire.DecodeLeg, status(429, openAIError))
	closing := make(chan struct{})
	p.letGo = func(w http.ResponseWriter, req *http.Request) {
		<-closing
		select {
		case <-req.Context().Done():
			t.Error("the router has hung up")
		case <-time.After(20 * time.Millisecond): // in which a router that does not wait would have
		}
		_, _ = io.WriteString(w, `{"released":true}`)
	}
	r := pullPair(t, p, d)
	if resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 429 {
		t.Fatalf("%v %s", err, got)
	}
	await(t, "a release", p.told)
	close(closing)
	r.Close()
	if _, metrics := r.fetch(t, "/metrics"); !strings.Contains(metrics, `kvferry_router_releases_total{result="released"} 1`) {
		t.Error("P was not told")
	}
}

// TestReleasesAreBounded: engines that do not answer hold up neither clients nor the router's end, and no
// more than maxReleases are waited for.
func TestReleasesAreBounded(t *testing.T) {
	p, d := keepingEngine(t, kv.Pull), newEngine(t, wire.DecodeLeg, status(429, openAIError))
	p.letGo = func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() }
	r := pullPair(t, p, d)
	if resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 429 {
		t.Fatalf("%v %s", err, got)
	}
	await(t, "a release", p.told)
	o, err := openai.ParseObject([]byte(`{"kv_transfer_params":` + keepingParams(kv.Pull, "r") + `}`))
	if err != nil {
		t.Fatal(err)
	}
	handoff, err := core.ReadHandoff(o)
	if err != nil {
		t.Fatal(err)
	}
	for range maxReleases + 2 {
		r.release(&attempt{targets: [2]*target{r.pools[core.Prefill].targets[0]}, handoff: handoff, request: "r"})
	}
	if _, metrics := r.fetch(t, "/metrics"); !strings.Contains(metrics, `kvferry_router_releases_total{result="dropped"} 3`) {
		t.Error("those beyond the bound are not dropped")
	}
	r.Close() // waits for closeGrace, and not for all of releaseTimeout
	if n := r.releases.Load(); n != 0 {
		t.Errorf("%d releases are left", n)
	}
}

// TestReleasedByKey: a P that was cut off is told by the key that it alone was sent, which is another one for
// each leg and not the client's; one that does not know that is told once, until it shows that it does.
func TestReleasedByKey(t *testing.T) {
	const clients = "ffffffffffffffffffffffffffffffff"
	for name, code := range map[string]int{"knows": 200, "has no such endpoint": 404, "wants a token": 400, "is out of order": 503} {
		t.Run(name, func(t *testing.T) {
			p := newEngine(t, wire.PrefillLeg, hang)
			p.letGo = answering(code)
			d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				await(t, "P's leg", p.arrived)
				status(429, openAIError)(e, w, req, s)
			})
			r := pair(t, p, d)
			refused := func() {
				t.Helper()
				resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`, wire.ReleaseKeyHeader, clients)
				if err != nil || resp.StatusCode != 429 {
					t.Fatalf("%v %+v %s", err, resp, got)
				}
				r.settled(t)
				r.words.Wait()
			}
			refused()
			refused()
			legs := p.legs()
			want := []string{keyReleaseOf(legs[0])}
			if code == 200 || code == 503 {
				want = append(want, keyReleaseOf(legs[1]))
			}
			for _, w := range want {
				if got := await(t, "a release", p.told); got != w {
					t.Errorf("P was told %s, want %s", got, w)
				}
			}
			if len(p.told) != 0 {
				t.Errorf("P was told once more: %s", <-p.told)
			}
			keys := []string{legs[0].header.Get(wire.ReleaseKeyHeader), legs[1].header.Get(wire.ReleaseKeyHeader), clients}
			if keys[0] == keys[1] || slices.Index(keys, clients) != 2 || !wire.IsReleaseKey(keys[0]) || !wire.IsReleaseKey(keys[1]) {
				t.Errorf("the keys are %q", keys)
			}
			for _, s := range d.legs() {
				if v := s.header.Values(wire.ReleaseKeyHeader); len(v) != 0 {
					t.Errorf("D was sent a key: %q", v)
				}
			}
		})
	}
}

// TestKeylessIsForgotten: another engine may have taken the place of one that knew no keys; its answer shows it.
func TestKeylessIsForgotten(t *testing.T) {
	p, d := keepingEngine(t, kv.Pull), newEngine(t, wire.DecodeLeg, goodDecode)
	r := pullPair(t, p, d)
	keyless := &r.pools[core.Prefill].targets[0].keyless
	keyless.Store(true)
	if resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %+v %s", err, resp, got)
	}
	if keyless.Load() {
		t.Error("it is still taken for one that knows no keys")
	}
}

// TestReleaseKeyIsNotForwarded: a configuration cannot have clients' keys sent to engines.
func TestReleaseKeyIsNotForwarded(t *testing.T) {
	cfg := Config{Prefill: []Target{{URL: "a:1"}}, Decode: []Target{{URL: "b:1"}}, ForwardHeaders: []string{"x-other"}}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	cfg.ForwardHeaders = append(cfg.ForwardHeaders, strings.ToLower(wire.ReleaseKeyHeader))
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "one for each prefill leg") {
		t.Error(err)
	}
}

// answering gives a release a status.
func answering(code int) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, `{"released":true}`)
	}
}
