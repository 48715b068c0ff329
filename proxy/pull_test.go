package proxy

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// pullParams is what P answers, in the order and with the keys of vectors/nixl-connector/params.json,
// kvferry's own and one that nobody knows.
const pullParams = `{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[4, 5]], "remote_engine_id": "enginep", ` +
	`"remote_request_id": "cmpl-1-0-98a6d2fc", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, ` +
	`"remote_num_tokens": 33, "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 7, ` +
	`"kvferry_lease": 12, "unknown": [9007199254740993, 1.50]}`

var pullPrefill = text(`{"id":"cmpl-1","choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":3}},"kv_transfer_params":` + pullParams + `}`)

// pullPair is a router in front of two fakes that pull.
func pullPair(t *testing.T, p, d *engine) *rig {
	p.mode, d.mode = kv.Pull, kv.Pull
	return pair(t, p, d)
}

// TestPull: D's leg is sent when P has answered, with P's parameters to the byte and the same ids.
func TestPull(t *testing.T) {
	answered := make(chan struct{}, 2)
	p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		answered <- struct{}{}
		pullPrefill(e, w, req, s)
	})
	d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		select {
		case <-answered:
		default:
			t.Error("D has its leg before P has answered")
		}
		goodDecode(e, w, req, s)
	})
	r := pullPair(t, p, d)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		resp, got, err := r.post(t, path, `{"prompt":"x","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9}`, "X-Request-Id", "mine")
		if err != nil || resp.StatusCode != 200 || got != decodeAnswer || resp.Header.Get("X-Kvferry-Route") != "pull" {
			t.Fatalf("%v, %+v, %q", err, resp, got)
		}
		pl, dl := await(t, "P's leg", p.arrived), await(t, "D's leg", d.arrived)
		if pl.id != dl.id || !strings.HasPrefix(pl.id, "mine.") || pl.path != path || dl.path != path {
			t.Errorf("%s as %q, %s as %q", pl.path, pl.id, dl.path, dl.id)
		}
		if b := string(pl.body); !strings.Contains(b, `"stream":false`) || strings.Contains(b, "stream_options") || !strings.Contains(b, `"max_tokens":1,`) ||
			!strings.Contains(b, `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null,"transfer_id":"xfer-`) {
			t.Errorf("P got %s", b)
		}
		if b := string(dl.body); !strings.HasSuffix(b, `"max_tokens":9,"kv_transfer_params":`+pullParams+`}`) || !strings.Contains(b, `"stream":true`) {
			t.Errorf("D got %s", b)
		}
	}
	r.settled(t)
	if p.legs()[0].id == p.legs()[1].id {
		t.Error("two requests share an id")
	}
	if _, got := r.fetch(t, "/metrics"); !strings.Contains(got, `kvferry_router_requests_total{outcome="ok",path="/v1/completions",route="pull",status="200"} 1`) {
		t.Error("the route is not counted")
	}
}

// TestPullWithoutKV: D computes the prompt when P has kept nothing, and the client is told so.
func TestPullWithoutKV(t *testing.T) {
	for name, params := range map[string]string{
		"absent": "", "null": `,"kv_transfer_params":null`, "empty": `,"kv_transfer_params":{}`,
		"no blocks": `,"kv_transfer_params":` + strings.Replace(pullParams, "[[4, 5]]", "[[]]", 1),
	} {
		t.Run(name, func(t *testing.T) {
			p := newEngine(t, wire.PrefillLeg, text(`{"id":"x"`+params+`}`))
			d := newEngine(t, wire.DecodeLeg, goodDecode)
			resp, got, err := pullPair(t, p, d).post(t, "/v1/completions", `{"prompt":"x"}`)
			if err != nil || got != decodeAnswer || resp.Header.Get("X-Kvferry-Route") != `decode-only; reason="the prefill engine kept no KV"` {
				t.Fatalf("%v %q %v", err, got, resp.Header)
			}
			if b := string(d.legs()[0].body); strings.Contains(b, "kv_transfer_params") {
				t.Errorf("D got %s", b)
			}
		})
	}
}

// TestPullBadHandoff: what would end a stock D never reaches it.
func TestPullBadHandoff(t *testing.T) {
	for message, params := range map[string]string{
		"remote_engine_id":       strings.Replace(pullParams, `"remote_engine_id": "enginep", `, "", 1),
		"remote_request_id":      strings.Replace(pullParams, `"remote_request_id"`, `"other"`, 1),
		"remote_port":            strings.Replace(pullParams, "5600", "70000", 1),
		"is not a JSON object":   `7`,
		"transfer_mode push":     strings.Replace(pullParams, `"pull"`, `"push"`, 1),
		"expected a list, got a": strings.Replace(pullParams, "[[4, 5]]", `[[4], 5]`, 1),
	} {
		p := newEngine(t, wire.PrefillLeg, text(`{"id":"x","kv_transfer_params":`+params+`}`))
		d := newEngine(t, wire.DecodeLeg, goodDecode)
		resp, got, err := pullPair(t, p, d).post(t, "/v1/completions", `{"prompt":"x"}`)
		if err != nil {
			t.Fatal(err)
		}
		checkError(t, resp, got, 502, "prefill", p.addr(), message)
		if len(d.legs()) != 0 {
			t.Errorf("%s: D got a leg", message)
		}
	}
}

// TestModesDiffer: such a pair is refused by a line that says which setting is where.
func TestModesDiffer(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, hang), newEngine(t, wire.DecodeLeg, goodDecode)
	d.mode = kv.Pull
	r := pair(t, p, d)
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil {
		t.Fatal(err)
	}
	checkError(t, resp, got, 502, "prefill", p.addr(), "the prefill engine is in transfer mode push, the decode engine in pull: start both with --mode push")
	if len(d.legs()) != 0 {
		t.Error("D got a leg")
	}
	if status, got := r.fetch(t, "/ready"); status != 503 || !strings.Contains(got, "transfer mode push") {
		t.Errorf("/ready: %d %s", status, got)
	}
	await(t, "the end of P's leg", await(t, "P's leg", p.arrived).gone)
	p.mu.Lock()
	p.mode, p.answer = kv.Pull, pullPrefill // it was started anew
	p.mu.Unlock()
	if resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 200 {
		t.Error(err, got)
	}
}

// TestPrefillTellsAnotherMode: a router that was told the wrong mode of a stock engine says so instead of
// letting D wait.
func TestPrefillTellsAnotherMode(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, hang)
	r := newRig(t, Config{
		Prefill: []Target{{URL: p.URL, Peer: &core.Peer{EngineID: "p", Host: "h", Port: 1, TPSize: 1, Mode: kv.Push}}},
		Decode:  []Target{{URL: d.URL, Peer: &core.Peer{}}},
	})
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil {
		t.Fatal(err)
	}
	checkError(t, resp, got, 502, "prefill", p.addr(), "its answer says transfer_mode pull, but the pair works in push")
}

// TestPullStockEngines cannot be asked for anything.
func TestPullStockEngines(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	p.mode, d.mode = kv.Pull, kv.Pull
	p.mu.coordinates, d.mu.coordinates = "404", "404"
	told := Config{Prefill: []Target{{URL: p.URL, Peer: &core.Peer{Mode: kv.Pull}}}, Decode: []Target{{URL: d.URL}}}
	untold := Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}}
	sequential := untold
	sequential.Sequential = true
	for name, c := range map[string]struct {
		cfg    Config
		status int
	}{"the mode is configured": {told, 200}, "nothing is": {untold, 502}, "sequential": {sequential, 200}} {
		t.Run(name, func(t *testing.T) {
			resp, got, err := newRig(t, c.cfg).post(t, "/v1/completions", `{"prompt":"x"}`)
			if err != nil || resp.StatusCode != c.status {
				t.Fatalf("%v %d %s", err, resp.StatusCode, got)
			}
			if c.status == 200 && resp.Header.Get("X-Kvferry-Route") != "pull" {
				t.Errorf("%v", resp.Header)
			}
		})
	}
}

// TestSequentialPush hands P's parameters on in push, without any coordinates.
func TestSequentialPush(t *testing.T) {
	params := strings.Replace(pullParams, `"pull"`, `"push"`, 1)
	p := newEngine(t, wire.PrefillLeg, text(`{"id":"x","kv_transfer_params":`+params+`}`))
	d := newEngine(t, wire.DecodeLeg, goodDecode)
	p.mu.coordinates, d.mu.coordinates = "404", "404"
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, Sequential: true})
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil || resp.StatusCode != 200 || resp.Header.Get("X-Kvferry-Route") != "push" {
		t.Fatalf("%v %s %v", err, got, resp.Header)
	}
	if b := string(d.legs()[0].body); !strings.HasSuffix(b, params+"}") {
		t.Errorf("D got %s", b)
	}
}

// TestClientLeavesBetweenTheLegs: a P that cannot be told keeps the KV of a request that nobody waits for; D
// gets the hand-off, and then the leg ends, so that D lets P go.
func TestClientLeavesBetweenTheLegs(t *testing.T) {
	for _, when := range []string{"as P's answer arrives", "as P's answer is under way", "as D has its leg", "as D works"} {
		t.Run(when, func(t *testing.T) {
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			var r *rig
			p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				switch when {
				case "as P's answer arrives":
					pullPrefill(e, w, req, s)
					w.(http.Flusher).Flush()
					leave()
					return
				case "as P's answer is under way":
					r.leaveMidAnswer(t, w, leave)
				}
				pullPrefill(e, w, req, s)
			})
			d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				if when == "as D has its leg" {
					leave()
				}
				hang(e, w, req, s)
			})
			r = pullPair(t, p, d)
			done := make(chan struct{})
			go func() {
				defer close(done)
				if resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x"}`); err == nil {
					resp.Body.Close()
				}
			}()
			leg := await(t, "D's leg", d.arrived)
			if when == "as D works" {
				leave()
			}
			await(t, "the end of D's leg", leg.gone)
			<-done
			r.settled(t)
			if leg.params.RemoteRequestID != "cmpl-1-0-98a6d2fc" {
				t.Errorf("D got %+v", leg.params)
			}
			if n := len(p.told); n != 0 {
				t.Errorf("a P that did not say that it can be told was told %d times", n)
			}
			if log := r.logs.String(); !strings.Contains(log, "the client left") {
				t.Errorf("log: %s", log)
			}
		})
	}
}

// TestClientLeavesWhilePrefillWorks: P's leg ends at once; there is nothing to let go, and D never hears
// of the request.
func TestClientLeavesWhilePrefillWorks(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, hang), newEngine(t, wire.DecodeLeg, goodDecode)
	r := pullPair(t, p, d)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	go func() {
		if resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x"}`); err == nil {
			resp.Body.Close()
		}
	}()
	leg := await(t, "P's leg", p.arrived)
	leave()
	await(t, "the end of P's leg", leg.gone)
	r.settled(t)
	if n := len(d.legs()); n != 0 {
		t.Errorf("D got %d legs", n)
	}
}

// TestCachedTokens: what D counts as cached came from P; the client is told what P had cached, and no
// other byte changes.
func TestCachedTokens(t *testing.T) {
	whole := "{ \"id\":\"c\",\"usage\":{ \"prompt_tokens\":33, \"prompt_tokens_details\":{\"cached_tokens\": %s ,\"x\":1e3} }, \"big\":9007199254740993 }\n"
	chunk := "data: {\"choices\":[{\"text\":\"\\\"cached_tokens\\\"\"}]}\n\n"
	last := "event: x\r\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":%s}}}\r\n\r\n"
	for _, c := range []struct {
		mode       kv.TransferMode
		sequential bool
		prefill    bool // P's answer comes before D's, else never
	}{{kv.Pull, false, true}, {kv.Push, true, true}, {kv.Push, false, false}} {
		for _, stream := range []bool{false, true} {
			mode := c.mode
			p := newEngine(t, wire.PrefillLeg, text(`{"id":"x","kv_transfer_params":`+strings.Replace(pullParams, `"pull"`, `"`+string(mode)+`"`, 1)+`}`))
			want, own := fmt.Sprintf(whole, "7"), fmt.Sprintf(whole, "32")
			decode := text(own)
			if stream {
				want, own = chunk+fmt.Sprintf(last, "7")+"data: [DONE]\n\n", chunk+fmt.Sprintf(last, "-1")+"data: [DONE]\n\n"
				decode = events(chunk, fmt.Sprintf(last, "-1")+"data: [DONE]\n\n")
			}
			d := newEngine(t, wire.DecodeLeg, decode)
			p.mode, d.mode = mode, mode
			if !c.prefill { // P's count is not known
				want, p.answer = own, hang
			}
			r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, Sequential: c.sequential})
			if _, got, err := r.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"x","stream":%v}`, stream)); err != nil || got != want {
				t.Errorf("%+v, stream %v: %v\n%q, want\n%q", c, stream, err, got, want)
			}
		}
	}
}
