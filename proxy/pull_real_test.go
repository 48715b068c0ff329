package proxy

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/connector"
	kvengine "github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
)

// TestPullEqualsOneEngine asks a pair that pulls and a single engine the same, one answer and several.
func TestPullEqualsOneEngine(t *testing.T) {
	pull := func(c *kvengine.Config) { c.Mode = kv.Pull }
	p, d, alone := startEngine(t, connector.Producer, pull), startEngine(t, connector.Consumer, pull), startEngine(t, connector.Both)
	r := newRig(t, Config{Prefill: []Target{{URL: p}}, Decode: []Target{{URL: d}}})
	received := 0
	for _, c := range []struct {
		body string
		n    int
	}{
		{`"prompt":"0: the keys and values of this prompt are read from the other engine"`, 1},
		{`"prompt":"0: the keys and values of this prompt are read from the other engine","stream":true`, 1}, // cached on both
		{`"prompt":["one of several prompts of a pair that pulls","short","another one, and a longer one"],"n":2,"seed":4`, 6},
		{`"prompt":"sampled several times","n":3,"seed":9,"stream":true,"stream_options":{"include_usage":true}`, 3},
	} {
		body := `{"max_tokens":6,"return_token_ids":true,"temperature":1.2,"seed":1,` + c.body + `}`
		want := ask(t, alone+"/v1/completions", body, c.n)
		resp, got, err := r.post(t, "/v1/completions", body)
		if err != nil || resp.StatusCode != 200 || !strings.HasPrefix(resp.Header.Get("X-Kvferry-Route"), "pull") {
			t.Fatalf("%v %s %v", err, got, resp)
		}
		have := readAnswer(t, resp, []byte(got), c.n)
		if want.Usage != nil {
			want.Usage.PromptTokensDetails, have.Usage.PromptTokensDetails = nil, nil
		}
		if diff := cmp.Diff(want, have); diff != "" {
			t.Errorf("%s: one engine (-), the pair (+):\n%s", c.body, diff)
		}
		received += c.n
	}
	if _, got := fetchURL(t, d+"/metrics"); strings.Contains(got, "kvferry_engine_received_total 0\n") {
		t.Errorf("D has received nothing of %d", received)
	}
	idle(t, p)
	idle(t, d)
}

// idle waits until an engine holds nothing for anybody.
func idle(t *testing.T, url string) time.Duration {
	t.Helper()
	start := time.Now()
	for deadline := start.Add(patience); ; time.Sleep(5 * time.Millisecond) {
		_, got := fetchURL(t, url+"/metrics")
		if strings.Contains(got, "kvferry_engine_requests_held 0\n") && strings.Contains(got, "kvferry_engine_blocks_free 256\n") &&
			strings.Contains(got, "kvferry_engine_requests_running 0\n") && strings.Contains(got, "kvferry_engine_requests_waiting 0\n") {
			return time.Since(start)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s still holds blocks after %v", url, patience)
		}
	}
}

// TestPullClientLeaves closes the client's connection exactly between the legs, or as D begins: P lets go long
// before its lease of ten minutes ends, because the router tells it to.
func TestPullClientLeaves(t *testing.T) {
	for _, when := range []string{"P has answered", "D has its leg"} {
		t.Run(when, func(t *testing.T) {
			var leave context.CancelFunc // of the request under way: there is one at a time
			at := func(here string, h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					if req.Method != http.MethodPost || here != when {
						h.ServeHTTP(w, req)
						return
					}
					if here == "D has its leg" {
						leave()
						h.ServeHTTP(w, req)
						return
					}
					answer := httptest.NewRecorder()
					h.ServeHTTP(answer, req)
					leave()
					_, _ = w.Write(answer.Body.Bytes())
				})
			}
			pull := func(c *kvengine.Config) { c.Mode, c.Lease = kv.Pull, 10*time.Minute }
			p := startBehind(t, func(h http.Handler) http.Handler { return at("P has answered", h) }, connector.Producer, pull)
			d := startBehind(t, func(h http.Handler) http.Handler { return at("D has its leg", h) }, connector.Consumer, pull)
			r := newRig(t, Config{Prefill: []Target{{URL: p}}, Decode: []Target{{URL: d}}})
			for i := range 5 {
				var ctx context.Context
				ctx, leave = context.WithCancel(t.Context())
				resp, err := r.send(ctx, "/v1/completions", fmt.Sprintf(`{"prompt":"%d %s","max_tokens":20,"temperature":0}`, i, strings.Repeat("a prompt of several blocks ", 5)))
				if err == nil {
					resp.Body.Close()
				}
				leave()
				r.settled(t)
				t.Logf("P was idle %v later", idle(t, p))
				idle(t, d)
			}
			if _, got := fetchURL(t, p+"/metrics"); !strings.Contains(got, `kvferry_engine_requests_finished_total{reason="length"} 5`) {
				t.Error("P has not answered all five")
			}
		})
	}
}
