package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/wire"
)

// keeping answers a decode leg as a D that keeps its KV as `cmpl-<n>` for the n-th time.
func keeping(stream bool) func(*engine, http.ResponseWriter, *http.Request, *seen) {
	return func(e *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
		params := fmt.Sprintf(`{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[4,5]],"remote_engine_id":"d","remote_request_id":"cmpl-%d",`+
			`"remote_host":"127.0.0.1","remote_port":5601,"tp_size":1,"remote_num_tokens":20,"remote_blocks_expiry_time":9.5,"transfer_mode":"pull"}`, len(e.legs()))
		if !stream {
			_, _ = fmt.Fprintf(w, `{"id":"x","choices":[],"kv_transfer_params":%s}`, params)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = fmt.Fprintf(w, "data: {\"id\":\"x\",\"choices\":[]}\n\ndata: {\"id\":\"x\",\"choices\":[],\"kv_transfer_params\":%s}\n\ndata: [DONE]\n\n", params)
	}
}

// named tells which turn a prefill leg brings along; "" for none.
func (s *seen) named() string { return string(s.params.RemoteRequestID) }

// TestTurnsOfAConversation: what D says that it keeps goes to P with the next turn, once, and to no client.
func TestTurnsOfAConversation(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream %v", stream), func(t *testing.T) {
			p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, keeping(stream))
			r := pullPair(t, p, d)
			for i, c := range []struct{ conversation, want string }{
				{`,"conversation_id":"a"`, ""}, {`,"conversation_id":"a"`, "cmpl-1"}, {`,"conversation_id":"b"`, ""},
				{``, ""}, {`,"conversation_id":"a"`, "cmpl-2"}, {`,"conversation_id":"b"`, "cmpl-3"}, {`,"conversation_id":"a","cache_salt":"s"`, ""},
			} {
				resp, got, err := r.post(t, "/v1/chat/completions", fmt.Sprintf(`{"messages":[],"stream":%v%s}`, stream, c.conversation))
				if err != nil || resp.StatusCode != 200 || strings.Contains(got, "kv_transfer_params") || !strings.Contains(got, `"id":"x"`) {
					t.Fatalf("%v %s", err, got)
				}
				pl, dl := p.legs()[i], d.legs()[i]
				if pl.named() != c.want || strings.Contains(string(pl.body)+string(dl.body), "conversation_id") {
					t.Errorf("turn %d: P got %s, D %s; want %q", i, pl.body, dl.body, c.want)
				}
				if c.want != "" && (pl.params.RemoteBlocksExpiry == nil || pl.params.RemotePort != 5601 || pl.params.TransferID == "" || len(pl.params.RemoteBlockIDs) != 1) {
					t.Errorf("P got %s", pl.body)
				}
			}
			r.settled(t)
			if _, got := r.fetch(t, "/metrics"); !strings.Contains(got, "kvferry_router_conversations 3\n") ||
				!strings.Contains(got, `kvferry_router_turns_total{what="kept"} 6`) || !strings.Contains(got, `kvferry_router_turns_total{what="used"} 3`) ||
				!strings.Contains(got, `kvferry_router_turns_total{what="dropped"} 1`) {
				t.Error(got)
			}
		})
	}
}

// TestTurnIsTriedOnce: a second attempt, and a second request after a failed one, do without.
func TestTurnIsTriedOnce(t *testing.T) {
	refuse := func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		if s.named() != "" {
			http.Error(w, `{"error":{"message":"tp_size differs","param":"kv_transfer_params.tp_size"}}`, 400)
			return
		}
		pullPrefill(e, w, req, s)
	}
	p, d := newEngine(t, wire.PrefillLeg, refuse), newEngine(t, wire.DecodeLeg, keeping(false))
	r := pullPair(t, p, d)
	const body = `{"prompt":"x","conversation_id":"a"}`
	for range 2 {
		if resp, got, err := r.post(t, "/v1/completions", body); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v %s", err, got)
		}
	}
	legs := p.legs()
	if len(legs) != 3 || legs[0].named() != "" || legs[1].named() != "cmpl-1" || legs[2].named() != "" {
		t.Errorf("P got %d legs", len(legs))
	}
	p.answer = func(_ *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
		w.WriteHeader(500)
		_, _ = io.WriteString(w, `{}`)
	}
	for range 2 {
		if resp, got, err := r.post(t, "/v1/completions", body); err != nil || resp.StatusCode != 500 {
			t.Fatalf("%v %s", err, got)
		}
	}
	legs = p.legs()
	if len(legs) != 5 || legs[3].named() != "cmpl-2" || legs[4].named() != "" {
		t.Errorf("P got %d legs", len(legs))
	}
	r.settled(t)
	// Either is let go at D: that of the second attempt, and that of the request that failed.
	if _, got := r.fetch(t, "/metrics"); !strings.Contains(got, `kvferry_router_turns_total{what="dropped"} 2`) {
		t.Error(got)
	}
}

// TestTurnsOfNobody: several answers are no turn, nor is what D serves alone; a bad name is refused.
func TestTurnsOfNobody(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		_, _ = io.WriteString(w, `{"id":"x","choices":[{"index":0}],"kv_transfer_params":{"do_remote_decode":true,"remote_block_ids":[[1]],"remote_engine_id":"d",`+
			`"remote_request_id":"r","remote_host":"h","remote_port":1}}`)
	})
	r := pullPair(t, p, d)
	for _, body := range []string{`{"prompt":"x","n":2,"conversation_id":"a"}`, `{"prompt":"x","conversation_id":"a","echo":true}`} {
		resp, got, err := r.post(t, "/v1/completions", body)
		if err != nil || resp.StatusCode != 200 || strings.Contains(got, "kv_transfer_params") {
			t.Fatalf("%v %s", err, got)
		}
	}
	for _, s := range p.legs() {
		if s.named() != "" {
			t.Errorf("P got %s", s.body)
		}
	}
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x","conversation_id":5}`)
	if err != nil || resp.StatusCode != 400 || !strings.Contains(got, `"param":"conversation_id"`) {
		t.Errorf("%v %s", err, got)
	}
	r.settled(t)
}

// TestTurnOfAClientThatLeaves: a client that has the end of its stream may go; before that its answer counts
// for nothing.
func TestTurnOfAClientThatLeaves(t *testing.T) {
	for _, whole := range []bool{true, false} {
		t.Run(fmt.Sprintf("whole %v", whole), func(t *testing.T) {
			p := newEngine(t, wire.PrefillLeg, pullPrefill)
			first := true
			d := newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
				if !first {
					keeping(true)(e, w, req, s)
					return
				}
				first = false
				if whole {
					keeping(true)(e, w, req, s)
				} else {
					cut := &cutWriter{ResponseWriter: w}
					keeping(true)(e, cut, req, s)
				}
				_ = http.NewResponseController(w).Flush()
				<-req.Context().Done() // it keeps its leg open until its client leaves
			})
			r := pullPair(t, p, d)
			ctx, leave := context.WithCancel(context.Background())
			defer leave()
			const body = `{"prompt":"x","stream":true,"conversation_id":"a"}`
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/v1/completions", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := httpClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			last := "[DONE]"
			if !whole {
				last = "choices"
			}
			for got := ""; !strings.Contains(got, last); {
				buf := make([]byte, 4096)
				n, err := resp.Body.Read(buf)
				if got += string(buf[:n]); err != nil && !strings.Contains(got, last) {
					t.Fatalf("%v after %q", err, got)
				}
			}
			leave()
			_ = resp.Body.Close()
			await(t, "D's leg", d.arrived)
			r.settled(t)
			if resp, got, err := r.post(t, "/v1/completions", body); err != nil || resp.StatusCode != 200 {
				t.Fatalf("%v %s", err, got)
			}
			want := ""
			if whole {
				want = "cmpl-1"
			}
			if got := p.legs()[1].named(); got != want {
				t.Errorf("the next turn names %q, want %q", got, want)
			}
		})
	}
}

// cutWriter leaves out the end of a stream.
type cutWriter struct{ http.ResponseWriter }

func (c *cutWriter) Write(b []byte) (int, error) {
	text, _, _ := strings.Cut(string(b), "data: [DONE]")
	if _, err := io.WriteString(c.ResponseWriter, text); err != nil {
		return 0, err
	}
	return len(b), nil
}
