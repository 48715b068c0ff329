package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// promptOf is the single prompt of a part's leg.
func promptOf(t *testing.T, s *seen) string {
	var b struct {
		Prompt string
		N      int
	}
	if err := json.Unmarshal(s.body, &b); err != nil || b.N > 1 {
		t.Errorf("%v in %s", err, s.body)
	}
	return b.Prompt
}

// TestPartsPull: each answer is a pair of its own, with the KV that P kept for it.
func TestPartsPull(t *testing.T) {
	p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		text(`{"id":"x","kv_transfer_params":`+strings.Replace(pullParams, "cmpl-1-0", "P-"+s.id+"-of-"+promptOf(t, s), 1)+`}`)(e, w, req, s)
	})
	d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		if want := "P-" + s.id + "-of-" + promptOf(t, s); !strings.HasPrefix(string(s.params.RemoteRequestID), want) {
			t.Errorf("the leg %s got the KV of %s", want, s.params.RemoteRequestID)
		}
		text(`{"id":"cmpl-`+s.id+`","created":`+s.id[len(s.id)-1:]+`,"choices":[{"index":0,"text":"`+promptOf(t, s)+`","x":1e0}],`+
			`"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}`)(e, w, req, s)
	})
	r := pullPair(t, p, d)
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":["a","b"],"n":2}`, "X-Request-Id", "mine")
	if err != nil || resp.StatusCode != 200 || resp.Header.Get("X-Kvferry-Route") != "pull; pairs=4" {
		t.Fatalf("%v %s %v", err, got, resp.Header)
	}
	var a struct{ ID string }
	if err := json.Unmarshal([]byte(got), &a); err != nil || !strings.HasPrefix(a.ID, "cmpl-mine.") || strings.HasSuffix(a.ID, ".0") {
		t.Errorf("%v, id %q", err, a.ID)
	}
	if !strings.Contains(got, `"choices":[{"index":0,"text":"a","x":1e0},{"index":1,"text":"a","x":1e0},{"index":2,"text":"b","x":1e0},{"index":3,"text":"b","x":1e0}]`) ||
		!strings.Contains(got, `"usage":{"prompt_tokens":10,"completion_tokens":8,"total_tokens":18,"prompt_tokens_details":{"cached_tokens":14}}`) {
		t.Errorf("%s", got)
	}
	ids := map[string]bool{}
	for _, s := range d.legs() {
		ids[s.id] = true
	}
	if len(ids) != 4 {
		t.Errorf("legs %v", ids)
	}
}

// TestPartsAreBounded never has more than maxPairs pairs under way.
func TestPartsAreBounded(t *testing.T) {
	var now, most atomic.Int32
	p := newEngine(t, wire.PrefillLeg, pullPrefill)
	d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		defer now.Add(-1)
		text(`{"id":"c","choices":[{"index":0}]}`)(e, w, req, s)
	})
	if resp, got, err := pullPair(t, p, d).post(t, "/v1/completions", `{"prompt":"a","n":100}`); err != nil || resp.StatusCode != 200 || strings.Count(got, `"index"`) != 100 {
		t.Fatal(err, got)
	}
	if n := most.Load(); n > maxPairs {
		t.Errorf("%d pairs at a time, more than %d", n, maxPairs)
	}
}

// TestOnePartFails: its error is the answer's, and the others end.
func TestOnePartFails(t *testing.T) {
	chunk := "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n"
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, stream %v", mode, stream), func(t *testing.T) {
				streaming := make(chan struct{})
				p := newEngine(t, wire.PrefillLeg, text(`{"id":"x","kv_transfer_params":`+strings.Replace(pullParams, `"pull"`, `"`+string(mode)+`"`, 1)+`}`))
				d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
					switch {
					case promptOf(t, s) == "bad":
						<-streaming
						status(400, openAIError)(e, w, req, s)
					case stream:
						w.Header().Set("Content-Type", "text/event-stream")
						_, _ = io.WriteString(w, chunk)
						w.(http.Flusher).Flush()
						hang(e, w, req, s)
					default:
						close(streaming)
						hang(e, w, req, s)
					}
				})
				p.mode, d.mode = mode, mode
				r := pair(t, p, d)
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				resp, err := r.send(ctx, "/v1/completions", fmt.Sprintf(`{"prompt":["good","bad"],"stream":%v}`, stream))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				got := ""
				if stream {
					first := make([]byte, len(chunk))
					if _, err := io.ReadFull(resp.Body, first); err != nil {
						t.Fatal(err)
					}
					close(streaming)
				}
				rest, err := io.ReadAll(resp.Body)
				got = string(rest)
				if err != nil || !strings.Contains(got, "prompt is too long") || strings.Contains(got, "[DONE]") || !strings.Contains(got, `"engine":"`+d.addr()+`"`) {
					t.Errorf("%v, %q", err, got)
				}
				if want := 400; !stream && resp.StatusCode != want || stream && resp.StatusCode != 200 {
					t.Errorf("status %d", resp.StatusCode)
				}
				for range 2 {
					await(t, "the end of D's leg", await(t, "D's leg", d.arrived).gone)
				}
				r.settled(t)
				if n := strings.Count(r.logs.String(), `"msg":"request routed"`); n != 1 {
					t.Errorf("%d log lines: %s", n, r.logs)
				}
			})
		}
	}
}

// TestPartsClientLeaves: all legs end.
func TestPartsClientLeaves(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, hang)
	r := pair(t, p, d)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	go func() {
		if resp, err := r.send(ctx, "/v1/completions", `{"prompt":"a","n":3}`); err == nil {
			resp.Body.Close()
		}
	}()
	var legs []*seen
	for range 3 {
		legs = append(legs, await(t, "D's leg", d.arrived))
	}
	leave()
	for _, s := range legs {
		await(t, "the end of D's leg", s.gone)
	}
	r.settled(t)
	if log := r.logs.String(); !strings.Contains(log, `"status":499`) {
		t.Errorf("log: %s", log)
	}
}

// TestPartsThatCannotBeMerged are an error and never a wrong answer.
func TestPartsThatCannotBeMerged(t *testing.T) {
	for name, answer := range map[string]string{
		"no choices":  `{"id":"c"}`,
		"two choices": `{"id":"c","choices":[{"index":0},{"index":1}]}`,
		"an index":    `{"id":"c","choices":[{"index":3}]}`,
	} {
		p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, text(answer))
		resp, got, err := pair(t, p, d).post(t, "/v1/completions", `{"prompt":"a","n":2}`)
		if err != nil || resp.StatusCode != 502 || !strings.Contains(got, "cannot be merged") {
			t.Errorf("%s: %v %s", name, err, got)
		}
	}
}
