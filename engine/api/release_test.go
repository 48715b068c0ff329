package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// keeping answers a prefill leg with a hold of lease 7.
func keeping(r engine.Request) []engine.Output {
	out := say("x")(r)
	out[0].Params = &kv.TransferParams{
		DoRemotePrefill: true, RemoteEngineID: "e", RemoteRequestID: r.ID, RemoteHost: "h", RemotePort: 5600, TPSize: 1, DCPSize: 1, PPSize: 1,
		RemoteBlockIDs: kv.BlockIDs{{1, 2}}, RemoteNumTokens: 5, Mode: kv.Push, Lease: 7,
	}
	return out
}

// prefill runs a prefill leg and gives what /kv/release must be sent.
func (r *rig) prefill(t *testing.T, prompt string) (kv.TransferParams, string) {
	t.Helper()
	resp, got := r.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":%s}`, prompt, prefillParams))
	if resp.StatusCode != http.StatusOK {
		t.Fatal(got)
	}
	p, err := wire.ParseTransferParams(completion(t, got).KVTransferParams)
	if err != nil {
		t.Fatal(err)
	}
	return p, releaseBody(p.RemoteRequestID, p.Lease, p.Release)
}

func releaseBody(id kv.RequestID, lease kv.Generation, token string) string {
	return fmt.Sprintf(`{"request_id":%q,"lease":%d,"token":%q}`, id, lease, token)
}

// Only who has the answer's parameters can let its hold go; everybody else is told why not, and the
// engine never hears of it.
func TestRelease(t *testing.T) {
	f := newFake(keeping)
	var asked []string
	held, closed := true, error(nil)
	f.letGo = func(id kv.RequestID, lease kv.Generation) (bool, error) {
		asked = append(asked, fmt.Sprint(id, " ", lease))
		return held, closed
	}
	r, other := newRig(t, f, Config{NoRequestIDSuffix: true}), newRig(t, newFake(keeping), Config{NoRequestIDSuffix: true})
	p, good := r.prefill(t, "hello")
	_, foreign := other.prefill(t, "hello")
	id, token := string(p.RemoteRequestID), p.Release
	long := strings.Repeat("x", maxReleaseBody)
	for _, c := range []struct {
		name, body string
		status     int
		want       string
	}{
		{"a hold", good, 200, `{"released":true}`},
		{"another id", releaseBody("cmpl-S-0", 7, token), 403, `"wrong_token"`},
		{"another lease", releaseBody(p.RemoteRequestID, 8, token), 403, `"wrong_token"`},
		{"lease moved into the id", releaseBody(kv.RequestID("7 "+id), 0, token), 403, `"wrong_token"`},
		{"no lease", releaseBody(p.RemoteRequestID, 0, token), 403, `"wrong_token"`},
		{"no token", releaseBody(p.RemoteRequestID, 7, ""), 403, `"wrong_token"`},
		{"half a token", releaseBody(p.RemoteRequestID, 7, token[:16]), 403, `"wrong_token"`},
		{"a token of another process", foreign, 403, `"wrong_token"`},
		{"nothing", "", 400, "cannot be read"},
		{"null", "null", 400, `"param":"request_id"`},
		{"no id", `{"lease":7,"token":"x"}`, 400, `"param":"request_id"`},
		{"no lease key", `{"request_id":"r","token":"x"}`, 400, `"param":"lease"`},
		{"no token key", `{"request_id":"r","lease":7}`, 400, `"param":"token"`},
		{"wrong types", `{"request_id":["r"],"lease":7,"token":"x"}`, 400, "cannot be read"},
		{"a negative lease", `{"request_id":"r","lease":-7,"token":"x"}`, 400, "cannot be read"},
		{"a key too many", `{"request_id":"r","lease":7,"token":"x","all":true}`, 400, "cannot be read"},
		{"an unknown key", `{"key":"` + strings.Repeat("0", wire.ReleaseKeyLen) + `"}`, 200, `{"released":false}`},
		{"an empty key", `{"key":""}`, 400, `"param":"key"`},
		{"a long key", `{"key":"` + strings.Repeat("0", wire.ReleaseKeyLen+1) + `"}`, 400, `"param":"key"`},
		{"a key in upper case", `{"key":"` + strings.Repeat("A", wire.ReleaseKeyLen) + `"}`, 400, `"param":"key"`},
		{"a key beside a token", `{"key":"` + strings.Repeat("0", wire.ReleaseKeyLen) + `","token":"x"}`, 400, `"param":"key"`},
		{"two objects", good + good, 400, "something follows"},
		{"half an object", good[:len(good)-1], 400, "cannot be read"},
		{"deep", strings.Repeat("[", maxReleaseBody), 400, "cannot be read"},
		{"too long", releaseBody(kv.RequestID(long), 7, token), 413, "larger than"},
	} {
		asked = nil
		resp, got := r.do(t, "POST", "/kv/release", c.body)
		if resp.StatusCode != c.status || !strings.Contains(got, c.want) {
			t.Errorf("%s: %d %s, want %d %s", c.name, resp.StatusCode, got, c.status, c.want)
		}
		if want := c.status == 200 && c.body == good; (len(asked) == 1) != want || want && asked[0] != id+" 7" {
			t.Errorf("%s: the engine was asked for %q", c.name, asked)
		}
	}
	held = false
	if resp, got := r.do(t, "POST", "/kv/release", good); resp.StatusCode != 200 || got != `{"released":false}` {
		t.Errorf("a hold that is over: %d %s", resp.StatusCode, got)
	}
	closed = errors.New("closing")
	if resp, got := r.do(t, "POST", "/kv/release", good); resp.StatusCode != 503 {
		t.Errorf("a closed engine: %d %s", resp.StatusCode, got)
	}
	if resp, _ := r.do(t, "GET", "/kv/release", ""); resp.StatusCode != 404 {
		t.Errorf("GET: %s", resp.Status)
	}
}

func FuzzRelease(f *testing.F) {
	for _, s := range []string{releaseBody("cmpl-R-0-00000000", 1790000000000000, "00ff"), `{}`, `{"lease":1e3}`, `{"request_id":null}`, `[]`, `{"request_id":"\ud800","lease":0,"token":""}`, keyBody(testKey), `{"key":"0","lease":1}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		r, err := parseRelease([]byte(body))
		if err != nil {
			if e := asAPIError(err); e.Status != 400 {
				t.Errorf("%q: %v", body, e)
			}
			return
		}
		if r.Key != nil {
			if r.ID != nil || r.Lease != nil || r.Token != nil || !wire.IsReleaseKey(*r.Key) {
				t.Errorf("%q: read as %+v", body, r)
			}
			return
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseRelease(b)
		if err != nil || *again.ID != *r.ID || *again.Lease != *r.Lease || *again.Token != *r.Token {
			t.Errorf("%q: read as %s, which is read as %+v, %v", body, b, again, err)
		}
	})
}

// brokenWriter is a connection that the client has closed.
type brokenWriter struct{ http.ResponseWriter }

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

// unflushed is a connection whose last bytes cannot be sent.
type unflushed struct{ http.ResponseWriter }

func (unflushed) FlushError() error { return errors.New("broken pipe") }

// What was computed for an answer that reached nobody is let go; what was answered is kept for D.
func TestUndeliveredHoldsNothing(t *testing.T) {
	const one, two = `{"prompt":"hello","max_tokens":1%s,"kv_transfer_params":%s}`, `{"prompt":["a","b"],"max_tokens":1%s,"kv_transfer_params":%s}`
	broken := func(w http.ResponseWriter) http.ResponseWriter { return brokenWriter{w} }
	for _, c := range []struct {
		name   string
		body   string
		more   string
		script func(engine.Request) []engine.Output
		wrap   func(http.ResponseWriter) http.ResponseWriter
		kept   bool
	}{
		{name: "delivered", body: one, kept: true},
		{name: "delivered in a stream", body: one, more: `,"stream":true`, kept: true},
		{name: "both of two delivered", body: two, kept: true},
		{name: "not written", body: one, wrap: broken},
		{name: "not flushed", body: one, wrap: func(w http.ResponseWriter) http.ResponseWriter { return unflushed{w} }},
		{name: "two not written", body: two, wrap: broken},
		{name: "stream not written", body: one, more: `,"stream":true`, wrap: broken},
		{name: "one of two failed", body: two, script: func(r engine.Request) []engine.Output {
			if strings.Contains(string(r.ID), "-R-1") {
				return failing(engine.KindInternal, "model")(r)
			}
			return keeping(r)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.script == nil {
				c.script = keeping
			}
			f := newFake(c.script)
			s, err := newServer(Config{NoRequestIDSuffix: true}, f)
			if err != nil {
				t.Fatal(err)
			}
			var w http.ResponseWriter = httptest.NewRecorder()
			if c.wrap != nil {
				w = c.wrap(w)
			}
			req := httptest.NewRequest("POST", "/v1/completions", strings.NewReader(fmt.Sprintf(c.body, c.more, prefillParams)))
			req.Header.Set("X-Request-Id", "R")
			s.ServeHTTP(w, req)
			f.mu.Lock()
			streams := f.mu.streams
			f.mu.Unlock()
			if len(streams) == 0 {
				t.Fatal("nothing was submitted")
			}
			for i, st := range streams {
				if st.discarded.Load() == c.kept {
					t.Errorf("stream %d is let go: %v", i, st.discarded.Load())
				}
			}
		})
	}
}

// A client that has left before anything was submitted, or leaves between its answers.
func TestLeavesBeforeSubmit(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	f := newFake(func(r engine.Request) []engine.Output {
		leave() // the second prompt is not submitted any more
		return keeping(r)
	})
	s, err := newServer(Config{}, f)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(want int) {
		t.Helper()
		w := httptest.NewRecorder()
		body := fmt.Sprintf(`{"prompt":["a","b"],"max_tokens":1,"kv_transfer_params":%s}`, prefillParams)
		s.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "POST", "/v1/completions", strings.NewReader(body)))
		f.mu.Lock()
		defer f.mu.Unlock()
		if w.Code != statusClientGone || len(f.mu.streams) != want {
			t.Fatalf("%d, %d submitted", w.Code, len(f.mu.streams))
		}
		for _, st := range f.mu.streams {
			if !st.discarded.Load() {
				t.Error("a hold is left")
			}
		}
	}
	ask(1)
	ask(1)
}

// With a real engine and a lease of an hour: what is let go, by the endpoint or because its answer reached
// nobody, is free at once.
func TestRealRelease(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			e, err := engine.New(engine.Config{Role: connector.Producer, Mode: mode, NumBlocks: 64, Lease: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			r := serveEngine(t, e)
			_, release := r.prefill(t, strings.Repeat("a prompt of several blocks ", 5))
			if s := e.Stats(); s.Held != 1 || s.BlocksFree == s.BlocksTotal {
				t.Fatalf("nothing is held: %+v", s)
			}
			for _, want := range []string{`{"released":true}`, `{"released":false}`} {
				if resp, got := r.do(t, "POST", "/kv/release", release); resp.StatusCode != 200 || got != want {
					t.Errorf("%d %s, want %s", resp.StatusCode, got, want)
				}
				free(t, e)
			}
			body := fmt.Sprintf(`{"prompt":["a","b"],"n":2,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":%s}`, prefillParams)
			r.ServeHTTP(brokenWriter{httptest.NewRecorder()}, httptest.NewRequest("POST", "/v1/completions", strings.NewReader(body)))
			free(t, e)
			if got := e.Stats().Finished[connector.FinishLength]; got != 5 {
				t.Errorf("%d requests were computed, want 5", got)
			}
		})
	}
}

// A prefill leg that says of a hold that it is its conversation's last turn lets it go by the answer's token, as the
// endpoint does, and not by names and numbers.
func TestOwnTurnNeedsTheToken(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			e, err := engine.New(engine.Config{Role: connector.Both, Mode: mode, Bidirectional: mode == kv.Pull, NumBlocks: 64, Lease: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			r := serveEngine(t, e)
			p, _ := r.prefill(t, strings.Repeat("a prompt of several blocks ", 5))
			turn := func(token string, held int) {
				t.Helper()
				own := p
				own.DoRemotePrefill, own.DoRemoteDecode, own.Release = false, true, token
				resp, got := r.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":"hello","max_tokens":1,"kv_transfer_params":%s}`, wire.AppendTransferParams(nil, &own)))
				if resp.StatusCode != http.StatusOK {
					t.Fatal(got)
				}
				answered, err := wire.ParseTransferParams(completion(t, got).KVTransferParams)
				if err != nil {
					t.Fatal(err)
				}
				if ok, err := e.Release(answered.RemoteRequestID, answered.Lease); !ok || err != nil {
					t.Fatal(ok, err)
				}
				for end := time.Now().Add(patience); e.Stats().Held != held; time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("token %q: %d are held, want %d", token, e.Stats().Held, held)
					}
				}
			}
			turn("", 1)
			turn(strings.Repeat("0", len(p.Release)), 1)
			if ok, err := e.Release(p.RemoteRequestID, p.Lease); !ok || err != nil {
				t.Fatalf("a guess has let it go: %v, %v", ok, err)
			}
			free(t, e)
			p, _ = r.prefill(t, strings.Repeat("a prompt of several blocks ", 5))
			turn(p.Release, 0)
			free(t, e)
		})
	}
}

// free waits until an engine holds nothing.
func free(t *testing.T, e *engine.Engine) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		s := e.Stats()
		if s.Held == 0 && s.BlocksFree == s.BlocksTotal {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("it stays so: %+v", s)
		}
	}
}
