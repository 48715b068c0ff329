package main

import (
	"strconv"

	"github.com/kvferry/kvferry/connector"
)

// jsonType is the type of a flag whose value is a JSON object; in a file it may be a mapping.
const jsonType = "json"

// stockSetting is a key of vLLM's kv_transfer_config and the setting that it gives.
type stockSetting struct {
	key   string // as connector.TransferConfig.Given has it
	flag  string
	value func(c *connector.TransferConfig) string
}

const extraPrefix = "kv_connector_extra_config."

var stockSettings = []stockSetting{
	{"kv_connector", "mode", func(c *connector.TransferConfig) string { return string(c.Mode) }},
	{"kv_role", "role", func(c *connector.TransferConfig) string { return string(c.Role) }},
	{"engine_id", "engine-id", func(c *connector.TransferConfig) string { return string(c.EngineID) }},
	{"kv_load_failure_policy", "kv-load-failure-policy", func(c *connector.TransferConfig) string { return string(c.LoadFailurePolicy) }},
	{extraPrefix + "kv_lease_duration", "lease", func(c *connector.TransferConfig) string { return c.Extra.Lease.String() }},
	{extraPrefix + "decoder_kv_blocks_ttl", "decoder-kv-blocks-ttl", func(c *connector.TransferConfig) string { return c.Extra.DecoderBlocksTTL.String() }},
	{extraPrefix + "push_registration_timeout", "registration-timeout", func(c *connector.TransferConfig) string { return c.Extra.RegistrationTimeout.String() }},
	// A registration timeout that is not given follows the time to live.
	{extraPrefix + "decoder_kv_blocks_ttl", "registration-timeout", func(c *connector.TransferConfig) string { return c.Extra.RegistrationTimeout.String() }},
	{extraPrefix + "engine_ttl", "engine-ttl", func(c *connector.TransferConfig) string { return max(c.Extra.EngineTTL, 0).String() }},
	{extraPrefix + "enforce_handshake_compat", "enforce-handshake-compat", func(c *connector.TransferConfig) string { return strconv.FormatBool(c.Extra.EnforceCompat) }},
	{extraPrefix + "bidirectional_kv_xfer", "bidirectional-kv-xfer", func(c *connector.TransferConfig) string { return strconv.FormatBool(c.Extra.Bidirectional) }},
	{extraPrefix + "kv_recompute_threshold", "kv-recompute-threshold", func(c *connector.TransferConfig) string { return strconv.Itoa(c.Extra.RecomputeThreshold) }},
}

// transferConfig is the flag --kv-transfer-config.
type transferConfig struct {
	raw    string
	parsed connector.TransferConfig
}

func (t *transferConfig) String() string { return t.raw }
func (t *transferConfig) Type() string   { return jsonType }

func (t *transferConfig) Set(s string) (err error) {
	t.raw = s
	t.parsed, err = connector.ParseTransferConfig([]byte(s))
	return err
}

// settings makes it an expander.
func (t *transferConfig) settings() []setting {
	var out []setting
	unsaid := connector.TransferConfig{Extra: connector.DefaultConfig()}
	for _, s := range stockSettings {
		if v := s.value(&t.parsed); t.parsed.Has(s.key) {
			out = append(out, setting{flag: s.flag, values: []string{v}, from: s.key, idle: v == s.value(&unsaid), stock: true})
		}
	}
	return out
}

// ineffective are the given keys that do nothing here although a stock connector reads them.
func (t *transferConfig) ineffective() []string {
	var out []string
	for _, key := range []string{extraPrefix + "backends", extraPrefix + "num_threads"} {
		if t.parsed.Has(key) {
			out = append(out, key)
		}
	}
	return out
}
