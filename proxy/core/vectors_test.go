package core

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// TestVectors gives what stock engines were seen to answer to the router's code, and compares the legs' bodies with
// those of the router that was in front of them (params.json of the nixl-connector vectors, shortened).
func TestVectors(t *testing.T) {
	raw, err := os.ReadFile("testdata/params.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name    string
		Mode    kv.TransferMode
		PParams map[string]any  `json:"p_params"`
		PAnswer json.RawMessage `json:"p_answer"`
		DParams json.RawMessage `json:"d_params"`
	}
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	handoffs := 0
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) {
			answer, err := openai.ParseObject(v.PAnswer)
			if err != nil {
				t.Fatal(err)
			}
			h, err := ReadHandoff(answer)
			if err != nil {
				t.Fatal(err)
			}
			if kept := answer.Present("kv_transfer_params") != nil; (h.Raw != nil) != kept {
				t.Fatalf("P keeps KV: %v, read as %v", kept, h.Raw != nil)
			}
			if v.PParams["do_remote_decode"] == true {
				var own struct {
					Params map[string]any `json:"kv_transfer_params"`
				}
				if err := json.Unmarshal(PrefillBody(Completions, object(t, `{}`), "t", Turn{}), &own); err != nil {
					t.Fatal(err)
				}
				delete(own.Params, "transfer_id")
				delete(v.PParams, "transfer_id")
				if !reflect.DeepEqual(own.Params, v.PParams) {
					t.Errorf("P's leg: %v, want %v", own.Params, v.PParams)
				}
			}
			if h.Raw == nil {
				return
			}
			handoffs++
			if told := strings.Contains(string(h.Raw), "remote_prefill_cached_tokens"); (h.Cached >= 0) != told || h.Mode() != v.Mode {
				t.Errorf("%d cached, mode %s", h.Cached, h.Mode())
			}
			if err := h.Check(v.Mode); err != nil {
				t.Error(err)
			}
			other := map[kv.TransferMode]kv.TransferMode{kv.Push: kv.Pull, kv.Pull: kv.Push}[v.Mode]
			if err := h.Check(other); err == nil || !strings.Contains(err.Error(), string(v.Mode)) {
				t.Errorf("a pair of another mode: %v", err)
			}
			body := HandoffBody(object(t, `{"prompt":"x"}`), h.Raw)
			if want := `{"prompt":"x","kv_transfer_params":` + string(answer.Raw("kv_transfer_params")) + `}`; string(body) != want {
				t.Errorf("D's leg: %s", body)
			}
		})
	}
	if handoffs < 40 {
		t.Errorf("only %d hand-offs were looked at", handoffs)
	}
}

// FuzzHandoff: whatever P answers, what goes to D is P's own bytes and passes D's parser.
func FuzzHandoff(f *testing.F) {
	f.Add([]byte(`{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1,"transfer_mode":"pull"}}`))
	f.Add([]byte(`{"usage":{"prompt_tokens_details":{"cached_tokens":-1}},"kv_transfer_params":{}}`))
	f.Add([]byte(`{"kv_transfer_params":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := openai.ParseObject(b)
		if err != nil {
			return
		}
		h, err := ReadHandoff(o)
		if err != nil || h.Raw == nil {
			return
		}
		for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
			if h.Check(mode) != nil {
				continue
			}
			d, err := openai.ParseObject(HandoffBody(empty(t), h.Raw))
			if err != nil {
				t.Fatal(err)
			}
			p, err := wire.ParseTransferParams(d.Raw("kv_transfer_params"))
			if err != nil || wire.CheckLeg(&p, mode, wire.DecodeLeg) != nil {
				t.Fatalf("%v: %s", err, h.Raw)
			}
		}
	})
}

func empty(t *testing.T) *openai.Object {
	o, err := openai.ParseObject([]byte(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	return o
}
