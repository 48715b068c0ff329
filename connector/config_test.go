package connector

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseExtraDefaults(t *testing.T) {
	want := Config{Backends: []string{"UCX"}, NumThreads: 4, Lease: 30 * time.Second, DecoderBlocksTTL: 480 * time.Second,
		RegistrationTimeout: 480 * time.Second, EngineTTL: time.Hour, EnforceCompat: true, RecomputeThreshold: 64}
	for _, raw := range []string{"", " null ", "{}"} {
		got, err := ParseExtra([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%q: %s", raw, d)
		}
	}
}

func TestParseExtraEveryKey(t *testing.T) {
	got, err := ParseExtra([]byte(`{"backends": ["UCX", "GDS"], "num_threads": 8, "kv_lease_duration": 60, "decoder_kv_blocks_ttl": 100,
		"push_registration_timeout": 50, "engine_ttl": 0.5, "enforce_handshake_compat": false, "bidirectional_kv_xfer": true,
		"kv_recompute_threshold": 0}`))
	if err != nil {
		t.Fatal(err)
	}
	want := Config{Backends: []string{"UCX", "GDS"}, NumThreads: 8, Lease: 60 * time.Second, DecoderBlocksTTL: 100 * time.Second,
		RegistrationTimeout: 50 * time.Second, EngineTTL: 500 * time.Millisecond, Bidirectional: true}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestRegistrationTimeoutFollowsDecoderTTL(t *testing.T) {
	got, err := ParseExtra([]byte(`{"decoder_kv_blocks_ttl": 100}`))
	if err != nil || got.RegistrationTimeout != 100*time.Second {
		t.Errorf("%v, %v", got.RegistrationTimeout, err)
	}
}

func TestParseExtraRefuses(t *testing.T) {
	for raw, says := range map[string]string{
		`[]`:                                "not a JSON object",
		`{"kv_lease_duraton": 30}`:          "did you mean kv_lease_duration?",
		`{"Backends ": []}`:                 "did you mean backends?",
		`{"num_threads": "4"}`:              `num_threads: is "4", want an integer`,
		`{"num_threads": 0}`:                "num_threads is 0",
		`{"kv_lease_duration": 1.5}`:        "kv_lease_duration: is 1.5, want whole seconds",
		`{"kv_lease_duration": -1}`:         "kv_lease_duration is -1s",
		`{"kv_lease_duration": 1e300}`:      "kv_lease_duration",
		`{"engine_ttl": 1e300}`:             "out of range",
		`{"engine_ttl": null}`:              "want seconds",
		`{"enforce_handshake_compat": 1}`:   "want true or false",
		`{"backends": []}`:                  "backends is empty",
		`{"backends": [""]}`:                "backends[0] is empty",
		`{"kv_recompute_threshold": -1}`:    "kv_recompute_threshold is -1",
		`{"push_registration_timeout": 0}`:  "push_registration_timeout is 0s",
		`{"decoder_kv_blocks_ttl": 900000}`: "decoder_kv_blocks_ttl is 250h0m0s",
	} {
		_, err := ParseExtra([]byte(raw))
		var extra *ExtraError
		if !errors.As(err, &extra) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", raw, err, says)
		}
	}
}

// The reference computes both in whole seconds (nixl-connector.md, section 6.1).
func TestHeartbeatNumbers(t *testing.T) {
	for _, c := range []struct{ lease, interval, extension time.Duration }{
		{30 * time.Second, 5 * time.Second, 20 * time.Second},
		{240 * time.Second, 40 * time.Second, 160 * time.Second},
		{35 * time.Second, 5 * time.Second, 23 * time.Second},
		{6 * time.Second, time.Second, 4 * time.Second},
		{3 * time.Second, 500 * time.Millisecond, 2 * time.Second},
		{600 * time.Millisecond, 100 * time.Millisecond, 400 * time.Millisecond},
	} {
		if i, e := HeartbeatInterval(c.lease), LeaseExtension(c.lease); i != c.interval || e != c.extension {
			t.Errorf("lease %v: interval %v, extension %v; want %v, %v", c.lease, i, e, c.interval, c.extension)
		}
	}
}

func FuzzParseExtra(f *testing.F) {
	f.Add(`{"kv_lease_duration": 30, "backends": ["UCX"]}`)
	f.Add(`{"engine_ttl": -1}`)
	f.Fuzz(func(t *testing.T, raw string) {
		c, err := ParseExtra([]byte(raw))
		if err == nil && c.Validate() != nil {
			t.Errorf("%q gave an invalid configuration", raw)
		}
	})
}
