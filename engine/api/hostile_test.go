package api

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/engine"
)

// rude is a connection of somebody who does not keep to HTTP.
type rude struct {
	net.Conn
	t *testing.T
}

func (r *rig) rude(t *testing.T, say string) *rude {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(c, say) // it may be closed already
	return &rude{c, t}
}

// closed waits until the server has closed the connection, and gives what it had said.
func (c *rude) closed() string {
	c.t.Helper()
	got, err := io.ReadAll(c)
	if e, ok := err.(net.Error); ok && e.Timeout() {
		c.t.Errorf("the server keeps the connection")
	}
	return string(got)
}

const postHead = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"

// A client that stops inside its body, or never stops sending a byte now and then, is ended.
func TestSlowBodies(t *testing.T) {
	f := newFake(say("x"))
	r := newRig(t, f, Config{}, func(s *Server) { s.silence = 50 * time.Millisecond })
	if got := r.rude(t, fmt.Sprintf(postHead, 100)+`{"prompt":`).closed(); !strings.HasPrefix(got, "HTTP/1.1 400") || !strings.Contains(got, "could not be read") {
		t.Errorf("stopped inside its body: %q", got)
	}
	c := r.rude(t, fmt.Sprintf(postHead, 1<<20))
	for {
		if _, err := io.WriteString(c, " "); err != nil {
			break // by its deadline, if the server does not end it
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := c.Write([]byte(" ")); err == nil {
		t.Error("a trickle goes on")
	} else if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Error("a trickle was never ended")
	}
	if n := len(f.submitted()); n != 0 {
		t.Errorf("%d requests reached the engine", n)
	}
}

// What a handler does not read of a body keeps no connection.
func TestUnreadBody(t *testing.T) {
	r := newRig(t, newFake(say("x")), Config{MaxBody: 100}, func(s *Server) { s.silence = 50 * time.Millisecond })
	for _, head := range []string{
		"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", fmt.Sprintf(postHead, 1000),
	} {
		if got := r.rude(t, head).closed(); !strings.HasPrefix(got, "HTTP/1.1 ") {
			t.Errorf("%.20q: %q", head, got)
		}
	}
}

// Silent connections and half requests, many more than there may be: they lose their places to those
// who ask for something, and to each other.
func TestCrowd(t *testing.T) {
	r := newRig(t, newFake(say("x")), Config{}, func(s *Server) { s.conns.limit = 20 })
	var crowd []*rude
	for i := range 100 {
		crowd = append(crowd, r.rude(t, []string{"", "GET /hea", "POST /v1/completions HTTP/1.1\r\nHost:"}[i%3]))
		if i%20 == 0 {
			if resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"a"}`); resp.StatusCode != 200 {
				t.Errorf("%d %s", resp.StatusCode, got)
			}
		}
	}
	for _, c := range crowd[:70] {
		c.closed()
	}
	r.conns.mu.Lock()
	defer r.conns.mu.Unlock()
	if n := len(r.conns.mu.all); n > 20 || r.conns.mu.quiet.Len() > n {
		t.Errorf("%d connections, %d of them quiet", n, r.conns.mu.quiet.Len())
	}
}

// Connections at work are never closed for others: a new one is refused instead.
func TestCrowdAtWork(t *testing.T) {
	begun, word := make(chan struct{}), make(chan struct{})
	f := newFake(func(q engine.Request) []engine.Output {
		begun <- struct{}{}
		<-word
		return say("x")(q)
	})
	r := newRig(t, f, Config{}, func(s *Server) { s.conns.limit = 2 })
	answers := make(chan int, 2)
	for range 2 {
		go func() {
			resp, err := r.send(context.Background(), "POST", "/v1/completions", `{"prompt":"a"}`)
			if err != nil {
				answers <- 0
				return
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			answers <- resp.StatusCode
		}()
		<-begun
	}
	if got := r.rude(t, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n").closed(); got != "" {
		t.Errorf("the third is answered %q", got)
	}
	close(word)
	for range 2 {
		if status := <-answers; status != 200 {
			t.Errorf("a client at work got %d", status)
		}
	}
	working := func() int { // an answer arrives before its handler has ended
		r.conns.mu.Lock()
		defer r.conns.mu.Unlock()
		return len(r.conns.mu.all) - r.conns.mu.quiet.Len()
	}
	for end := time.Now().Add(patience); working() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d connections are at work", working())
		}
	}
	if resp, _ := r.do(t, "GET", "/health", ""); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
}

// All bodies together are bounded; who has a small one comes later.
func TestManyBodies(t *testing.T) {
	r := newRig(t, newFake(say("x")), Config{}, func(s *Server) { s.maxBodies = 1000 })
	c := r.rude(t, fmt.Sprintf(postHead, 2000)+strings.Repeat(" ", 990))
	for r.bodies.Load() < 990 {
		time.Sleep(time.Millisecond)
	}
	resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"abc"}`)
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") == "" || !strings.Contains(got, "overloaded") {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
	_ = c.Close()
	for r.bodies.Load() > 0 {
		time.Sleep(time.Millisecond)
	}
	if resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"abc"}`); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
}

// A client that asks and asks and never reads is taken for gone.
func TestAsksAndNeverReads(t *testing.T) {
	r := newRig(t, newFake(say("x")), Config{}, func(s *Server) { s.patience = 50 * time.Millisecond })
	c := r.rude(t, "")
	ask := []byte(strings.Repeat("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 1000))
	for {
		if _, err := c.Write(ask); err != nil {
			if e, ok := err.(net.Error); ok && e.Timeout() {
				t.Error("the server waits for it")
			}
			return
		}
	}
}

func TestDeepJSON(t *testing.T) {
	f := newFake(say("x"))
	r := newRig(t, f, Config{})
	const depth = 1 << 20
	for _, body := range []string{
		strings.Repeat("[", depth), strings.Repeat(`{"prompt":`, depth/8),
		`{"prompt":` + strings.Repeat("[", depth) + strings.Repeat("]", depth) + `}`,
		`{"prompt":"a","x":` + strings.Repeat(`{"a":`, depth/8) + "1" + strings.Repeat("}", depth/8) + `}`,
		`{"prompt":"a","kv_transfer_params":` + strings.Repeat(`{"a":`, 100) + "1" + strings.Repeat("}", 100) + `}`,
	} {
		if resp, got := r.do(t, "POST", "/v1/completions", body); resp.StatusCode != 400 || len(got) > 1000 {
			t.Errorf("%.30s…: %d %.200s", body, resp.StatusCode, got)
		}
	}
	if n := len(f.submitted()); n != 0 {
		t.Errorf("%d requests reached the engine", n)
	}
}

// Whatever is sent, the server answers, blames the client for what is the client's fault, and has
// nothing counted afterwards.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{
		`{"prompt":"a"}`, `{"prompt":[[1],[2]],"n":2,"stream":true}`, `{"messages":[{"role":"user","content":"a"}]}`, `{"prompt":{}}`,
		`{"prompt":"a","kv_transfer_params":` + prefillParams + `}`, `{"prompt":"a","kv_transfer_params":` + decodeParams + `}`,
		`{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"kv_load_failure_policy":"x"}}`,
	} {
		f.Add(uint8(0), s, "")
		f.Add(uint8(1), s, "R")
	}
	f.Add(uint8(2), "", "wait=1e400")
	s, err := newServer(Config{MaxBody: 4096}, newFuzzFake())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, where uint8, body, more string) {
		path := []string{"/v1/completions", "/v1/chat/completions", "/kv/reset-prefix-cache"}[where%3]
		req := httptest.NewRequest("POST", path, strings.NewReader(body))
		req.Header["X-Request-Id"] = []string{more}
		if where%3 == 2 {
			req.URL.RawQuery = more
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, req)
		if w.Code >= 500 || w.Code < 200 {
			t.Errorf("%s %q: %d %s", path, body, w.Code, w.Body)
		}
		if s.inFlight.Load() != 0 || s.bodies.Load() != 0 {
			t.Errorf("%d requests and %d bytes are still counted", s.inFlight.Load(), s.bodies.Load())
		}
	})
}

// newFuzzFake forgets its requests, of which there are many.
func newFuzzFake() backend {
	f := newFake(say("x"))
	f.reset = func(context.Context, bool) (int, error) { return 0, nil }
	return forgetful{f}
}

type forgetful struct{ *fakeEngine }

func (f forgetful) Submit(ctx context.Context, r engine.Request) (stream, error) {
	st, err := f.fakeEngine.Submit(ctx, r)
	f.mu.Lock()
	f.mu.requests, f.mu.streams = nil, nil
	f.mu.Unlock()
	return st, err
}

func TestReset(t *testing.T) {
	f := newFake(say("x"))
	waited, patient := false, false
	var answer error
	f.reset = func(ctx context.Context, wait bool) (int, error) {
		_, patient = ctx.Deadline()
		waited = wait
		return 7, answer
	}
	r := newRig(t, f, Config{})
	for _, c := range []struct {
		query  string
		err    error
		status int
		want   string
		wait   bool
	}{
		{"", nil, 200, `{"reset":true,"blocks":7}`, false},
		{"?wait=0", nil, 200, `"reset":true`, false},
		{"?wait=2.5", nil, 200, `"reset":true`, true},
		{"", &engine.CacheBusyError{Held: 3}, 409, `"kv_in_use"`, false},
		{"?wait=1", &engine.CacheBusyError{Receiving: 3}, 409, "KV of 3 requests", true},
		{"", io.ErrClosedPipe, 503, `"unavailable"`, false},
		{"?wait=x", nil, 400, `"param":"wait"`, false},
		{"?wait=-1", nil, 400, "0 to 600", false},
		{"?wait=601", nil, 400, "0 to 600", false},
		{"?wait=NaN", nil, 400, "0 to 600", false},
		{"?wait=1&wait=2", nil, 400, "once", false},
	} {
		waited, answer = false, c.err
		resp, got := r.do(t, "POST", "/kv/reset-prefix-cache"+c.query, "")
		if resp.StatusCode != c.status || !strings.Contains(got, c.want) || waited != c.wait || !patient {
			t.Errorf("%q: %d %s, waited %v", c.query, resp.StatusCode, got, waited)
		}
	}
	if resp, _ := r.do(t, "GET", "/kv/reset-prefix-cache", ""); resp.StatusCode != http.StatusNotFound {
		t.Errorf("GET: %s", resp.Status)
	}
}

// A connection that is kept serves request after request.
func TestKeptConnection(t *testing.T) {
	r := newRig(t, newFake(say("x")), Config{}, func(s *Server) { s.conns.limit = 1 })
	c := r.rude(t, "")
	answers := bufio.NewReader(c)
	for range 5 {
		_, _ = io.WriteString(c, fmt.Sprintf(postHead, 14)+`{"prompt":"a"}`)
		resp, err := http.ReadResponse(answers, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		if resp.StatusCode != 200 {
			t.Error(resp.Status)
		}
	}
}
