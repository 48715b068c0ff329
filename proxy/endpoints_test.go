package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

func (r *rig) fetch(t *testing.T, path string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := httpClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestEndpoints(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	r := pair(t, p, d)
	if resp, _, err := r.post(t, "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 200 {
		t.Fatal(err)
	}
	r.settled(t)
	for path, want := range map[string]string{
		"/health":    `{"status":"ok"}`,
		"/ready":     `"ready":true`,
		"/v1/models": `{"object":"list"}`,
		"/status":    `"engine_id":"engine-1","side_channel":"127.0.0.1:5600"`,
		"/metrics":   `kvferry_router_requests_total{outcome="ok",path="/v1/completions",route="push",status="200"} 1`,
		"/metrics?":  `kvferry_router_upstream_state{engine="` + d.addr() + `",leg="decode"} 1`,
	} {
		if status, got := r.fetch(t, path); status != 200 || !strings.Contains(got, want) {
			t.Errorf("%s: %d %s", path, status, got)
		}
	}
	if status, got := r.fetch(t, "/v1/embeddings"); status != 404 || !strings.Contains(got, `"error"`) {
		t.Errorf("an unknown path: %d %s", status, got)
	}
}

// TestPhases: where the time of a good stream went, and of a bad one nothing; the engine that failed shows.
func TestPhases(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		p := newEngine(t, wire.PrefillLeg, text(`{"id":"x","kv_transfer_params":`+strings.Replace(pullParams, `"pull"`, `"`+string(mode)+`"`, 1)+`}`))
		answered := make(chan struct{}, 9)
		answer := p.answer
		p.answer = func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
			answer(e, w, req, s)
			answered <- struct{}{}
		}
		d := newEngine(t, wire.DecodeLeg, nil)
		good := true
		d.answer = func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
			<-answered
			if !good {
				status(500, openAIError)(e, w, req, s)
				return
			}
			events("data: 1\n\n", "data: [DONE]\n\n")(e, w, req, s)
		}
		p.mode, d.mode = mode, mode
		r := pair(t, p, d)
		for range 2 {
			if _, _, err := r.post(t, "/v1/completions", `{"prompt":"x","stream":true}`); err != nil {
				t.Fatal(err)
			}
			r.settled(t)
			good = false
		}
		_, got := r.fetch(t, "/metrics")
		for _, want := range []string{
			`kvferry_router_phase_seconds_count{phase="decode_first_chunk"} 1`,
			`kvferry_router_phase_seconds_count{phase="first_chunk"} 1`, `kvferry_router_phase_seconds_count{phase="total"} 1`,
			`kvferry_router_leg_failures_total{class="status",leg="decode"} 1`,
			`kvferry_router_upstream_state{engine="` + d.addr() + `",leg="decode"} 0`, `kvferry_router_upstream_state{engine="` + p.addr() + `",leg="prefill"} 1`,
		} {
			if !strings.Contains(got, want+"\n") {
				t.Errorf("%s: no %s", mode, want)
			}
		}
		for _, phase := range []string{"prefill", "handoff"} { // in push D may come first
			if mode == kv.Pull && !strings.Contains(got, `kvferry_router_phase_seconds_count{phase="`+phase+`"} 1`) {
				t.Errorf("%s was not timed", phase)
			}
		}
	}
}

// TestReadyNeedsBothRoles: one engine of each must have answered.
func TestReadyNeedsBothRoles(t *testing.T) {
	e := newEngine(t, "both", hang)
	nobody := closedPort(t)
	for _, c := range []struct{ p, d []Target }{
		{[]Target{{URL: e.URL}}, []Target{{URL: nobody}}},
		{[]Target{{URL: nobody}}, []Target{{URL: e.URL}}},
	} {
		r := newRig(t, Config{Prefill: c.p, Decode: c.d})
		status, got := r.fetch(t, "/ready")
		var state Readiness
		if err := json.Unmarshal([]byte(got), &state); err != nil || status != 503 || state.Ready {
			t.Errorf("%d %s %v", status, got, err)
		}
	}
	r := newRig(t, Config{Prefill: []Target{{URL: nobody}, {URL: e.URL}}, Decode: []Target{{URL: e.URL}}})
	if status, got := r.fetch(t, "/ready"); status != 200 || !strings.Contains(got, "refused") {
		t.Errorf("one of two prefill engines: %d %s", status, got)
	}
	r = newRig(t, Config{Prefill: []Target{{URL: e.URL}}, Decode: []Target{{URL: nobody}}})
	if status, got := r.fetch(t, "/v1/models"); status != 503 || !strings.Contains(got, nobody) {
		t.Errorf("models without a decode engine: %d %s", status, got)
	}
}

func TestRefusals(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, MaxBody: 100, MaxBodyBytes: 150})
	for _, c := range []struct {
		body, id string
		status   int
		message  string
	}{
		{"", "", 400, "the body is empty"},
		{`{"prompt":`, "", 400, "unexpected end of JSON at byte 10"},
		{`[1]`, "", 400, "must be a JSON object"},
		{`{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true}}`, "", 400, "the router's to give"},
		{`{"prompt":"x"}`, "a,b", 400, "X-Request-Id"},
		{`{"prompt":"` + strings.Repeat("x", 100) + `"}`, "", 413, "larger than 100 bytes"},
	} {
		resp, got, err := r.post(t, "/v1/completions", c.body, "X-Request-Id", c.id)
		if err != nil {
			t.Fatal(err)
		}
		var e struct{ Error struct{ Message string } }
		if err := json.Unmarshal([]byte(got), &e); err != nil || resp.StatusCode != c.status || !strings.Contains(e.Error.Message, c.message) {
			t.Errorf("%.50q: %d %s", c.body, resp.StatusCode, got)
		}
	}
	// A body whose length is not told.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/v1/completions", io.MultiReader(strings.NewReader(strings.Repeat(" ", 101))))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := httpClient.Do(req)
	if err != nil || resp.StatusCode != 413 {
		t.Fatal(err, resp)
	}
	resp.Body.Close()
	if n := len(p.legs()) + len(d.legs()); n != 0 {
		t.Errorf("%d legs were sent", n)
	}
	if resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 200 {
		t.Errorf("after all that: %v %s", err, got)
	}
}

func TestOverload(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, hang), newEngine(t, wire.DecodeLeg, hang)
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, MaxInFlight: 1, MaxBody: 100, MaxBodyBytes: 100})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	first := make(chan struct{})
	go func() {
		defer close(first)
		if resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x"}`); err == nil {
			resp.Body.Close()
		}
	}()
	leg := await(t, "P's leg", p.arrived)
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil || resp.StatusCode != 429 || resp.Header.Get("Retry-After") == "" || !strings.Contains(got, "already serves 1 requests") {
		t.Errorf("%v %s", err, got)
	}
	leave()
	<-first
	await(t, "the end of P's leg", leg.gone)
	r.settled(t)

	r.cfg.MaxInFlight = 10
	r.bodyBytes.Add(95)
	resp, got, err = r.post(t, "/v1/completions", `{"prompt":"x"}`)
	r.bodyBytes.Add(-95)
	if err != nil || resp.StatusCode != 429 || !strings.Contains(got, "bodies of 100 bytes") {
		t.Errorf("%v %s", err, got)
	}
}

type panicPolicy struct{}

func (panicPolicy) Pick([]core.Candidate) int { panic("a bad policy") }

func TestPanicCostsOneRequest(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, PrefillPolicy: panicPolicy{}})
	for range 2 {
		resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
		if err != nil || resp.StatusCode != 500 || !strings.Contains(got, `"error"`) {
			t.Fatal(err, got)
		}
	}
	if status, _ := r.fetch(t, "/health"); status != 200 {
		t.Error("the router does not live any more")
	}
}

func TestConfigValidate(t *testing.T) {
	ok := Config{Prefill: []Target{{URL: "h:1"}}, Decode: []Target{{URL: "http://[::1]:2"}, {URL: "https://h:3/"}}}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Config){
		"0 prefill engines":        func(c *Config) { c.Prefill = nil },
		"scheme":                   func(c *Config) { c.Decode[0].URL = "ftp://h" },
		"use http://HOST:PORT":     func(c *Config) { c.Decode[0].URL = "http://h:1/v1" },
		"named twice":              func(c *Config) { c.Decode[1].URL = "[::1]:2" },
		"coordinates of h:1: port": func(c *Config) { c.Prefill[0].Peer = &core.Peer{EngineID: "e", TPSize: 1} },
		"idle timeout":             func(c *Config) { c.IdleTimeout = -1 },
		"one body must fit":        func(c *Config) { c.MaxBody, c.MaxBodyBytes = 10, 5 },
	} {
		c := Config{Prefill: append([]Target(nil), ok.Prefill...), Decode: append([]Target(nil), ok.Decode...)}
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// TestStatusBlamesEnginesOnly: what a client did is no failure of the engine that refuses it, whose answer shows
// that it works; what an engine did, or refuses of what the router wrote, is.
func TestStatusBlamesEnginesOnly(t *testing.T) {
	const transfer = `{"error":{"message":"no","type":"invalid_request_error","param":"kv_transfer_params.tp_size","code":"invalid_value"}}`
	for name, c := range map[string]struct {
		answer   func(*engine, http.ResponseWriter, *http.Request, *seen)
		class    string
		failures uint64 // with those of a 500 before
		failing  bool
	}{
		"a bad request":           {status(400, openAIError), "client", 1, false},
		"a bad request as text":   {status(400, "no"), "client", 1, false},
		"a wrong key":             {status(401, `{}`), "client", 1, false},
		"an unknown model":        {status(404, openAIError), "client", 1, false},
		"inside a stream":         {events("data: {\"choices\":[]}\n\n", "data: {\"error\":{\"message\":\"no\",\"code\":400}}\n\n"), "client", 1, false},
		"full":                    {status(429, openAIError), "status", 2, false},
		"a hand-off":              {status(400, transfer), "status", 2, false},
		"a transfer":              {status(404, `{"error":{"code":"kv_transfer_wait"}}`), "status", 2, false},
		"its own":                 {status(500, openAIError), "status", 2, true},
		"its own inside a stream": {events("data: {\"choices\":[]}\n\n", "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n"), "status", 2, true},
		"no answer":               {text("<html>"), "garbage", 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, status(500, openAIError))
			r := pullPair(t, p, d)
			for range 2 {
				if _, _, err := r.post(t, "/v1/completions", `{"prompt":"x","stream":true}`); err != nil {
					t.Fatal(err)
				}
				r.settled(t)
				d.answer = c.answer
			}
			s := r.pools[core.Decode].status()[0]
			if s.Requests != 2 || s.Failures != c.failures || s.Failing != c.failing {
				t.Errorf("%+v", s)
			}
			want := map[string]int{"status": 1}
			want[c.class]++
			_, metrics := r.fetch(t, "/metrics")
			for class, n := range want {
				if !strings.Contains(metrics, fmt.Sprintf(`kvferry_router_leg_failures_total{class="%s",leg="decode"} %d`, class, n)) {
					t.Errorf("class %s is not counted %d times", class, n)
				}
			}
		})
	}
}
