package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// checkError reads an error of the router's and checks its shape.
func checkError(t *testing.T, resp *http.Response, body string, status int, leg, engine, message string) {
	t.Helper()
	var e struct {
		Error struct {
			Message, Type, Leg, Engine string
		}
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Fatalf("%v in %q", err, body)
	}
	if resp.StatusCode != status || e.Error.Leg != leg || e.Error.Engine != engine || !strings.Contains(e.Error.Message, message) ||
		resp.Header.Get("Content-Type") != "application/json" || resp.Header.Get("X-Kvferry-Leg") != leg {
		t.Errorf("%d %s\nwant %d about the %s leg to %s: %s", resp.StatusCode, body, status, leg, engine, message)
	}
}

const openAIError = `{"error":{"message":"prompt is too long","type":"invalid_request_error","param":"prompt","code":"context_length_exceeded"}}`

func TestPrefillFails(t *testing.T) {
	for name, c := range map[string]struct {
		answer  func(*engine, http.ResponseWriter, *http.Request, *seen)
		status  int
		message string
	}{
		"an error of its own":     {status(400, openAIError), 400, "prompt is too long"},
		"overloaded":              {status(429, openAIError), 429, "prompt is too long"},
		"an error as text":        {status(500, "Internal Server Error"), 500, "It said: Internal Server Error"},
		"an odd status":           {status(302, ""), 502, "answered with status 302"},
		"an older error shape":    {status(503, `{"object":"error","message":"no memory"}`), 503, "no memory"},
		"no hand-off":             {text(`{"id":"x","kv_transfer_params":null}`), 502, "kept no KV"},
		"garbage":                 {text("<html>"), 502, "cannot be used"},
		"an empty answer":         {text(""), 502, "cannot be used"},
		"a cut answer":            {cutAnswer, 502, "broke off its answer"},
		"dies before it answers":  {die, 502, "before it answered"},
		"dies behind its headers": {events("x", "DIE"), 502, "broke off its answer"},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, stream %v", name, stream), func(t *testing.T) {
				// P fails once D has its leg, so that there is something to cancel.
				dHas, hasOnce := make(chan struct{}), sync.Once{} // a kept connection that dies makes a second attempt
				p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
					<-dHas
					c.answer(e, w, req, s)
				})
				d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
					hasOnce.Do(func() { close(dHas) })
					hang(e, w, req, s)
				})
				r := pair(t, p, d)
				resp, got, err := r.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"x","stream":%v}`, stream))
				if err != nil {
					t.Fatal(err)
				}
				checkError(t, resp, got, c.status, "prefill", p.addr(), c.message)
				await(t, "the end of D's leg", await(t, "D's leg", d.arrived).gone)
				if strings.HasPrefix(name, "an error") && resp.Header.Get("Retry-After") != "7" {
					t.Errorf("P's Retry-After is lost: %v", resp.Header)
				}
			})
		}
	}
}

func TestDecodeFails(t *testing.T) {
	event := "data: {\"text\":\"a\"}\n\n"
	errorEvent := "data: {\"error\":{\"message\":\"engine died\",\"code\":503}}\n\n"
	for name, c := range map[string]struct {
		answer  func(*engine, http.ResponseWriter, *http.Request, *seen)
		status  int
		message string
	}{
		"an error of its own":             {status(404, openAIError), 404, "prompt is too long"},
		"garbage":                         {text("<html>"), 502, "cannot be used"},
		"an empty answer":                 {text(""), 502, "cannot be used"},
		"a cut answer":                    {cutAnswer, 502, "broke off its answer"},
		"dies before it answers":          {die, 502, "before it answered"},
		"a stream without anything":       {events(), 502, "ended its stream before it was whole"},
		"a stream cut in its first event": {events(event[:5], "DIE"), 502, "broke off its stream"},
		"an error as the first event":     {events(errorEvent), 503, "engine died"},
	} {
		t.Run(name, func(t *testing.T) {
			pHas, hasOnce := make(chan struct{}), sync.Once{} // a kept connection that dies makes a second attempt
			p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				hasOnce.Do(func() { close(pHas) })
				hang(e, w, req, s)
			})
			d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				<-pHas
				c.answer(e, w, req, s)
			})
			r := pair(t, p, d)
			resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x","stream":true}`)
			if err != nil {
				t.Fatal(err)
			}
			checkError(t, resp, got, c.status, "decode", d.addr(), c.message)
			await(t, "the end of P's leg", await(t, "P's leg", p.arrived).gone)
		})
	}
}

// TestStreamBreaks: after the first byte an error can only be an event, and [DONE] must not follow.
func TestStreamBreaks(t *testing.T) {
	event := "data: {\"text\":\"a\"}\n\n"
	errorEvent := "data: {\"error\":{\"message\":\"engine died\"}}\n\n"
	for name, c := range map[string]struct {
		decode func(*engine, http.ResponseWriter, *http.Request, *seen)
		want   string // of the error event
	}{
		"D ends without [DONE]":          {events(event), `"leg":"decode"`},
		"D dies":                         {events(event, "DIE"), `"leg":"decode"`},
		"D dies inside an event":         {events(event, "data: {\"te", "DIE"), `"leg":"decode"`},
		"D tells an error, and [DONE]":   {events(event, errorEvent, "data: [DONE]\n\n"), `engine died`},
		"D tells an error with an event": {events(event + errorEvent + "data: [DONE]\n\n"), `engine died`},
	} {
		t.Run(name, func(t *testing.T) {
			p := newEngine(t, wire.PrefillLeg, goodPrefill)
			d := newEngine(t, wire.DecodeLeg, c.decode)
			r := pair(t, p, d)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x","stream":true}`)
			if err != nil || resp.StatusCode != 200 {
				t.Fatal(err, resp)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			got := string(body)
			rest, ok := strings.CutPrefix(got, event)
			if err != nil || !ok || !strings.HasPrefix(rest, `data: {"error":{`) || !strings.HasSuffix(rest, "}\n\n") ||
				!strings.Contains(rest, c.want) || strings.Contains(rest, "[DONE]") || strings.Count(rest, "data:") != 1 {
				t.Errorf("%v, %q", err, got)
			}
			await(t, "the end of D's leg", await(t, "D's leg", d.arrived).gone)
		})
	}
}

// TestPrefillFailsWhileDecodeStreams: D has all of the KV by then, so the client gets its answer.
func TestPrefillFailsWhileDecodeStreams(t *testing.T) {
	event := "data: {\"text\":\"a\"}\n\n"
	forwarded, failed := make(chan struct{}), make(chan struct{})
	p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		<-forwarded
		status(500, openAIError)(e, w, req, s)
		close(failed)
	})
	d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, event)
		w.(http.Flusher).Flush()
		<-failed
		_, _ = io.WriteString(w, event+"data: [DONE]\n\n")
	})
	r := pair(t, p, d)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x","stream":true}`)
	if err != nil || resp.StatusCode != 200 {
		t.Fatal(err, resp)
	}
	defer resp.Body.Close()
	close(forwarded)
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != event+event+"data: [DONE]\n\n" {
		t.Errorf("%v, %q", err, body)
	}
}

// TestRecompute: with the policy, D is asked for all of a request whose KV could not be had, and the answer
// says so.
func TestRecompute(t *testing.T) {
	noKV := status(502, `{"error":{"message":"the KV did not come","code":"kv_transfer_wait"}}`)
	for name, fails := range map[string]wire.Leg{"the prefill engine fails": wire.PrefillLeg, "its KV does not come": wire.DecodeLeg} {
		for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
			for _, stream := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, stream %v", name, mode, stream), func(t *testing.T) {
					recompute(t, mode, fails, noKV, stream)
				})
			}
		}
	}
}

type answerFunc = func(*engine, http.ResponseWriter, *http.Request, *seen)

// recompute lets one of the legs fail: D computes the prompt, and the answer says so.
func recompute(t *testing.T, mode kv.TransferMode, fails wire.Leg, noKV answerFunc, stream bool) {
	prefill := answerFunc(goodPrefill)
	if mode == kv.Pull {
		prefill = pullPrefill
	}
	if fails == wire.PrefillLeg {
		prefill = status(500, openAIError)
	}
	p := newEngine(t, wire.PrefillLeg, prefill)
	answer := text(`{"id":"x","choices":[{"text":"alone"}]}`)
	if stream {
		answer = events("data: {\"text\":\"alone\"}\n\n", "data: [DONE]\n\n")
	}
	d := newEngine(t, wire.NoLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		switch {
		case !strings.Contains(string(s.body), "kv_transfer_params"):
			answer(e, w, req, s)
		case fails == wire.DecodeLeg:
			noKV(e, w, req, s)
		default:
			hang(e, w, req, s)
		}
	})
	p.mode, d.mode = mode, mode
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, Recompute: true})
	resp, got, err := r.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"x","stream":%v}`, stream))
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 200 || !strings.Contains(string(got), "alone") {
		t.Errorf("status %d %s", resp.StatusCode, got)
	}
	if route := resp.Header.Get("X-Kvferry-Route"); !strings.HasPrefix(route, "decode-only") || !strings.Contains(route, "could not be had") {
		t.Errorf("the answer does not say how it came about: %q", route)
	}
}

// closedPort is an address where nobody listens, and nobody can while the test runs: the port is
// bound.
func closedPort(t *testing.T) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	addr, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", addr.(*unix.SockaddrInet4).Port)
}

func TestEngineNotThere(t *testing.T) {
	nobody := closedPort(t)
	p, d := newEngine(t, wire.PrefillLeg, hang), newEngine(t, wire.DecodeLeg, hang)
	for _, leg := range []string{"prefill", "decode"} {
		cfg := Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}}
		if leg == "prefill" {
			cfg.Prefill[0].URL = nobody
		} else {
			cfg.Decode[0].URL = nobody
		}
		resp, got, err := newRig(t, cfg).post(t, "/v1/completions", `{"prompt":"x"}`)
		if err != nil {
			t.Fatal(err)
		}
		checkError(t, resp, got, 503, leg, nobody, "No connection to the "+leg+" engine at "+nobody)
		if resp.Header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
	}
}

// TestAnotherEngine: with a choice, an engine that is not there costs a second attempt with new ids.
func TestAnotherEngine(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	r := newRig(t, Config{
		Prefill: []Target{{URL: closedPort(t)}, {URL: p.URL}},
		Decode:  []Target{{URL: d.URL}},
	})
	for range 4 {
		resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
		if err != nil || resp.StatusCode != 200 {
			t.Fatal(err, got)
		}
	}
	ids := map[string]bool{}
	for _, s := range p.legs() {
		if ids[s.id] {
			t.Errorf("the id %s was used twice", s.id)
		}
		ids[s.id] = true
	}
}

// TestTimeouts: an engine that is silent is given up, by name.
func TestTimeouts(t *testing.T) {
	for _, c := range []struct {
		name            string
		prefill, decode func(*engine, http.ResponseWriter, *http.Request, *seen)
		leg             string
		bound           time.Duration // which a P that answers keeps, on a busy machine too
	}{
		{"P", hang, hang, "prefill", 200 * time.Millisecond},
		{"D", goodPrefill, hang, "decode", 2 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := newEngine(t, wire.PrefillLeg, c.prefill), newEngine(t, wire.DecodeLeg, c.decode)
			r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, FirstByteTimeout: c.bound})
			resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
			if err != nil {
				t.Fatal(err)
			}
			silent := p
			if c.leg == "decode" {
				silent = d
			}
			checkError(t, resp, got, 504, c.leg, silent.addr(), "has not begun to answer for "+c.bound.String())
			for _, e := range []*engine{p, d} {
				for _, s := range e.legs() {
					if c.leg == "prefill" || e == d {
						await(t, "the end of the leg", s.gone)
					}
				}
			}
		})
	}
	t.Run("a stream", func(t *testing.T) {
		p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, events("data: 1\n\n", "HANG"))
		r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, IdleTimeout: 200 * time.Millisecond})
		_, got, err := r.post(t, "/v1/completions", `{"prompt":"x","stream":true}`)
		if err != nil || !strings.HasPrefix(got, "data: 1\n\ndata: {\"error\":{") || !strings.Contains(got, "has sent nothing of its stream for 200ms") {
			t.Errorf("%v, %q", err, got)
		}
	})
}

// TestClientLeaves: whatever the phase, both legs end at once.
func TestClientLeaves(t *testing.T) {
	for _, c := range []struct {
		name            string
		prefill, decode func(*engine, http.ResponseWriter, *http.Request, *seen)
		readFirst       bool
	}{
		{"while both engines work", hang, hang, false},
		{"when P is done", goodPrefill, hang, false},
		{"in the stream", goodPrefill, events("data: 1\n\n", "HANG"), true},
		{"in the stream, P still works", hang, events("data: 1\n\n", "HANG"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			pHas, hasOnce := make(chan struct{}), sync.Once{} // a kept connection that dies makes a second attempt
			p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				hasOnce.Do(func() { close(pHas) })
				c.prefill(e, w, req, s)
			})
			d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				<-pHas
				c.decode(e, w, req, s)
			})
			r := pair(t, p, d)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			go func() {
				resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x","stream":true}`)
				if err != nil {
					return
				}
				defer resp.Body.Close()
				b := make([]byte, 4)
				if _, err := io.ReadFull(resp.Body, b); err == nil && c.readFirst {
					leave()
				}
			}()
			pl, dl := await(t, "P's leg", p.arrived), await(t, "D's leg", d.arrived)
			if !c.readFirst {
				leave()
			}
			await(t, "the end of D's leg", dl.gone)
			await(t, "the end of P's leg", pl.gone)
			r.settled(t)
			if log := r.logs.String(); !strings.Contains(log, `"status":499`) || !strings.Contains(log, "the client left") {
				t.Errorf("log: %s", log)
			}
		})
	}
}

// TestReusedConnectionDies: a kept connection that dies before it answers costs a new attempt, with
// new ids on both legs.
func TestReusedConnectionDies(t *testing.T) {
	var requests atomic.Int32
	p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		if requests.Add(1) == 2 {
			die(e, w, req, s)
		}
		goodPrefill(e, w, req, s)
	})
	d := newEngine(t, wire.DecodeLeg, goodDecodeAfterPrefill(p))
	r := pair(t, p, d)
	for range 2 {
		resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
		if err != nil || resp.StatusCode != 200 {
			t.Fatal(err, got)
		}
	}
	legs := p.legs()
	if len(legs) != 3 || legs[1].id == legs[2].id || legs[1].params.TransferID == legs[2].params.TransferID {
		t.Fatalf("P got %d legs", len(legs))
	}
	for _, s := range d.legs() { // a cancelled leg may arrive late or never
		if s.id == legs[2].id && s.params.TransferID == legs[2].params.TransferID {
			return
		}
	}
	t.Error("D got no leg of the second attempt")
}

// goodDecodeAfterPrefill answers once P has given a good answer under the same id, as a D that needs
// the KV does.
func goodDecodeAfterPrefill(p *engine) func(*engine, http.ResponseWriter, *http.Request, *seen) {
	good := make(map[string]chan struct{})
	lock := make(chan struct{}, 1)
	of := func(id string) chan struct{} {
		lock <- struct{}{}
		defer func() { <-lock }()
		if good[id] == nil {
			good[id] = make(chan struct{})
		}
		return good[id]
	}
	answer := p.answer
	p.answer = func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		answer(e, w, req, s)
		close(of(s.id))
	}
	return func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		select {
		case <-of(s.id):
			goodDecode(e, w, req, s)
		case <-req.Context().Done():
		}
	}
}

// TestCoordinatesAreAskedAnew: an engine that came back under another id is found.
func TestCoordinatesAreAskedAnew(t *testing.T) {
	p := newEngine(t, wire.PrefillLeg, hang)
	d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		if s.params.RemoteEngineID != "engine-2" {
			status(502, `{"error":{"message":"no such engine","code":"kv_transfer_handshake"}}`)(e, w, req, s)
			return
		}
		goodDecode(e, w, req, s)
	})
	r := pair(t, p, d)
	if _, _, err := r.coordinates(t.Context(), r.pools[core.Prefill].targets[0]); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	p.mu.engineID = "engine-2"
	p.mu.Unlock()
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil || resp.StatusCode != 200 {
		t.Fatal(err, got)
	}
	if p.asked() != 2 || len(d.legs()) != 2 || d.legs()[0].id == d.legs()[1].id {
		t.Errorf("asked %d times, %d legs", p.asked(), len(d.legs()))
	}
}

// TestCoordinatesOfAnEarlierEngine: a prefill engine that has come back at another side channel, or as another,
// says so in its answer. D need not fail: one that recomputes answers well, and every KV would be lost for ever.
func TestCoordinatesOfAnEarlierEngine(t *testing.T) {
	for name, is := range map[string]string{"another port": `"remote_engine_id":"engine-1","remote_port":5601`, "another id": `"remote_engine_id":"other","remote_port":5600`} {
		t.Run(name, func(t *testing.T) {
			p := newEngine(t, wire.PrefillLeg, text(`{"id":"x","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"h","remote_request_id":"r","tp_size":1,`+is+`}}`))
			var prefill *target
			d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				for _, _, old := prefill.known(); old && req.Context().Err() == nil; _, _, old = prefill.known() {
					time.Sleep(time.Millisecond) // until the router has P's answer
				}
				goodDecode(e, w, req, s)
			})
			r := pair(t, p, d)
			prefill = r.pools[core.Prefill].targets[0]
			for range 2 {
				resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
				if err != nil || resp.StatusCode != 200 {
					t.Fatal(err, got)
				}
			}
			if p.asked() != 2 {
				t.Errorf("asked %d times", p.asked())
			}
		})
	}
}

func TestCoordinatesFail(t *testing.T) {
	for coordinates, message := range map[string]string{
		"x": "what is no coordinates", `{"engine_id":"e","host":"h","port":0,"tp_size":1}`: "port is 0",
		`{"engine_id":"e","host":"h","port":1,"tp_size":1,"role":"decode"}`: "stands in the prefill pool",
	} {
		p, d := newEngine(t, wire.PrefillLeg, hang), newEngine(t, wire.DecodeLeg, hang)
		p.mu.coordinates = coordinates
		resp, got, err := pair(t, p, d).post(t, "/v1/completions", `{"prompt":"x"}`)
		if err != nil {
			t.Fatal(err)
		}
		checkError(t, resp, got, 502, "prefill", p.addr(), message)
		if len(d.legs()) != 0 {
			t.Error("D got a leg without coordinates")
		}
	}
}

// TestFixedCoordinates: a stock engine is not asked.
func TestFixedCoordinates(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	r := newRig(t, Config{
		Prefill: []Target{{URL: p.URL, Peer: &core.Peer{EngineID: "stock", Host: "10.1.2.3", Port: 5601, TPSize: 4}}},
		Decode:  []Target{{URL: d.URL}},
	})
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil || resp.StatusCode != 200 {
		t.Fatal(err, got)
	}
	q := d.legs()[0].params
	if p.asked() != 0 || q.RemoteEngineID != "stock" || q.RemoteHost != "10.1.2.3" || q.RemotePort != 5601 || q.TPSize != 4 || q.PPSize != 1 {
		t.Errorf("asked %d times, %+v", p.asked(), q)
	}
}
