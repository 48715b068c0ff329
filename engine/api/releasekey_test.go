package api

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

const testKey = "0123456789abcdef0123456789abcdef"

func keyBody(key string) string { return fmt.Sprintf(`{"key":%q}`, key) }

// keyedLeg serves a prefill leg with a key in the test's own goroutine, on a connection of which nobody learns
// that its other end is gone.
func keyedLeg(s *Server, w http.ResponseWriter, prompts, more string) {
	body := fmt.Sprintf(`{"prompt":%s,"max_tokens":1%s,"kv_transfer_params":%s}`, prompts, more, prefillParams)
	req := httptest.NewRequest("POST", "/v1/completions", strings.NewReader(body))
	req.Header.Set("X-Request-Id", "R")
	req.Header.Set(wire.ReleaseKeyHeader, testKey)
	s.ServeHTTP(w, req)
}

// releaseKey asks for it, and gives the answer.
func releaseKey(t *testing.T, s *Server) string {
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("POST", "/kv/release", strings.NewReader(keyBody(testKey))))
	if w.Code != http.StatusOK {
		t.Errorf("the release: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// hookedWriter does something before the first byte of an answer is written.
type hookedWriter struct {
	http.ResponseWriter
	once sync.Once
	hook func()
}

func (w *hookedWriter) Write(b []byte) (int, error) {
	w.once.Do(w.hook)
	return w.ResponseWriter.Write(b)
}

func (w *hookedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

const yes, no = `{"released":true}`, `{"released":false}`

// TestReleaseByKey: whenever the release comes, before the request, while it runs, while its answer is being
// written or behind it, nothing is held afterwards; and the connection has told nobody anything.
func TestReleaseByKey(t *testing.T) {
	for _, more := range []string{"", `,"stream":true`} {
		for _, c := range []struct {
			name      string
			at        string
			said      string
			status    int // of the leg
			submitted int
			letGo     []string // by the endpoint
		}{
			{name: "never", status: 200, submitted: 2},
			{name: "before", at: "before", said: no, status: statusClientGone},
			{name: "while it runs", at: "running", said: yes, status: statusClientGone, submitted: 2},
			{name: "while its answer is written", at: "writing", said: yes, status: 200, submitted: 2},
			{name: "behind its answer", at: "behind", said: yes, status: 200, submitted: 2, letGo: []string{"cmpl-R-0 7", "cmpl-R-1 7"}},
		} {
			t.Run(c.name+more, func(t *testing.T) {
				working := make(chan struct{}, 2)
				f := newFake(func(r engine.Request) []engine.Output {
					if c.at == "running" {
						working <- struct{}{}
						return nil
					}
					return keeping(r)
				})
				var letGo []string
				f.letGo = func(id kv.RequestID, lease kv.Generation) (bool, error) {
					letGo = append(letGo, fmt.Sprint(id, " ", lease))
					return true, nil
				}
				s, err := newServer(Config{NoRequestIDSuffix: true}, f)
				if err != nil {
					t.Fatal(err)
				}
				var said string
				if c.at == "before" {
					said = releaseKey(t, s)
				}
				answer := httptest.NewRecorder()
				w := &hookedWriter{ResponseWriter: answer, hook: func() {
					if c.at == "writing" {
						said = releaseKey(t, s)
					}
				}}
				done := make(chan struct{})
				go func() {
					defer close(done)
					keyedLeg(s, w, `["a","b"]`, more)
				}()
				if c.at == "running" {
					<-working
					<-working
					said = releaseKey(t, s)
				}
				<-done
				if c.at == "behind" {
					said = releaseKey(t, s)
				}
				f.mu.Lock()
				defer f.mu.Unlock()
				if said != c.said || answer.Code != c.status || len(f.mu.streams) != c.submitted {
					t.Errorf("said %s, answered %d, %d submitted; want %+v", said, answer.Code, len(f.mu.streams), c)
				}
				kept := c.at == "" || c.at == "behind"
				for i, st := range f.mu.streams {
					if st.discarded.Load() == kept {
						t.Errorf("stream %d is let go: %v", i, st.discarded.Load())
					}
				}
				slices.Sort(letGo)
				if !slices.Equal(letGo, c.letGo) {
					t.Errorf("let go: %q, want %q", letGo, c.letGo)
				}
				if c.at != "" && releaseKey(t, s) != no {
					t.Error("it is released twice")
				}
			})
		}
	}
}

// TestReleaseByKeyOfRealEngine is the same with an engine of which nothing may be left held.
func TestReleaseByKeyOfRealEngine(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			e, err := engine.New(engine.Config{Role: connector.Producer, Mode: mode, NumBlocks: 64, Lease: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			s := serveEngine(t, e).Server
			leg := func(hook func()) {
				keyedLeg(s, &hookedWriter{ResponseWriter: httptest.NewRecorder(), hook: hook}, `["a prompt of more than one block","b"]`, `,"n":2`)
			}
			leg(func() {})
			if n := e.Stats().Held; n != 4 {
				t.Fatalf("%d are held", n)
			}
			if got := releaseKey(t, s); got != yes {
				t.Error("behind the answer:", got)
			}
			free(t, e)
			leg(func() {
				if got := releaseKey(t, s); got != yes {
					t.Error("while it is written:", got)
				}
			})
			free(t, e)
			if got := releaseKey(t, s); got != no {
				t.Error("before it is there:", got)
			}
			leg(func() {})
			free(t, e)
		})
	}
}

// Headers that are no keys, and keys of others, are refused; the others' requests do not suffer.
func TestReleaseKeyHeader(t *testing.T) {
	f := newFake(keeping)
	r := newRig(t, f, Config{})
	const body = `{"prompt":"a","max_tokens":1,"kv_transfer_params":` + prefillParams + `}`
	for _, c := range []struct {
		key    string
		status int
		want   string
	}{
		{"x", 400, "hexadecimal"},
		{strings.ToUpper(testKey), 400, "hexadecimal"},
		{strings.Repeat("0", 4000), 400, "has 4000 characters"},
		{testKey, 200, ""},
		{testKey, 400, "another request's"},
	} {
		if resp, got := r.do(t, "POST", "/v1/completions", body, wire.ReleaseKeyHeader, c.key); resp.StatusCode != c.status || !strings.Contains(got, c.want) {
			t.Errorf("%.40s: %d %s", c.key, resp.StatusCode, got)
		}
	}
	if n := len(f.submitted()); n != 1 {
		t.Errorf("%d were submitted", n)
	}
}

// TestKeysAreBounded: no flood, of releases or of answers, makes the tables grow, and one of releases puts
// out nothing that is held.
func TestKeysAreBounded(t *testing.T) {
	k, now := newKeys(), time.Unix(1_700_000_000, 0)
	key := func(i int) string { return fmt.Sprintf("%032x", i) }
	begin := func(i int) (context.Context, *keyed) {
		t.Helper()
		ctx, r, err := k.begin(t.Context(), now, key(i))
		if err != nil {
			t.Fatal(err)
		}
		return ctx, r
	}
	_, first := begin(0)
	if !first.deliver(now, []hold{{"r", 1}}) {
		t.Fatal("it is not delivered")
	}
	first.end()
	for i := 1; i <= 2*maxEarlyReleases; i++ {
		k.release(now, key(i))
	}
	if n := len(k.mu.early.by); n != maxEarlyReleases || k.mu.early.order.Len() != n {
		t.Errorf("%d early releases are remembered", n)
	}
	ctx, last := begin(2 * maxEarlyReleases)
	if ctx.Err() == nil || last.deliver(now, nil) {
		t.Error("an early release is forgotten at once")
	}
	last.end()
	now = now.Add(earlyRelease + 1)
	ctx, late := begin(2*maxEarlyReleases - 1)
	if ctx.Err() != nil || len(k.mu.early.by) != 0 {
		t.Errorf("early releases are remembered for ever: %d", len(k.mu.early.by))
	}
	late.end()
	if holds, _ := k.release(now, key(0)); len(holds) != 1 {
		t.Error("releases of strangers have put out a hold")
	}
	for i := range 2 * maxKeyedHolds {
		_, r := begin(i + 1)
		r.deliver(now, []hold{{"a", 1}, {"b", 2}})
		r.end()
	}
	if k.mu.held.size != maxKeyedHolds || len(k.mu.held.by) != maxKeyedHolds/2 || len(k.mu.running) != 0 {
		t.Errorf("%d holds of %d keys are remembered, %d run", k.mu.held.size, len(k.mu.held.by), len(k.mu.running))
	}
	if holds, _ := k.release(now, key(1)); holds != nil {
		t.Error("the oldest did not make room")
	}
	if holds, _ := k.release(now, key(2*maxKeyedHolds)); len(holds) != 2 {
		t.Error("the newest made room")
	}
	_, r := begin(1 << 30)
	if !r.deliver(now, make([]hold, maxKeyedHolds+1)) || k.mu.held.size > maxKeyedHolds {
		t.Error("more holds than the table has room for")
	}
	r.end()
}

// TestKeysInAnyOrder: of a request that has ended and was released, whenever that was, nothing is held.
func TestKeysInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type request struct {
			r              *keyed
			over, released bool
			holds          int
		}
		k, now := newKeys(), time.Unix(1_700_000_000, 0)
		var all [4]request
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			i := rapid.IntRange(0, len(all)-1).Draw(t, "request")
			q, key := &all[i], fmt.Sprintf("%032x", i)
			switch {
			case rapid.Bool().Draw(t, "release"):
				q.released = true
				holds, aborted := k.release(now, key)
				if q.holds -= len(holds); aborted && len(holds) > 0 {
					t.Fatal("it ran, and was held")
				}
			case q.over:
			case q.r == nil:
				ctx, r, err := k.begin(context.Background(), now, key)
				if err != nil || (ctx.Err() != nil) != q.released {
					t.Fatal(err, ctx.Err(), q.released)
				}
				q.r = r
			case rapid.Bool().Draw(t, "delivered"):
				if q.r.deliver(now, []hold{{"r", 1}}) {
					q.holds++
				}
				fallthrough
			default:
				q.over = true
				q.r.end()
			}
			if q.over && q.released && q.holds != 0 {
				t.Fatalf("%d is held by a request that was released", q.holds)
			}
		}
	})
}
