package connector

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/kv"
)

func TestParseTransferConfig(t *testing.T) {
	extra := DefaultConfig()
	extra.Lease, extra.EngineTTL = time.Minute, 0
	for raw, want := range map[string]TransferConfig{
		"":                                 {Extra: DefaultConfig()},
		"null":                             {Extra: DefaultConfig()},
		`{"kv_connector":"NixlConnector"}`: {Mode: kv.Pull, Extra: DefaultConfig(), Given: []string{"kv_connector"}},
		`{"kv_connector":"NixlPushConnector","kv_role":"kv_producer","engine_id":"p","kv_load_failure_policy":"recompute",
		  "kv_buffer_device":"cpu","kv_port":14579,"kv_rank":0,"kv_parallel_size":2,"kv_ip":"h","kv_buffer_size":1e9,"enable_permute_local_kv":false,
		  "kv_connector_module_path":null,"kv_connector_extra_config":{"kv_lease_duration":60,"engine_ttl":0}}`: {
			Mode: kv.Push, Role: Producer, EngineID: "p", LoadFailurePolicy: kv.RecomputeOnLoadFailure, Extra: extra,
			Given: []string{"enable_permute_local_kv", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_connector", "kv_connector_extra_config",
				"kv_connector_extra_config.engine_ttl", "kv_connector_extra_config.kv_lease_duration", "kv_connector_module_path", "kv_ip",
				"kv_load_failure_policy", "kv_parallel_size", "kv_port", "kv_rank", "kv_role"}},
		`{"engine_id":null,"kv_buffer_device":null,"kv_connector_extra_config":null}`: {Extra: DefaultConfig(),
			Given: []string{"engine_id", "kv_buffer_device", "kv_connector_extra_config"}},
	} {
		got, err := ParseTransferConfig([]byte(raw))
		if err != nil {
			t.Errorf("%s: %v", raw, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", raw, d)
		}
		for _, key := range got.Given {
			if !got.Has(key) {
				t.Errorf("%s: %s is given and not there", raw, key)
			}
		}
		if got.Has("kv_nothing") {
			t.Error("what is not given is there")
		}
	}
}

func TestParseTransferConfigRefuses(t *testing.T) {
	for raw, says := range map[string]string{
		`[]`:                                                    "kv_transfer_config: is not a JSON object",
		`{"kv_conector":"NixlConnector"}`:                       "kv_transfer_config.kv_conector: is not known; did you mean kv_connector?",
		`{"KV_ROLE":"kv_both"}`:                                 "did you mean kv_role?",
		`{"engine-id":"x"}`:                                     "did you mean engine_id?",
		`{"kv_connector":"LMCacheConnectorV1"}`:                 `kv_connector: is "LMCacheConnectorV1", want NixlConnector or NixlPullConnector or NixlPushConnector`,
		`{"kv_role":null}`:                                      "kv_role: is null, want kv_both or kv_consumer or kv_producer",
		`{"kv_role":""}`:                                        "kv_role: is",
		`{"engine_id":7}`:                                       "engine_id: is 7, want a text",
		`{"kv_load_failure_policy":"ignore"}`:                   "want fail or recompute",
		`{"kv_buffer_device":"cuda"}`:                           "kv_buffer_device: is \"cuda\", want cpu: KV is in the memory of the host here",
		`{"enable_permute_local_kv":true}`:                      "enable_permute_local_kv: is true",
		`{"enable_permute_local_kv":"yes"}`:                     "want true or false",
		`{"kv_connector_module_path":"x"}`:                      "no connector is loaded from elsewhere",
		`{"kv_connector_extra_config":{"kv_lease":1}}`:          "kv_connector_extra_config.kv_lease: is not known; did you mean kv_lease_duration?",
		`{"kv_connector_extra_config":{"num_threads":0}}`:       "kv_connector_extra_config: num_threads is 0",
		`{"kv_connector_extra_config":[]}`:                      "kv_connector_extra_config: is not a JSON object",
		`{"` + strings.Repeat("x", 100) + `":1}`:                "is not known",
		`{"engine_id":"` + strings.Repeat("x", maxExtra) + `"}`: "bytes, more than",
	} {
		_, err := ParseTransferConfig([]byte(raw))
		var extra *ExtraError
		if !errors.As(err, &extra) || !strings.Contains(err.Error(), says) || len(err.Error()) > 300 {
			t.Errorf("%.100s: %v, want %q", raw, err, says)
		}
	}
}

// Each key, misspelt in each of three ways, is refused with its own name.
func TestNearestName(t *testing.T) {
	var keys []string
	for _, k := range TransferKeys() {
		keys = append(keys, k.Name)
	}
	parsers := []struct {
		keys  []string
		parse func(raw []byte) error
	}{
		{extraNames(), func(raw []byte) error { _, err := ParseExtra(raw); return err }},
		{keys, func(raw []byte) error { _, err := ParseTransferConfig(raw); return err }},
	}
	for _, p := range parsers {
		for _, key := range p.keys {
			for _, wrong := range []string{key + "s", strings.ToUpper(key), key[:2] + key[3:]} {
				err := p.parse([]byte(`{"` + wrong + `": 1}`))
				if err == nil || !strings.Contains(err.Error(), wrong+": is not known; did you mean "+key+"?") {
					t.Errorf("%s: %v", wrong, err)
				}
			}
		}
	}
}

// What documents say of a key's default is so.
func TestExtraDefaults(t *testing.T) {
	for _, k := range ExtraKeys() {
		raw := `{"` + k.Name + `": ` + k.Default + `}`
		if strings.Contains(k.Default, "`") {
			continue // in words
		}
		got, err := ParseExtra([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(DefaultConfig(), got); d != "" {
			t.Errorf("%s: %s", raw, d)
		}
	}
}

func FuzzParseTransferConfig(f *testing.F) {
	f.Add(`{"kv_connector":"NixlPushConnector","kv_role":"kv_both","kv_connector_extra_config":{"kv_lease_duration":30}}`)
	f.Add(`{"engine_id":null,"kv_port":1}`)
	f.Fuzz(func(t *testing.T, raw string) {
		c, err := ParseTransferConfig([]byte(raw))
		if err == nil && c.Extra.Validate() != nil {
			t.Errorf("%q gave an invalid configuration", raw)
		}
	})
}
