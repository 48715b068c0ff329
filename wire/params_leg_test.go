package wire

import (
	"encoding/json"
	"errors"
	"maps"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// The legs that clients sent are what they are meant to be, and complete, except where the case is
// about what is left out.
func TestCheckLegOnVectors(t *testing.T) {
	incomplete := map[string]string{"pull/D_missing_remote_engine_id": "remote_engine_id"}
	plain := map[string]bool{"push/both_flags_false": true, "push/empty_params": true}
	legs := map[string]Leg{"P": PrefillLeg, "D": DecodeLeg}
	for _, v := range paramsVectors(t) {
		for name, l := range v.Legs {
			p, err := ParseTransferParams(l.Body.Params)
			if err != nil {
				t.Errorf("%s %s: %v", v.Name, name, err)
				continue
			}
			want := legs[name]
			if plain[v.Name] {
				want = NoLeg
			}
			if leg, err := LegOf(&p); leg != want || err != nil {
				t.Errorf("%s %s: leg %q, %v", v.Name, name, leg, err)
			}
			missing := ""
			var pe *ParamError
			if err := CheckLeg(&p, v.Mode, want); errors.As(err, &pe) {
				missing = pe.Field
			} else if err != nil {
				t.Errorf("%s %s: %T", v.Name, name, err)
			}
			if expected := map[string]string{"D": incomplete[v.Name]}[name]; missing != expected {
				t.Errorf("%s %s: missing %q, want %q", v.Name, name, missing, expected)
			}
		}
	}
}

// Each key removed in turn gives an error that names it, if the leg needs it.
func TestCheckLegNamesTheMissingKey(t *testing.T) {
	required := map[kv.TransferMode]map[Leg]map[string]bool{
		kv.Push: {
			PrefillLeg: {"do_remote_decode": true},
			DecodeLeg: {"do_remote_prefill": true, "remote_engine_id": true, "remote_request_id": true, "remote_host": true,
				"remote_port": true, "tp_size": true},
		},
		kv.Pull: {
			PrefillLeg: {"do_remote_decode": true},
			DecodeLeg: {"do_remote_prefill": true, "remote_engine_id": true, "remote_request_id": true, "remote_host": true,
				"remote_port": true, "remote_block_ids": true},
		},
	}
	done := map[kv.TransferMode]map[Leg]bool{kv.Push: {}, kv.Pull: {}}
	for _, v := range paramsVectors(t) {
		for name, l := range v.Legs {
			leg := map[string]Leg{"P": PrefillLeg, "D": DecodeLeg}[name]
			var fields map[string]json.RawMessage
			if err := json.Unmarshal(l.Body.Params, &fields); err != nil {
				t.Fatal(err)
			}
			if p, err := ParseTransferParams(l.Body.Params); err != nil || CheckLeg(&p, v.Mode, leg) != nil {
				continue // incomplete as it is
			}
			done[v.Mode][leg] = true
			for key := range fields {
				for how, value := range map[string]json.RawMessage{"removed": nil, "null": json.RawMessage("null")} {
					less := maps.Clone(fields)
					less[key] = value
					if value == nil {
						delete(less, key)
					}
					raw, err := json.Marshal(less)
					if err != nil {
						t.Fatal(err)
					}
					p, err := ParseTransferParams(raw)
					if err != nil {
						t.Fatal(err)
					}
					err = CheckLeg(&p, v.Mode, leg)
					var pe *ParamError
					switch named := errors.As(err, &pe) && pe.Field == key; {
					case required[v.Mode][leg][key] && !named:
						t.Errorf("%s %s, %s %s: %v", v.Name, leg, key, how, err)
					case !required[v.Mode][leg][key] && err != nil:
						t.Errorf("%s %s, %s %s: %v", v.Name, leg, key, how, err)
					}
				}
			}
		}
	}
	for mode, legs := range done {
		if len(legs) != 2 {
			t.Errorf("%s: only %v", mode, legs)
		}
	}
}

func TestCheckLegOfSecondTurn(t *testing.T) {
	p := kv.TransferParams{DoRemoteDecode: true, RemoteBlockIDs: kv.BlockIDs{{1}}, RemoteEngineID: "d", RemoteHost: "h", RemotePort: 1}
	var pe *ParamError
	if err := CheckLeg(&p, kv.Pull, PrefillLeg); !errors.As(err, &pe) || pe.Field != "remote_request_id" {
		t.Errorf("pull: %v", err)
	}
	if err := CheckLeg(&p, kv.Push, PrefillLeg); err != nil {
		t.Errorf("push has no second turn and ignores it: %v", err)
	}
	p.RemoteRequestID = "r"
	if err := CheckLeg(&p, kv.Pull, PrefillLeg); err != nil {
		t.Errorf("pull: %v", err)
	}
}

func TestLegFlags(t *testing.T) {
	both := kv.TransferParams{DoRemoteDecode: true, DoRemotePrefill: true}
	if _, err := LegOf(&both); err == nil {
		t.Error("both flags pass")
	}
	if CheckLeg(&both, kv.Push, PrefillLeg) == nil || CheckLeg(&both, kv.Push, NoLeg) == nil {
		t.Error("both flags pass the check")
	}
	none := kv.TransferParams{}
	if err := CheckLeg(&none, kv.Push, NoLeg); err != nil {
		t.Error(err)
	}
	// Empty groups are no blocks to read.
	pull := kv.TransferParams{DoRemotePrefill: true, RemoteEngineID: "p", RemoteRequestID: "r", RemoteHost: "h", RemotePort: 1,
		RemoteBlockIDs: kv.BlockIDs{{}, {}}}
	var pe *ParamError
	if err := CheckLeg(&pull, kv.Pull, DecodeLeg); !errors.As(err, &pe) || pe.Field != "remote_block_ids" {
		t.Errorf("%v", err)
	}
}
