package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second // of a test that waits for something that must happen

// seen is one leg as a fake engine got it.
type seen struct {
	id     string // X-Request-Id
	header http.Header
	path   string
	body   []byte
	params kv.TransferParams
	gone   chan struct{} // closed when the leg is over
}

// engine is a fake: it reads legs as a real one would and answers as the test says.
type engine struct {
	*httptest.Server
	t       *testing.T
	role    wire.Leg
	mode    kv.TransferMode // of the legs it takes and, unless untold, of its coordinates
	answer  func(e *engine, w http.ResponseWriter, req *http.Request, s *seen)
	arrived chan *seen
	letGo   func(w http.ResponseWriter, req *http.Request) // answers /kv/release
	told    chan string                                    // its bodies
	mu      struct {
		sync.Mutex
		engineID    string
		asked       int // coordinates
		coordinates string
		legs        []*seen
	}
}

// newEngine starts a fake. The default answers are a good prefill and a good decode answer.
func newEngine(t *testing.T, role wire.Leg, answer func(*engine, http.ResponseWriter, *http.Request, *seen)) *engine {
	t.Helper()
	e := &engine{t: t, role: role, mode: kv.Push, answer: answer, arrived: make(chan *seen, 1024), told: make(chan string, 1024)}
	e.mu.engineID = "engine-1"
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/", e.leg)
	mux.HandleFunc("GET /kv/coordinates", e.coordinates)
	mux.HandleFunc("POST /kv/release", e.release)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"object":"list"}`) })
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{}`) })
	e.Server = httptest.NewUnstartedServer(mux)
	e.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	e.Start()
	t.Cleanup(e.Close)
	return e
}

func (e *engine) addr() string { return e.Listener.Addr().String() }

func (e *engine) coordinates(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.asked++
	switch e.mu.coordinates {
	case "":
	case "404":
		http.NotFound(w, nil)
		return
	default:
		_, _ = io.WriteString(w, e.mu.coordinates)
		return
	}
	_, _ = fmt.Fprintf(w, `{"engine_id":%q,"host":"127.0.0.1","port":5600,"tp_size":1,"pp_size":1,"transfer_mode":%q,"role":%q,"block_size":16}`, e.mu.engineID, e.mode, e.role)
}

func (e *engine) release(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return
	}
	e.told <- string(body)
	if e.letGo != nil {
		e.letGo(w, req)
		return
	}
	_, _ = io.WriteString(w, `{"released":true}`)
}

func (e *engine) asked() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mu.asked
}

func (e *engine) leg(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return
	}
	s := &seen{id: req.Header.Get("X-Request-Id"), header: req.Header.Clone(), path: req.URL.Path, body: body, gone: make(chan struct{})}
	defer close(s.gone) // an answer that hangs ends when the router ends the leg
	var b struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(body, &b); err != nil {
		e.t.Errorf("%s leg: %v in %s", e.role, err, body)
	}
	if b.Params != nil {
		if s.params, err = wire.ParseTransferParams(b.Params); err == nil {
			err = wire.CheckLeg(&s.params, e.mode, e.role)
		}
		if err != nil {
			e.t.Errorf("%s leg: %v", e.role, err)
		}
	}
	e.mu.Lock()
	e.mu.legs = append(e.mu.legs, s)
	e.mu.Unlock()
	e.arrived <- s
	e.answer(e, w, req, s)
}

func (e *engine) legs() []*seen {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]*seen(nil), e.mu.legs...)
}

// What engines do.

const (
	prefillAnswer = `{"id":"cmpl-1","choices":[{"text":"","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true}}`
	decodeAnswer  = "{ \"id\":\"cmpl-2\", \"usage\":{\"big\":9007199254740993}, \"choices\":[] }\n"
)

func goodPrefill(_ *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
	_, _ = io.WriteString(w, prefillAnswer)
}

func goodDecode(_ *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, decodeAnswer)
}

func hang(_ *engine, _ http.ResponseWriter, req *http.Request, _ *seen) { <-req.Context().Done() }

func die(_ *engine, _ http.ResponseWriter, _ *http.Request, _ *seen) { panic(http.ErrAbortHandler) }

func text(s string) func(*engine, http.ResponseWriter, *http.Request, *seen) {
	return func(_ *engine, w http.ResponseWriter, _ *http.Request, _ *seen) { _, _ = io.WriteString(w, s) }
}

func status(code int, body string) func(*engine, http.ResponseWriter, *http.Request, *seen) {
	return func(_ *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// cutAnswer announces more than it sends.
func cutAnswer(_ *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
	w.Header().Set("Content-Length", "1000")
	_, _ = io.WriteString(w, `{"id":`)
}

// events streams pieces, flushed one by one; a nil piece waits for the router to end the leg.
func events(pieces ...string) func(*engine, http.ResponseWriter, *http.Request, *seen) {
	return func(_ *engine, w http.ResponseWriter, req *http.Request, _ *seen) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, p := range pieces {
			switch p {
			case "HANG":
				<-req.Context().Done()
				return
			case "DIE":
				panic(http.ErrAbortHandler)
			}
			_, _ = io.WriteString(w, p)
			w.(http.Flusher).Flush()
		}
	}
}

// rig is a router in front of fakes.
type rig struct {
	*Router
	url  string
	logs *syncBuffer
	ears atomic.Pointer[ear]
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	logs := &syncBuffer{}
	cfg.Log = slog.New(slog.NewJSONHandler(logs, nil))
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	g := &rig{Router: r, logs: logs}
	g.listen()
	s := httptest.NewUnstartedServer(nil)
	s.Config = r.Server()
	s.Start()
	t.Cleanup(func() {
		s.Close()
		r.Close()
		if n := r.inFlight.Load(); n != 0 {
			t.Errorf("%d requests are still counted", n)
		}
		if n := r.bodyBytes.Load(); n != 0 {
			t.Errorf("%d bytes of bodies are still counted", n)
		}
		for _, p := range r.pools {
			for _, s := range p.status() {
				if s.InFlight != 0 {
					t.Errorf("%d legs are still counted on %s", s.InFlight, s.Engine)
				}
			}
		}
	})
	g.url = s.URL
	return g
}

func pair(t *testing.T, p, d *engine) *rig {
	return newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}})
}

// syncBuffer is a log that may be read while it is written.
type syncBuffer struct {
	mu struct {
		sync.Mutex
		b bytes.Buffer
	}
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.b.String()
}

// post sends a request and reads the whole answer; a cut answer is an error.
func (r *rig) post(t *testing.T, path, body string, header ...string) (*http.Response, string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := r.send(ctx, path, body, header...)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return resp, string(got), err
}

func (r *rig) send(ctx context.Context, path, body string, header ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return httpClient.Do(req)
}

// settled waits until every handler has returned: a client has its answer a little earlier.
func (r *rig) settled(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(patience); r.inFlight.Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d requests do not end", r.inFlight.Load())
		}
	}
}

// httpClient keeps no connection, so that none outlives a test.
var httpClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func await[T any](t *testing.T, what string, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(patience):
		t.Fatalf("nothing within %v: %s", patience, what)
	}
	return v
}
