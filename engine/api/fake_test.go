package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second // of a test that waits for something that must happen

var tiny = sync.OnceValue(model.Tiny)

// fakeEngine admits everything and lets the test say what each request answers.
type fakeEngine struct {
	info   engine.ModelInfo
	coords engine.Coordinates
	stats  engine.Stats
	ready  error
	reset  func(ctx context.Context, wait bool) (int, error)
	letGo  func(id kv.RequestID, lease kv.Generation) (bool, error)
	refuse func(engine.Request) error
	script func(r engine.Request) []engine.Output
	mu     struct {
		sync.Mutex
		requests []engine.Request
		streams  []*fakeStream
	}
}

func newFake(script func(engine.Request) []engine.Output) *fakeEngine {
	return &fakeEngine{
		info:   engine.ModelInfo{Name: "m", MaxContext: 64, Vocab: 259},
		coords: engine.Coordinates{EngineID: "e", Host: "h", Port: 5600, TPSize: 1, PPSize: 1, TransferMode: kv.Push, BlockSize: 16, Model: "m", Role: connector.Both},
		script: script,
	}
}

func (f *fakeEngine) Submit(ctx context.Context, r engine.Request) (stream, error) {
	if f.refuse != nil {
		if err := f.refuse(r); err != nil {
			return nil, err
		}
	}
	s := &fakeStream{outputs: make(chan engine.Output, 64), closed: make(chan struct{})}
	for _, o := range f.script(r) {
		s.outputs <- o
	}
	context.AfterFunc(ctx, s.Close)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.requests = append(f.mu.requests, r)
	f.mu.streams = append(f.mu.streams, s)
	return s, nil
}

func (f *fakeEngine) Coordinates() engine.Coordinates { return f.coords }
func (f *fakeEngine) Stats() engine.Stats             { return f.stats }
func (f *fakeEngine) Model() engine.ModelInfo         { return f.info }
func (f *fakeEngine) Tokenizer() *model.Tokenizer     { return tiny().Tokenizer() }
func (f *fakeEngine) Ready() error                    { return f.ready }

func (f *fakeEngine) ResetPrefixCache(ctx context.Context, wait bool) (int, error) {
	return f.reset(ctx, wait)
}

func (f *fakeEngine) Release(id kv.RequestID, lease kv.Generation) (bool, error) {
	return f.letGo(id, lease)
}

func (f *fakeEngine) submitted() []engine.Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]engine.Request(nil), f.mu.requests...)
}

// takeAll returns the submitted requests and forgets them; all their streams must be closed.
func (f *fakeEngine) takeAll(t *testing.T) []engine.Request {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, s := range f.mu.streams {
		select {
		case <-s.closed:
		case <-time.After(patience):
			t.Errorf("the stream of %s is still open", f.mu.requests[i].ID)
		}
	}
	r := f.mu.requests
	f.mu.requests, f.mu.streams = nil, nil
	return r
}

// fakeStream gives what is in outputs, then waits for its end as a real one does.
type fakeStream struct {
	outputs chan engine.Output
	once    sync.Once
	closed  chan struct{}

	discarded atomic.Bool
}

func (s *fakeStream) Next(ctx context.Context) (engine.Output, error) {
	select {
	case o := <-s.outputs:
		if o.Text == "PANIC" {
			panic("a broken stream")
		}
		if o.Text == "ERROR" {
			return o, errors.New("a broken stream")
		}
		return o, nil
	case <-ctx.Done():
		return engine.Output{}, ctx.Err()
	}
}

// Discard notes that the answer has reached nobody.
func (s *fakeStream) Discard() {
	s.discarded.Store(true)
	s.Close()
}

func (s *fakeStream) Close() { s.once.Do(func() { close(s.closed) }) }

// say answers words, each a token, and ends.
func say(words ...string) func(engine.Request) []engine.Output {
	return func(r engine.Request) []engine.Output {
		var out []engine.Output
		for i, w := range words {
			out = append(out, engine.Output{Tokens: []kv.Token{kv.Token(i)}, Text: w})
		}
		last := &out[len(out)-1]
		last.Finish = connector.FinishLength
		last.Usage = engine.Usage{Prompt: len(r.Prompt), Completion: len(words), Cached: 1, External: 2, ComputedPrompt: len(r.Prompt) - 3}
		return out
	}
}

func failing(kind engine.ErrorKind, phase string, before ...engine.Output) func(engine.Request) []engine.Output {
	return func(r engine.Request) []engine.Output {
		err := &engine.RequestError{Request: r.ID, Kind: kind, Phase: phase, Err: errors.New("it broke")}
		return append(append([]engine.Output(nil), before...), engine.Output{Finish: connector.FinishError, Err: err})
	}
}

type rig struct {
	*Server
	url string
}

func newRig(t *testing.T, f *fakeEngine, cfg Config, change ...func(*Server)) *rig {
	t.Helper()
	s, err := newServer(cfg, f)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(s)
	}
	h := httptest.NewUnstartedServer(nil)
	h.Config = s.Server()
	h.Start()
	t.Cleanup(func() {
		h.Close()
		if n := s.inFlight.Load(); n != 0 {
			t.Errorf("%d requests are still counted", n)
		}
		if n := s.bodies.Load(); n != 0 {
			t.Errorf("%d bytes of bodies are still counted", n)
		}
	})
	return &rig{s, h.URL}
}

// client keeps no connection, so that none outlives a test.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func (r *rig) send(ctx context.Context, method, path, body string, header ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, r.url+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return client.Do(req)
}

func (r *rig) do(t *testing.T, method, path, body string, header ...string) (*http.Response, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := r.send(ctx, method, path, body, header...)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%v after %q", err, got)
	}
	return resp, string(got)
}

func (f *fakeEngine) TierStats() (engine.TierStats, bool) { return engine.TierStats{}, false }
