package wire

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseP2PParams(t *testing.T) {
	full := &P2PRemote{ID: "a", Host: "h", Port: 7777}
	load := 32
	for name, c := range map[string]struct {
		in   string
		want P2PParams
		bad  string // the field that the error names
	}{
		"null":         {in: "null"},
		"empty":        {in: "{}"},
		"decoder":      {in: `{"remote_decoder":{"kv_request_id":"a"}}`, want: P2PParams{Decoder: "a"}},
		"no id":        {in: `{"remote_decoder":{}}`},
		"source":       {in: `{"remote_kv_source":{"kv_request_id":"a","remote_host":"h","remote_port":7777}}`, want: P2PParams{Source: full}},
		"prefiller":    {in: `{"remote_prefiller":{"kv_request_id":"a","remote_host":"h","remote_port":7777},"remote_kv_source":null}`, want: P2PParams{Prefiller: full}},
		"no port":      {in: `{"remote_kv_source":{"kv_request_id":"a","remote_host":"h"}}`},
		"top level":    {in: `{"remote_host":"h","remote_port":1}`},
		"relay":        {in: `{"remote_decoder":{"kv_request_id":"b"},"remote_kv_source":{"kv_request_id":"a","remote_host":"h","remote_port":7777}}`, want: P2PParams{Decoder: "b", Source: full}},
		"id a number":  {in: `{"remote_decoder":{"kv_request_id":5}}`, bad: "remote_decoder.kv_request_id"},
		"port 0":       {in: `{"remote_kv_source":{"remote_port":0}}`, bad: "remote_kv_source.remote_port"},
		"port a text":  {in: `{"remote_prefiller":{"remote_port":"1"}}`, bad: "remote_prefiller.remote_port"},
		"bounds":       {in: `{"max_offload_tokens":0,"max_load_tokens":32}`, want: P2PParams{MaxOffload: new(int), MaxLoad: &load}},
		"no bounds":    {in: `{"max_offload_tokens":null}`},
		"bound a text": {in: `{"max_load_tokens":"32"}`, bad: "max_load_tokens"},
		"negative":     {in: `{"max_offload_tokens":-1}`, bad: "max_offload_tokens"},
		"a fraction":   {in: `{"max_load_tokens":1.5}`, bad: "max_load_tokens"},
		"tiers": {in: `{"kv_load_tiers":[{"medium":"STORAGE","locality":"LOCAL"},{"medium":"TAPE"},{}]}`,
			want: P2PParams{LoadTiers: []TierMatch{{"STORAGE", "LOCAL"}}}},
		"no tier":       {in: `{"kv_load_tiers":[]}`, want: P2PParams{LoadTiers: []TierMatch{}}},
		"unknown tiers": {in: `{"kv_load_tiers":[{"medium":"TAPE"}]}`},
		"tiers a map":   {in: `{"kv_load_tiers":{}}`, bad: "kv_load_tiers"},
		"tier a text":   {in: `{"kv_load_tiers":["CPU"]}`, bad: "kv_load_tiers[0]"},
		"medium a list": {in: `{"kv_load_tiers":[{},{"medium":[]}]}`, bad: "kv_load_tiers[1].medium"},
		"many tiers":    {in: `{"kv_load_tiers":[` + strings.Repeat("{},", MaxTierMatches) + `{}]}`, bad: "kv_load_tiers"},
		"not a map":     {in: `{"remote_prefiller":[]}`, bad: "remote_prefiller"},
		"not JSON":      {in: `{`, bad: "kv_transfer_params"},
		"not a object":  {in: `[]`, bad: "kv_transfer_params"},
	} {
		got, err := ParseP2PParams([]byte(c.in))
		var pe *ParamError
		switch {
		case c.bad != "" && (!errors.As(err, &pe) || pe.Field != c.bad):
			t.Errorf("%s: %v, want an error about %s", name, err, c.bad)
		case c.bad == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

func FuzzP2PParams(f *testing.F) {
	f.Add([]byte(`{"remote_decoder":{"kv_request_id":"a"},"remote_kv_source":{"kv_request_id":"a","remote_host":"h","remote_port":1}}`))
	f.Add([]byte(`{"max_offload_tokens":1,"kv_load_tiers":[{"medium":"CPU","locality":"REMOTE"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParseP2PParams(b)
		for _, r := range []*P2PRemote{p.Prefiller, p.Source} {
			if r != nil && (err != nil || r.ID == "" || r.Host == "" || r.Port < 1) {
				t.Fatalf("%q gives %+v, %v", b, r, err)
			}
		}
	})
}
