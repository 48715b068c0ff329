package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/wire"
)

func TestPush(t *testing.T) {
	p := newEngine(t, wire.PrefillLeg, goodPrefill)
	d := newEngine(t, wire.DecodeLeg, goodDecodeAfterPrefill(p))
	r := pair(t, p, d)
	for i, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		resp, got, err := r.post(t, path, `{"prompt":"x", "messages":[], "big":9007199254740993}`,
			"Authorization", "Bearer k", "traceparent", "00-1", "X-Prefiller-Host-Port", "10.0.0.1:1", "X-Request-Id", "mine")
		if err != nil || resp.StatusCode != 200 || got != decodeAnswer {
			t.Fatalf("%v, %+v, %q", err, resp, got)
		}
		if resp.Header.Get("X-Request-Id") != "mine" || resp.Header.Get("X-Kvferry-Route") != "push" || resp.Header.Get("Content-Type") != "application/json" {
			t.Errorf("headers: %v", resp.Header)
		}
		pl, dl := await(t, "P's leg", p.arrived), await(t, "D's leg", d.arrived)
		if pl.id != dl.id || !strings.HasPrefix(pl.id, "mine.") || len(pl.header["X-Request-Id"]) != 1 {
			t.Errorf("request ids %q and %q", pl.id, dl.id)
		}
		if pl.params.TransferID != dl.params.TransferID || !strings.HasPrefix(string(dl.params.TransferID), "xfer-") {
			t.Errorf("transfer ids %q and %q", pl.params.TransferID, dl.params.TransferID)
		}
		if string(dl.params.RemoteRequestID) != dl.id || dl.params.RemoteEngineID != "engine-1" || dl.params.RemotePort != 5600 {
			t.Errorf("D's leg: %+v", dl.params)
		}
		for _, s := range []*seen{pl, dl} {
			if s.path != path || s.header.Get("Authorization") != "Bearer k" || s.header.Get("Traceparent") != "00-1" ||
				s.header.Get("X-Prefiller-Host-Port") != "" || s.header.Get("Content-Type") != "application/json" {
				t.Errorf("%s with headers %v", s.path, s.header)
			}
			if !strings.Contains(string(s.body), `"big":9007199254740993`) {
				t.Errorf("body %s", s.body)
			}
		}
		if n := p.asked(); n != 1 {
			t.Errorf("P was asked %d times for its coordinates after %d requests", n, i+1)
		}
	}
	a, b := p.legs()[0], p.legs()[1]
	if a.id == b.id || a.params.TransferID == b.params.TransferID {
		t.Errorf("two requests of one client id share an id: %q %q", a.id, a.params.TransferID)
	}
	r.settled(t)
	if n := strings.Count(r.logs.String(), `"msg":"request routed"`); n != 2 {
		t.Errorf("%d log lines for 2 requests:\n%s", n, r.logs)
	}
}

func TestWithoutClientID(t *testing.T) {
	p := newEngine(t, wire.PrefillLeg, goodPrefill)
	d := newEngine(t, wire.DecodeLeg, goodDecodeAfterPrefill(p))
	resp, _, err := pair(t, p, d).post(t, "/v1/completions", `{"prompt":"x"}`)
	if err != nil || resp.Header.Get("X-Request-Id") != p.legs()[0].id {
		t.Errorf("%v: the client was told the id %q, the legs had %q", err, resp.Header.Get("X-Request-Id"), p.legs()[0].id)
	}
}

// TestStreamIsNotHeldBack gets each event before the engine sends the next piece, however the pieces
// are cut.
func TestStreamIsNotHeldBack(t *testing.T) {
	next := make(chan string)
	p := newEngine(t, wire.PrefillLeg, goodPrefill)
	d := newEngine(t, wire.DecodeLeg, func(_ *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		for s := range next {
			_, _ = io.WriteString(w, s)
			w.(http.Flusher).Flush()
		}
	})
	r := pair(t, p, d)
	got := make(chan *http.Response)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() {
		resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x","stream":true}`)
		if err != nil {
			t.Error(err)
		}
		got <- resp
	}()
	next <- ": comment\r\n\r\n"
	resp := await(t, "the header, with the first event", got)
	defer resp.Body.Close()
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || resp.Header.Get("X-Accel-Buffering") != "no" {
		t.Fatalf("%d, %v", resp.StatusCode, resp.Header)
	}
	body := bufio.NewReader(resp.Body)
	read := func(want string) {
		t.Helper()
		b := make([]byte, len(want))
		if _, err := io.ReadFull(body, b); err != nil || string(b) != want {
			t.Fatalf("got %q, %v; want %q", b, err, want)
		}
	}
	read(": comment\r\n\r\n")
	next <- "data: {\"text\":\"\xc3"
	next <- "\xa9\"}\n\nda" // the character and the next event are cut
	read("data: {\"text\":\"é\"}\n\n")
	next <- "ta: {\"choices\":[],\"usage\":{}}\n\n"
	read("data: {\"choices\":[],\"usage\":{}}\n\n")
	next <- "data: [DONE]\n\n"
	read("data: [DONE]\n\n")
	close(next)
	if rest, err := io.ReadAll(body); err != nil || len(rest) > 0 {
		t.Errorf("after the end: %q, %v", rest, err)
	}
}

func TestDecodeOnly(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	r := pair(t, p, d)
	for body, reason := range map[string]string{
		`{"prompt":"x","n":2.0}`:                               "n is no integer",
		`{"prompt":["a",[1]]}`:                                 "prompts of several types",
		`{"prompt":"x","kv_transfer_params":null,"echo":true}`: "echo is set",
	} {
		resp, got, err := r.post(t, "/v1/completions", body)
		if err != nil || resp.StatusCode != 200 || got != decodeAnswer {
			t.Fatalf("%s: %v %q", body, err, got)
		}
		if want := fmt.Sprintf("decode-only; reason=%q", reason); resp.Header.Get("X-Kvferry-Route") != want {
			t.Errorf("%s: route %q, want %q", body, resp.Header.Get("X-Kvferry-Route"), want)
		}
		if leg := await(t, "D's leg", d.arrived); strings.Contains(string(leg.body), "kv_transfer_params") || leg.id == "" {
			t.Errorf("D got %s as %q", leg.body, leg.id)
		}
	}
	if n := len(p.legs()); n != 0 {
		t.Errorf("P got %d legs", n)
	}
}

func TestManyStreamsAndLargeBodies(t *testing.T) {
	const streams = 200
	finished := struct {
		sync.Mutex
		m map[string]chan struct{}
	}{m: map[string]chan struct{}{}}
	of := func(id string) chan struct{} { // closed when P is done
		finished.Lock()
		defer finished.Unlock()
		if finished.m[id] == nil {
			finished.m[id] = make(chan struct{})
		}
		return finished.m[id]
	}
	p := newEngine(t, wire.PrefillLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		close(of(s.id))
		goodPrefill(e, w, req, s)
	})
	d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		<-of(s.id) // a D without its KV waits
		var b struct {
			Prompt string `json:"prompt"`
			N      int    `json:"number"`
		}
		if err := json.Unmarshal(s.body, &b); err != nil {
			t.Error(err)
		}
		pieces := []string{fmt.Sprintf("data: {\"number\":%d,\"bytes\":%d}\n\n", b.N, len(b.Prompt))}
		for i := range 20 {
			pieces = append(pieces, fmt.Sprintf("data: %d\n\n", i))
		}
		events(append(pieces, "data: [DONE]\n\n")...)(e, w, req, s)
	})
	r := pair(t, p, d)
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() {
			n := 100
			if i%50 == 0 {
				n = 1 << 20
			}
			_, got, err := r.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"number":%d,"stream":true}`, strings.Repeat("a", n), i))
			want := fmt.Sprintf("data: {\"number\":%d,\"bytes\":%d}\n\n", i, n)
			if err != nil || !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "data: 19\n\ndata: [DONE]\n\n") {
				t.Errorf("stream %d: %v, %.200q", i, err, got)
			}
		})
	}
	wg.Wait()
	if n := p.asked(); n != 1 {
		t.Errorf("P was asked %d times for its coordinates", n)
	}
}

// TestClientThatDoesNotRead is taken for gone, and its legs end.
func TestClientThatDoesNotRead(t *testing.T) {
	p := newEngine(t, wire.PrefillLeg, goodPrefill)
	d := newEngine(t, wire.DecodeLeg, func(_ *engine, w http.ResponseWriter, req *http.Request, _ *seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		event := "data: " + strings.Repeat("x", 1<<20) + "\n\n"
		for req.Context().Err() == nil {
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
		}
	})
	r := pair(t, p, d)
	r.patience = 100 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := r.send(ctx, "/v1/completions", `{"prompt":"x","stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	await(t, "the end of D's leg", await(t, "D's leg", d.arrived).gone)
	r.settled(t)
	if log := r.logs.String(); !strings.Contains(log, "the client left") {
		t.Errorf("log: %s", log)
	}
}
