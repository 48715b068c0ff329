package proxy

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	kvengine "github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
)

// TestRefusedHandoffIsFree: a real P whose D refuses has all of its blocks back long before its lease of ten
// minutes ends, of one answer and of several.
func TestRefusedHandoffIsFree(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			same := func(c *kvengine.Config) { c.Mode, c.Lease = mode, 10*time.Minute }
			answered := make(chan struct{}, 64)
			p := startBehind(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					h.ServeHTTP(w, req)
					if strings.HasPrefix(req.URL.Path, "/v1/") {
						answered <- struct{}{}
					}
				})
			}, connector.Producer, same)
			d := startBehind(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					if !strings.HasPrefix(req.URL.Path, "/v1/") {
						h.ServeHTTP(w, req)
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					select {
					case <-answered: // by any P: there are as many
					case <-req.Context().Done(): // or P's leg was cut with this one before it arrived
						return
					}
					w.Header().Set("Retry-After", "1")
					http.Error(w, `{"error":{"message":"no room"}}`, http.StatusTooManyRequests)
				})
			}, connector.Consumer, same)
			r := newRig(t, Config{Prefill: []Target{{URL: p}}, Decode: []Target{{URL: d}}})
			for _, body := range []string{
				`{"prompt":"refused by the decode engine, after the prefill engine has computed all of it"}`,
				`{"prompt":["several prompts","of which none is decoded by anybody, however long it is"],"n":2}`,
				`{"prompt":"refused by the decode engine, again, and in a stream","stream":true,"n":3}`,
			} {
				resp, got, err := r.post(t, "/v1/completions", body)
				if err != nil || resp.StatusCode != http.StatusTooManyRequests {
					t.Fatalf("%v %+v %s", err, resp, got)
				}
				r.settled(t)
				idle(t, p)
				for len(answered) > 0 {
					<-answered
				}
			}
			if _, got := r.fetch(t, "/metrics"); !strings.Contains(got, `kvferry_router_releases_total{result="released"}`) {
				t.Error("nothing was released")
			}
		})
	}
}

// TestCrossedReleaseIsFree: D refuses while P's answer is on its way, so that the router never reads it. P has
// its blocks back all the same, in whatever order the answer, the release and the leg itself are handled there,
// and though P never learns that the connection is cut.
func TestCrossedReleaseIsFree(t *testing.T) {
	for _, order := range []string{"answer, release", "release, answer", "release, leg"} {
		t.Run(order, func(t *testing.T) {
			same := func(c *kvengine.Config) { c.Lease = 10 * time.Minute }
			refuse, told := make(chan struct{}), make(chan struct{})
			waitTold := func() {
				close(refuse)
				await(t, "the release", told)
			}
			p := startBehind(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					switch {
					case req.URL.Path == "/kv/release":
						h.ServeHTTP(w, req)
						close(told)
						return
					case !strings.HasPrefix(req.URL.Path, "/v1/"):
						h.ServeHTTP(w, req)
						return
					}
					body, err := io.ReadAll(req.Body)
					if err != nil {
						t.Error(err)
						return
					}
					req = req.WithContext(context.WithoutCancel(req.Context()))
					req.Body = io.NopCloser(bytes.NewReader(body))
					answer := &lateAnswer{ResponseRecorder: httptest.NewRecorder()} // nobody reads it
					switch order {
					case "answer, release":
						h.ServeHTTP(answer, req)
						if answer.Code != http.StatusOK || !strings.Contains(answer.Body.String(), "kvferry_release") {
							t.Errorf("P has answered %d %s", answer.Code, answer.Body)
						}
						waitTold()
					case "release, answer":
						answer.before = waitTold
						h.ServeHTTP(answer, req)
						if answer.Code != http.StatusOK {
							t.Errorf("P has answered %d %s", answer.Code, answer.Body)
						}
					default:
						waitTold()
						h.ServeHTTP(answer, req)
					}
				})
			}, connector.Producer, same)
			d := startBehind(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					if !strings.HasPrefix(req.URL.Path, "/v1/") {
						h.ServeHTTP(w, req)
						return
					}
					await(t, "P's part", refuse)
					http.Error(w, `{"error":{"message":"no room"}}`, http.StatusTooManyRequests)
				})
			}, connector.Consumer, same)
			r := newRig(t, Config{Prefill: []Target{{URL: p}}, Decode: []Target{{URL: d}}})
			resp, got, err := r.post(t, "/v1/completions", `{"prompt":"refused while the answer of the prefill engine is on its way"}`)
			if err != nil || resp.StatusCode != http.StatusTooManyRequests {
				t.Fatalf("%v %+v %s", err, resp, got)
			}
			r.settled(t)
			await(t, "the release", told)
			idle(t, p)
		})
	}
}

// lateAnswer does something before an answer is written.
type lateAnswer struct {
	*httptest.ResponseRecorder
	before func()
}

func (w *lateAnswer) Write(b []byte) (int, error) {
	if w.before != nil {
		w.before()
		w.before = nil
	}
	return w.ResponseRecorder.Write(b)
}
