package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
)

const pullParams = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[4,5]],"remote_engine_id":"p","remote_request_id":"cmpl-R-0-aaaaaaaa","remote_host":"h","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":5,"remote_blocks_expiry_time":null,"transfer_mode":"pull"}`

// P's blocks are of one prompt: its answers share them, other prompts of the request have nothing to
// do with them.
func TestPullOfSeveral(t *testing.T) {
	f := newFake(say("x"))
	f.coords.TransferMode = kv.Pull
	r := newRig(t, f, Config{NoRequestIDSuffix: true})
	r.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":["hello","other"],"n":3,"max_tokens":1,"kv_transfer_params":%s}`, pullParams), "X-Request-Id", "R")
	qs := f.takeAll(t)
	if len(qs) != 6 {
		t.Fatalf("%d requests", len(qs))
	}
	for i, q := range qs {
		switch {
		case i < 3 && (q.Params == nil || q.Params.Readers != 3 || q.Params.RemoteBlockIDs.Len() != 2):
			t.Errorf("answer %d to the first prompt has the parameters %+v", i, q.Params)
		case i >= 3 && q.Params != nil:
			t.Errorf("request %s of the second prompt has the parameters %+v", q.ID, q.Params)
		}
	}
}

// turnParams is what a D answers that keeps its KV for the next turn.
const turnParams = `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[4,5]],"remote_engine_id":"d","remote_request_id":"cmpl-R-0-aaaaaaaa","remote_host":"h","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":5,"remote_blocks_expiry_time":480.5,"transfer_mode":"pull"}`

// What a D keeps is the first prompt's; the others are prefilled as if nothing were kept, and handed over.
func TestTurnOfSeveral(t *testing.T) {
	f := newFake(say("x"))
	f.coords.TransferMode = kv.Pull
	r := newRig(t, f, Config{NoRequestIDSuffix: true})
	r.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":["hello","other"],"n":2,"max_tokens":1,"kv_transfer_params":%s}`, turnParams), "X-Request-Id", "R")
	qs := f.takeAll(t)
	if len(qs) != 4 {
		t.Fatalf("%d requests", len(qs))
	}
	for i, q := range qs {
		if q.Params == nil || !q.Params.DoRemoteDecode || q.Params.Readers != 2 || (q.Params.RemoteBlockIDs.Len() == 2) != (i < 2) ||
			(q.Params.RemoteBlocksExpiry != nil) != (i < 2) {
			t.Errorf("request %s has the parameters %+v", q.ID, q.Params)
		}
	}
}

// A client that has left before its decode leg was submitted: the legs are submitted all the same, and ended, since P
// keeps its blocks until each answer's end is told, and only an engine that has the leg can tell it.
func TestDecodeLegOfAClientThatHasLeft(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	f := newFake(func(engine.Request) []engine.Output {
		leave()
		return nil
	})
	f.coords.TransferMode = kv.Pull
	s, err := newServer(Config{}, f)
	if err != nil {
		t.Fatal(err)
	}
	ask := func() {
		t.Helper()
		w := httptest.NewRecorder()
		body := fmt.Sprintf(`{"prompt":["hello","other"],"n":3,"max_tokens":1,"kv_transfer_params":%s}`, pullParams)
		s.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "POST", "/v1/completions", strings.NewReader(body)))
		qs := f.takeAll(t) // their streams are closed
		if w.Code != statusClientGone || len(qs) != 3 {
			t.Errorf("%d, %d submitted", w.Code, len(qs))
		}
		for _, q := range qs {
			if q.Params == nil || q.Params.Readers != 3 {
				t.Errorf("submitted: %+v", q)
			}
		}
	}
	ask() // it leaves between its answers
	ask() // it has left before

	// Real engines, and a lease of an hour: P's blocks are free at once, whenever the client leaves.
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		of := func(role connector.Role) (*rig, *engine.Engine) {
			e, err := engine.New(engine.Config{Role: role, Mode: mode, NumBlocks: 64, Lease: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			return serveEngine(t, e), e
		}
		p, pe := of(connector.Producer)
		d, de := of(connector.Consumer)
		at := pe.Coordinates()
		for i := range 2 {
			prompt := strings.Repeat("a prompt of several blocks ", 5+i)
			resp, got := p.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"transfer_id":"xfer-%d"}}`, prompt, i), "X-Request-Id", "R")
			if resp.StatusCode != 200 {
				t.Fatal(got)
			}
			params := string(completion(t, got).KVTransferParams)
			if mode == kv.Push {
				params = fmt.Sprintf(`{"do_remote_prefill":true,"remote_engine_id":%q,"remote_request_id":"R","remote_host":%q,"remote_port":%d,"tp_size":1,"transfer_id":"xfer-%d"}`, at.EngineID, at.Host, at.Port, i)
			}
			req := httptest.NewRequestWithContext(ctx, "POST", "/v1/completions", strings.NewReader(fmt.Sprintf(`{"prompt":%q,"max_tokens":4,"kv_transfer_params":%s}`, prompt, params)))
			req.Header.Set("X-Request-Id", "R")
			d.ServeHTTP(httptest.NewRecorder(), req)
			free(t, pe)
			free(t, de)
		}
	}
}

// A D says in its answer what it keeps for the next turn, and in the last chunk of a stream.
func TestTurnIsSaid(t *testing.T) {
	expiry := 480.5
	f := newFake(func(r engine.Request) []engine.Output {
		out := append(say("a")(r)[:0:0], engine.Output{Text: "a", Tokens: []kv.Token{1}}, say("b")(r)[0])
		out[1].Params = &kv.TransferParams{
			DoRemoteDecode: true, RemoteEngineID: "d", RemoteRequestID: "cmpl-R-0-aaaaaaaa", RemoteHost: "h", RemotePort: 5600, TPSize: 1, DCPSize: 1, PPSize: 1,
			RemoteBlockIDs: kv.BlockIDs{{4, 5}}, RemoteNumTokens: 5, RemoteBlocksExpiry: &expiry, Mode: kv.Pull,
		}
		return out
	})
	f.coords.TransferMode = kv.Pull
	r := newRig(t, f, Config{})
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		for _, stream := range []bool{false, true} {
			_, got := r.do(t, "POST", path, fmt.Sprintf(`{"prompt":"hello","messages":[{"role":"user","content":"x"}],"max_tokens":2,"stream":%v,"kv_transfer_params":%s}`, stream, pullParams))
			if strings.Count(got, `"kv_transfer_params":`+turnParams) != 1 || strings.Count(got, "kv_transfer_params") != 1 {
				t.Errorf("%s, stream %v: %s", path, stream, got)
			}
			if stream && !strings.Contains(got, turnParams+"}\n\ndata: [DONE]") {
				t.Errorf("%s: the parameters are not in the last chunk: %s", path, got)
			}
			f.takeAll(t)
		}
	}
}

// What ends a stock engine costs its sender a 400 here (H12, H21).
func TestPullRefusals(t *testing.T) {
	f := newFake(say("x"))
	f.coords.TransferMode = kv.Pull
	r := newRig(t, f, Config{})
	for _, key := range []string{"remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"} {
		var p map[string]any
		if err := json.Unmarshal([]byte(pullParams), &p); err != nil {
			t.Fatal(err)
		}
		delete(p, key)
		raw, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		resp, got := r.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":"hello","max_tokens":1,"kv_transfer_params":%s}`, raw))
		if resp.StatusCode != 400 || !strings.Contains(got, key) {
			t.Errorf("without %s: %d %s", key, resp.StatusCode, got)
		}
	}
}

// TestRealPullPair sends both legs one after the other, as a pull router does, also with several answers
// to one prompt.
func TestRealPullPair(t *testing.T) {
	pulls := func(role connector.Role) *rig {
		e, err := engine.New(engine.Config{Role: role, Mode: kv.Pull, NumBlocks: 64})
		if err != nil {
			t.Fatal(err)
		}
		return serveEngine(t, e)
	}
	p, d, alone := pulls(connector.Producer), pulls(connector.Consumer), startEngine(t, connector.Both)
	prompt := strings.Repeat("All of the keys and values of this prompt are read by the other engine. ", 3)
	for i, n := range []int{1, 3} {
		body := fmt.Sprintf(`"prompt":%q,"temperature":0,"n":%d,"max_tokens":8`, prompt[i:], n)
		_, got := alone.do(t, "POST", "/v1/completions", "{"+body+"}")
		want := completion(t, got).Choices
		_, got = p.do(t, "POST", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"kv_transfer_params":%s}`, prompt[i:], prefillParams))
		params := completion(t, got).KVTransferParams
		if !strings.Contains(string(params), `"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":`) {
			t.Errorf("P answers %s", params)
		}
		_, got = d.do(t, "POST", "/v1/completions", fmt.Sprintf(`{%s,"kv_transfer_params":%s}`, body, params))
		a := completion(t, got)
		if len(a.Choices) != n {
			t.Fatalf("%d answers: %s", n, got)
		}
		for k := range a.Choices {
			if a.Choices[k].Text != want[k].Text {
				t.Errorf("answer %d of the pair is %q, of one engine %q", k, a.Choices[k].Text, want[k].Text)
			}
		}
	}
}
