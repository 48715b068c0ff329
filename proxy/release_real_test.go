package proxy

import (
	"net/http"
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
					<-answered // by any P: there are as many
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
