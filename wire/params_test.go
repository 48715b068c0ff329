package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
	"pgregory.net/rapid"
)

type paramsVector struct {
	Name string
	Mode kv.TransferMode
	Legs map[string]struct {
		Body struct {
			Params json.RawMessage `json:"kv_transfer_params"`
		}
		Response *struct {
			Params json.RawMessage `json:"kv_transfer_params"`
		}
	}
	Finished []struct {
		In  json.RawMessage `json:"params_in"`
		Out json.RawMessage `json:"params_out"`
	}
}

func paramsVectors(t testing.TB) []paramsVector {
	var f struct{ Vectors []paramsVector }
	loadVectors(t, "params", &f)
	if len(f.Vectors) == 0 {
		t.Fatal("no parameters")
	}
	return f.Vectors
}

// present reports a value that is neither absent nor null.
func present(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// paramsOf builds the parameters from a JSON object without the parser.
func paramsOf(t testing.TB, raw json.RawMessage) kv.TransferParams {
	m := value(t, raw).(map[string]any)
	p := kv.TransferParams{DCPSize: 1, PPSize: 1}
	p.DoRemoteDecode, _ = m["do_remote_decode"].(bool)
	p.DoRemotePrefill, _ = m["do_remote_prefill"].(bool)
	p.RemoteEngineID = kv.EngineID(text(m["remote_engine_id"]))
	p.RemoteRequestID = kv.RequestID(text(m["remote_request_id"]))
	p.RemoteHost = text(m["remote_host"])
	p.Mode = kv.TransferMode(text(m["transfer_mode"]))
	p.TransferID = kv.TransferID(text(m["transfer_id"]))
	for key, dst := range map[string]*int{"remote_port": &p.RemotePort, "tp_size": &p.TPSize, "dcp_size": &p.DCPSize,
		"pp_size": &p.PPSize, "remote_num_tokens": &p.RemoteNumTokens} {
		if m[key] != nil {
			*dst = num(t, m[key])
		}
	}
	if m["remote_block_ids"] != nil {
		p.RemoteBlockIDs = blockIDs(t, m["remote_block_ids"])
	}
	if m["remote_prefill_cached_tokens"] != nil {
		n := num(t, m["remote_prefill_cached_tokens"])
		p.CachedTokens = &n
	}
	return p
}

// Every object that a client or an engine sent.
func TestParamsVectors(t *testing.T) {
	seen := 0
	check := func(name string, raw json.RawMessage) {
		if !present(raw) {
			return
		}
		seen++
		got, err := ParseTransferParams(raw)
		if d := cmp.Diff(paramsOf(t, raw), got); d != "" || err != nil {
			t.Errorf("%s: %v %s", name, err, d)
		}
	}
	for _, v := range paramsVectors(t) {
		for leg, l := range v.Legs {
			check(v.Name+" body "+leg, l.Body.Params)
			if l.Response != nil {
				check(v.Name+" response "+leg, l.Response.Params)
			}
		}
		for _, f := range v.Finished {
			check(v.Name+" out", f.Out)
		}
	}
	if seen < 150 {
		t.Errorf("only %d objects", seen)
	}
}

// A response is written as the stock engine writes it, key for key.
func TestParamsResponses(t *testing.T) {
	seen := 0
	check := func(name string, raw json.RawMessage) {
		if !present(raw) {
			return
		}
		seen++
		var want bytes.Buffer
		if err := json.Compact(&want, raw); err != nil {
			t.Fatal(err)
		}
		p, err := ParseTransferParams(raw)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := AppendTransferParams(nil, &p); string(got) != want.String() {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want.String())
		}
	}
	for _, v := range paramsVectors(t) {
		for leg, l := range v.Legs {
			if l.Response != nil {
				check(v.Name+" "+leg, l.Response.Params)
			}
		}
		for _, f := range v.Finished {
			check(v.Name+" finish", f.Out)
		}
	}
	if seen < 90 {
		t.Errorf("only %d responses", seen)
	}
}

func TestParamsDefaults(t *testing.T) {
	want := kv.TransferParams{DCPSize: 1, PPSize: 1}
	nulls := make([]string, 0, len(paramFields))
	for _, f := range paramFields {
		nulls = append(nulls, fmt.Sprintf("%q:null", f.name))
	}
	for _, raw := range []string{"null", "{}", " { } ", "{" + strings.Join(nulls, ",") + "}",
		`{"new":{"a":[1,{"b":"]"}]},"_remote_blocks_processed":true,"_p_side_truncated":7,"remote_block_size":"x"}`,
		`{"TP_SIZE":3,"Tp_Size":4,"transfer_id":""}`} {
		got, err := ParseTransferParams([]byte(raw))
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v %s", raw, err, d)
		}
	}
}

func TestParamsValues(t *testing.T) {
	got, err := ParseTransferParams([]byte(`{"tp_size":7,"remote_block_ids":[ [ 1 , 4294967295 ],[ ] ],
		"remote_blocks_expiry_time":1e3,"remote_prefill_cached_tokens":0,"prompt_token_ids":[ 0 , 2147483647],
		"transfer_id":"xfer-\u00e9\ud83d\udea2","dcp_size":2,"pp_size":3,"tp_size":8,"kv_load_failure_policy":"recompute"}`))
	expiry, cached := 1000.0, 0
	want := kv.TransferParams{TPSize: 8, DCPSize: 2, PPSize: 3, RemoteBlockIDs: kv.BlockIDs{{1, 1<<32 - 1}, {}},
		RemoteBlocksExpiry: &expiry, CachedTokens: &cached, PromptTokens: []kv.Token{0, math.MaxInt32}, TransferID: "xfer-é🚢",
		LoadFailurePolicy: kv.RecomputeOnLoadFailure}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
	for raw, ids := range map[string]kv.BlockIDs{
		`[]`: {}, `[[]]`: {{}}, `[3,4]`: {{3, 4}}, `[ 3 ]`: {{3}}, `[[1],[2]]`: {{1}, {2}}, "[\n[1\t]\r]": {{1}}, `[-0]`: {{0}},
	} {
		got, err := ParseTransferParams([]byte(`{"remote_block_ids":` + raw + `}`))
		if d := cmp.Diff(ids, got.RemoteBlockIDs); d != "" || err != nil {
			t.Errorf("%s: %v %s", raw, err, d)
		}
	}
}

func TestParamsRefusals(t *testing.T) {
	number := []string{"true", `"1"`, "1.0", "1e2", "[1]", "{}", "-1", "9223372036854775808", "1e999"}
	str := []string{"1", "true", "[]", "{}", `"\ud800"`, `"\udc00x"`, `"` + strings.Repeat("x", MaxIDLen+1) + `"`,
		`"` + strings.Repeat(`\u0041`, MaxIDLen+1) + `"`}
	list := []string{"1", `"[1]"`, "true", "{}", "[true]", `["1"]`, "[null]", "[1.0]", "[-1]", "[1e2]"}
	for field, bad := range map[string][]string{
		"do_remote_decode":             {"1", "0", `"true"`, "[]", "{}", "0.0"},
		"do_remote_prefill":            {"1", `"false"`},
		"remote_engine_id":             append(str, `""`),
		"remote_request_id":            append(str, `""`, `"HB:x"`),
		"remote_host":                  append(str, `""`, `"`+strings.Repeat("h", MaxHostLen+1)+`"`),
		"remote_port":                  append(number, "0", "65536"),
		"tp_size":                      append(number, "0", "65537"),
		"dcp_size":                     append(number, "0"),
		"pp_size":                      append(number, "0"),
		"remote_num_tokens":            append(number, "1073741825"),
		"remote_prefill_cached_tokens": number,
		"remote_blocks_expiry_time":    {"true", `"1"`, "1e999", "[]", "-1e999"},
		"transfer_mode":                append(str, `""`, `"PUSH"`, `"both"`),
		"transfer_id":                  str,
		"kv_load_failure_policy":       append(str, `""`, `"FAIL"`, `"retry"`),
		"prompt_token_ids":             append(list, "[2147483648]", "[[1]]"),
		"remote_block_ids": append(list, "[4294967296]", "[[4294967296]]", "[[-1]]", "[[true]]", "[[1],2]", "[1,[2]]", "[[1],null]",
			"[[[1]]]", "[["+strings.Repeat("],[", MaxGroups)+"]]"),
	} {
		for _, v := range bad {
			p, err := ParseTransferParams([]byte(`{"x":1,"` + field + `":` + v + `}`))
			var pe *ParamError
			if !errors.As(err, &pe) || pe.Field != field || pe.Reason == "" || !cmp.Equal(p, kv.TransferParams{}) {
				t.Errorf("%s = %.60s: %v", field, v, err)
			}
			if err != nil && len(err.Error()) > 300 {
				t.Errorf("%s = %.60s: an error of %d bytes", field, v, len(err.Error()))
			}
		}
	}
}

func TestParamsRefusedObjects(t *testing.T) {
	for _, raw := range []string{"", " ", "[]", "1", `"x"`, "true", "{", "{}x", "{}{}", `{"a"}`, `{"a":1,}`, "nul", "{\"a\":\"\xff\"}", `{"a":NaN}`,
		`{"tp_size":01}`, `{"a":` + strings.Repeat("[", 100000), strings.Repeat(`{"a":`, 65) + "1" + strings.Repeat("}", 65)} {
		_, err := ParseTransferParams([]byte(raw))
		var pe *ParamError
		if !errors.As(err, &pe) || pe.Field != paramsKey {
			t.Errorf("%.40q: %v", raw, err)
		}
	}
}

func TestParamsAllocate(t *testing.T) {
	for name, raw := range map[string]string{
		"commas":  `{"prompt_token_ids":"` + strings.Repeat(",", 1<<20) + `"}`,
		"tokens":  `{"prompt_token_ids":[` + strings.Repeat("1,", 1<<18) + `1]}`,
		"groups":  `{"remote_block_ids":[` + strings.Repeat("[],", MaxGroups-1) + `[]]}`,
		"blocks":  `{"remote_block_ids":[[` + strings.Repeat("1,", 1<<18) + `1]]}`,
		"nesting": `{"a":` + strings.Repeat("[", 1<<20),
		"unknown": `{"a":[` + strings.Repeat("{},", 1<<18) + `1]}`,
		"string":  `{"remote_host":"` + strings.Repeat("x", 1<<20) + `"}`,
	} {
		expectAllocated(t, name, len(raw), func() { _, _ = ParseTransferParams([]byte(raw)) })
	}
}

func TestParamsFloat(t *testing.T) {
	for f, want := range map[float64]string{0: "0.0", 5656.412844837: "5656.412844837", 1000: "1000.0", 1e21: "1e+21",
		math.Inf(1): "null", 123456789: "123456789.0"} {
		if got := string(appendJSONFloat(nil, &f)); got != want {
			t.Errorf("%v: %s, want %s", f, got, want)
		}
	}
}

func TestParamsRoundTrip(t *testing.T) {
	txt := rapid.StringN(1, 20, MaxHostLen).Filter(func(s string) bool { return !strings.ContainsRune(s, '\ufffd') })
	size := rapid.IntRange(1, MaxRanks)
	rapid.Check(t, func(t *rapid.T) {
		p := kv.TransferParams{
			DoRemoteDecode:  rapid.Bool().Draw(t, "decode"),
			DoRemotePrefill: rapid.Bool().Draw(t, "prefill"),
			DCPSize:         size.Draw(t, "dcp"), PPSize: size.Draw(t, "pp"),
		}
		if rapid.Bool().Draw(t, "remote") {
			p.RemoteEngineID, p.RemoteHost = kv.EngineID(txt.Draw(t, "engine")), txt.Draw(t, "host")
			p.RemoteRequestID = kv.RequestID("r" + txt.Draw(t, "request"))
			p.RemotePort, p.TPSize = rapid.IntRange(1, 65535).Draw(t, "port"), size.Draw(t, "tp")
			p.RemoteNumTokens = rapid.IntRange(0, MaxTokens).Draw(t, "tokens")
			p.RemoteBlockIDs = kv.BlockIDs{}
			for _, g := range rapid.SliceOfN(rapid.SliceOfN(rapid.Uint32(), 0, 10), 0, 4).Draw(t, "ids") {
				group := []kv.BlockID{}
				for _, id := range g {
					group = append(group, kv.BlockID(id))
				}
				p.RemoteBlockIDs = append(p.RemoteBlockIDs, group)
			}
			p.Mode = rapid.SampledFrom([]kv.TransferMode{"", kv.Push, kv.Pull}).Draw(t, "mode")
			if p.Mode != kv.Push {
				f := rapid.Float64Range(0, 1e12).Draw(t, "expiry")
				p.RemoteBlocksExpiry = &f
			}
			n := rapid.IntRange(0, MaxTokens).Draw(t, "cached")
			p.CachedTokens = &n
		}
		b := AppendTransferParams(nil, &p)
		got, err := ParseTransferParams(b)
		if d := cmp.Diff(p, got); d != "" || err != nil {
			t.Errorf("%s: %v %s", b, err, d)
		}
	})
}

func FuzzParseTransferParams(f *testing.F) {
	for i, v := range paramsVectors(f) {
		for _, l := range v.Legs {
			if i%5 == 0 {
				f.Add([]byte(l.Body.Params))
			}
		}
	}
	f.Add([]byte(`{"remote_block_ids":[1,[2]],"prompt_token_ids":[1 , 2],"remote_blocks_expiry_time":-1.5e3}`))
	f.Add([]byte(`{"kv_load_failure_policy":"recompute","do_remote_prefill":true}`))
	f.Add([]byte(`{"a":"\"],[","remote_block_ids":[[ 1 , 2 ],[ ]],"transfer_id":"\ud83d\udea2"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParseTransferParams(b)
		if err != nil {
			var pe *ParamError
			if !errors.As(err, &pe) {
				t.Errorf("%T", err)
			}
			return
		}
		once := AppendTransferParams(nil, &p)
		again, err := ParseTransferParams(once)
		p.TransferID, p.PromptTokens, p.LoadFailurePolicy = "", nil, "" // only requests carry these
		if p.Mode == kv.Push {
			p.RemoteBlocksExpiry = nil
		}
		if d := cmp.Diff(p, again); d != "" || err != nil {
			t.Errorf("%s: %v %s", once, err, d)
		}
	})
}
