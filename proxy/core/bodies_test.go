package core

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

var peer = Peer{EngineID: "engine\"p", Host: "2001:db8::1", Port: 5600, TPSize: 2, PPSize: 1}

func object(t *testing.T, s string) *openai.Object {
	t.Helper()
	o, err := openai.ParseObject([]byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// everyField is a request with every field that a leg could get wrong.
const everyField = `{ "model":"m", "prompt":"x", "max_tokens":40, "max_completion_tokens":null, "stream":true,
 "stream_options":{"include_usage":true}, "min_tokens":4, "logprobs":2, "top_logprobs":2, "n":1, "best_of":1, "return_token_ids":true,
 "stop":["a"], "stop_token_ids":[1], "ignore_eos":true, "temperature":0.70, "seed":9007199254740993,
 "tools":[{"type":"function"}], "unknown":{"big":12345678901234567890,"f":1.0}, "kv_transfer_params":null }`

func TestLegBodies(t *testing.T) {
	o := object(t, everyField)
	prefill := string(PrefillBody(Completions, o, "xfer-1", Turn{}))
	const wantPrefill = `{ "model":"m", "prompt":"x", "max_tokens":1, "max_completion_tokens":1, "stream":false, "n":1,
 "stop":["a"], "stop_token_ids":[1], "ignore_eos":true, "temperature":0.70, "seed":9007199254740993,
 "tools":[{"type":"function"}], "unknown":{"big":12345678901234567890,"f":1.0}, ` +
		`"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null,"transfer_id":"xfer-1"} }`
	if d := cmp.Diff(wantPrefill, prefill); d != "" {
		t.Error(d)
	}
	decode := string(DecodeBody(o, peer, "R", "xfer-1"))
	wantDecode := strings.Replace(everyField, `"kv_transfer_params":null`,
		`"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"engine\"p","remote_host":"2001:db8::1","remote_port":5600,"tp_size":2,"pp_size":1,"remote_request_id":"R","transfer_id":"xfer-1"}`, 1)
	if d := cmp.Diff(wantDecode, decode); d != "" {
		t.Error(d)
	}
	if got := string(o.Bytes()); got != everyField {
		t.Errorf("the client's body changed: %s", got)
	}
}

func TestPrefillTokenLimits(t *testing.T) {
	for _, c := range []struct {
		api      API
		in, want string
	}{
		{Completions, `{}`, `"max_tokens":1`},
		{ChatCompletions, `{}`, `"max_tokens":1`},
		{Completions, `{"max_tokens":0}`, `"max_tokens":1`},
		{Completions, `{"max_completion_tokens":9}`, `"max_completion_tokens":1,"max_tokens":1`},
		{ChatCompletions, `{"max_completion_tokens":9}`, `"max_completion_tokens":1`},
		{ChatCompletions, `{"max_tokens":"x","max_completion_tokens":9}`, `"max_tokens":1,"max_completion_tokens":1`},
		{ChatCompletions, `{"max_tokens":7,"max\u005ftokens":8}`, `"max\u005ftokens":1`},
	} {
		got := string(PrefillBody(c.api, object(t, c.in), "t", Turn{}))
		want := "{" + c.want + `,"stream":false,"kv_transfer_params":`
		if !strings.HasPrefix(got, want) {
			t.Errorf("%s: got %s, want %s…", c.in, got, want)
		}
	}
}

func params(t *testing.T, body []byte) map[string]json.RawMessage {
	t.Helper()
	var b struct {
		Params map[string]json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(body, &b); err != nil {
		t.Fatal(err)
	}
	return b.Params
}

// TestLegBodiesPassTheConnectorsParser reads both legs as an engine does, and once more without each
// field in turn: what is needed must be missed by name, what is not must not matter.
func TestLegBodiesPassTheConnectorsParser(t *testing.T) {
	o := object(t, `{"prompt":"x"}`)
	for _, c := range []struct {
		leg    wire.Leg
		body   []byte
		want   kv.TransferParams
		needed []string
	}{
		{
			wire.PrefillLeg, PrefillBody(Completions, o, "xfer-1", Turn{}),
			kv.TransferParams{DoRemoteDecode: true, DCPSize: 1, PPSize: 1, TransferID: "xfer-1"},
			[]string{"do_remote_decode"},
		},
		{
			wire.DecodeLeg, DecodeBody(o, peer, "R", "xfer-1"),
			kv.TransferParams{
				DoRemotePrefill: true, RemoteEngineID: peer.EngineID, RemoteRequestID: "R", RemoteHost: peer.Host,
				RemotePort: peer.Port, TPSize: 2, DCPSize: 1, PPSize: 1, TransferID: "xfer-1",
			},
			[]string{"do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"},
		},
	} {
		whole := params(t, c.body)
		read := func(p map[string]json.RawMessage) (kv.TransferParams, error) {
			raw, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			got, err := wire.ParseTransferParams(raw)
			if err != nil {
				return got, err
			}
			return got, wire.CheckLeg(&got, kv.Push, c.leg)
		}
		got, err := read(whole)
		if err != nil {
			t.Fatalf("%s leg: %v", c.leg, err)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s leg: %s", c.leg, d)
		}
		missed := map[string]bool{}
		for name := range whole {
			less := map[string]json.RawMessage{}
			for k, v := range whole {
				if k != name {
					less[k] = v
				}
			}
			if _, err := read(less); err != nil {
				var p *wire.ParamError
				if !errors.As(err, &p) || p.Field != name {
					t.Errorf("%s leg without %s: %v", c.leg, name, err)
				}
				missed[name] = true
			}
		}
		for _, name := range c.needed {
			if !missed[name] {
				t.Errorf("%s leg: %s can be left out without an error", c.leg, name)
			}
			delete(missed, name)
		}
		if len(missed) > 0 {
			t.Errorf("%s leg: needs %v as well", c.leg, missed)
		}
	}
}

func TestPlan(t *testing.T) {
	for _, c := range []struct {
		api    API
		body   string
		reason string
	}{
		{Completions, `{"prompt":"x"}`, ""},
		{Completions, `{"prompt":[1,2]}`, ""},
		{Completions, `{"prompt":[]}`, ""},
		{Completions, `{"prompt":7}`, ""},
		{Completions, `{"prompt":"x","n":1,"best_of":null,"echo":false,"prompt_logprobs":null}`, ""},
		{Completions, `{"prompt":"x","n":"2"}`, ""}, // the engine's to refuse
		{Completions, `{"prompt":"x","n":2}`, ""},
		{Completions, `{"prompt":"x","n":2.5}`, "n is no integer"},
		{Completions, `{"prompt":"x","n":257}`, "more than 256 answers"},
		{Completions, `{"prompt":["x","y"],"n":129}`, "more than 256 answers"},
		{Completions, `{"prompt":["x",[1]]}`, "prompts of several types"},
		{Completions, `{"prompt":"x","n":2,"stream_options":{"continuous_usage_stats":true}}`, "usage is asked for in every chunk"},
		{Completions, `{"prompt":"x","best_of":3}`, "best_of is above 1"},
		{Completions, `{"prompt":"x","echo":true}`, "echo is set"},
		{Completions, `{"prompt":"x","prompt_logprobs":0}`, "prompt_logprobs is set"},
		{Completions, `{"prompt":"x","use_beam_search":true}`, "use_beam_search is set"},
		{Completions, `{"prompt":["x"]}`, ""},
		{Completions, `{"prompt":[ [1],[2]]}`, ""},
		{ChatCompletions, `{"messages":[],"prompt":["x"]}`, ""},
		{ChatCompletions, `{"n":2}`, ""},
	} {
		p, err := NewPlan(c.api, object(t, c.body))
		if err != nil || p.Reason != c.reason || p.Disaggregate != (c.reason == "") {
			t.Errorf("%s: %+v, %v; want %q", c.body, p, err, c.reason)
		}
	}
	for _, v := range []string{"{}", "1", `{"do_remote_prefill":true}`} {
		_, err := NewPlan(Completions, object(t, `{"kv_transfer_params":`+v+`}`))
		var e *openai.Error
		if !errors.As(err, &e) || e.Param != "kv_transfer_params" || e.Status != 400 {
			t.Errorf("a client's own hand-off %s: %v", v, err)
		}
	}
	if got := string(AloneBody(object(t, `{"kv_transfer_params":null,"n":2}`))); got != `{"n":2}` {
		t.Errorf("got %s", got)
	}
}

func TestPeerCheck(t *testing.T) {
	good := Peer{EngineID: "p", Host: "h", Port: 1, TPSize: 1, PPSize: 1}
	for want, change := range map[string]func(*Peer){
		"":              func(p *Peer) { p.Mode, p.Role = "push", "both" },
		"engine_id":     func(p *Peer) { p.EngineID = "" },
		"port":          func(p *Peer) { p.Port = 65536 },
		"tp_size":       func(p *Peer) { p.TPSize = 0 },
		"tp_size is 10": func(p *Peer) { p.TPSize = 1025 },
		"pp_size":       func(p *Peer) { p.PPSize = -1 },
		"transfer_mode": func(p *Peer) { p.Mode = "both" },
		"role":          func(p *Peer) { p.Role = "decode" },
	} {
		p := good
		change(&p)
		_, err := p.Check("http")
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", p, err, want)
		}
	}
	for host, want := range map[string]string{"": "http", "0.0.0.0": "http", "::": "http", "10.0.0.1": "10.0.0.1", "name": "name"} {
		p := good
		p.Host, p.PPSize = host, 0
		got, err := p.Check("http")
		if err != nil || got.Host != want || got.PPSize != 1 {
			t.Errorf("host %q: %+v, %v", host, got, err)
		}
	}
}

func TestRequestIDs(t *testing.T) {
	const uuid = "0b2f14c9-2e05-419a-8b5c-74273f98e277"
	for _, ok := range []string{"a", "a:b/c=d", strings.Repeat("x", 128)} {
		if err := CheckClientRequestID(ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"a,b", "a b", "a\nb", "\x7f", "é", strings.Repeat("x", 129)} {
		if err := CheckClientRequestID(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	for _, client := range []string{"", "mine", "mine-deadbeef"} {
		id := LegRequestID(client, uuid)
		for _, engine := range []kv.RequestID{"chatcmpl-" + id, "cmpl-" + id + "-0"} {
			if engine.Base() != kv.BaseRequestID(engine) {
				t.Errorf("without an engine's suffix, %q loses a part of its own", engine)
			}
			if (engine + "-0123abcd").Base() != kv.BaseRequestID(engine) {
				t.Errorf("%q has another base", engine+"-0123abcd")
			}
		}
	}
}

func TestRoundRobin(t *testing.T) {
	var r RoundRobin
	all := []Candidate{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	var got []string
	for _, c := range [][]Candidate{all, all, all, all, all[1:], all[:1], all} {
		got = append(got, c[r.Pick(c)].Name)
	}
	if d := cmp.Diff([]string{"a", "b", "c", "a", "b", "a", "b"}, got); d != "" {
		t.Error(d)
	}
}
