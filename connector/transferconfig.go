package connector

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/kv"
)

// TransferConfig is what vLLM's kv_transfer_config says. What is not in Given has its default.
type TransferConfig struct {
	// Mode is that of kv_connector: kv.Pull for NixlConnector and NixlPullConnector, kv.Push for
	// NixlPushConnector. Empty unless given.
	Mode kv.TransferMode
	// Role is kv_role's: kv_producer is Producer, kv_consumer Consumer, kv_both Both. Empty unless
	// given.
	Role Role
	// EngineID is empty unless given; then the engine chooses a random one.
	EngineID kv.EngineID
	// LoadFailurePolicy is empty unless given.
	LoadFailurePolicy kv.LoadFailurePolicy
	// Extra is kv_connector_extra_config.
	Extra Config
	// Given are the keys that were there, sorted, those of kv_connector_extra_config with that name
	// and a dot before them.
	Given []string
}

// Has tells whether a key was there, in the form of Given.
func (c *TransferConfig) Has(key string) bool { return slices.Contains(c.Given, key) }

// TransferKey describes a key of kv_transfer_config.
type TransferKey struct {
	Name    string
	Default string
	Meaning string
}

const transferObject = "kv_transfer_config"

type transferKey struct {
	TransferKey
	set func(c *TransferConfig, raw json.RawMessage) error
}

// transferKeys is every key of vLLM's KVTransferConfig that an operator may have written
// (nixl-connector.md, section 9).
var transferKeys = []transferKey{
	{TransferKey{"kv_connector", "", "`NixlPushConnector` is push mode, `NixlPullConnector` and `NixlConnector` are pull mode; others are refused"}, setConnector},
	{TransferKey{"kv_role", "`kv_both`", "`kv_producer` is a prefill engine, `kv_consumer` a decode engine, `kv_both` either"}, setRole},
	{TransferKey{"engine_id", "random", "what peers know the engine by"}, setEngineID},
	{TransferKey{"kv_load_failure_policy", "`fail`", "what becomes of a request whose KV does not come: `fail` or `recompute`"}, setPolicy},
	{TransferKey{extraObject, "`{}`", "the connector's own keys, see below"}, func(c *TransferConfig, raw json.RawMessage) (err error) {
		c.Extra, err = ParseExtra(raw)
		return err
	}},
	{TransferKey{"kv_buffer_device", "`cpu`", "only `cpu`: KV is in the memory of the host"}, setBufferDevice},
	{TransferKey{"enable_permute_local_kv", "`false`", "only `false`: an engine's layout is that of its cache"}, setPermute},
	{TransferKey{"kv_connector_module_path", "null", "only null: no connector is loaded from elsewhere"}, setModulePath},
	{TransferKey{"kv_rank", "", "no effect: connectors that build rings of ranks read it, NIXL's do not"}, setNothing},
	{TransferKey{"kv_parallel_size", "", "no effect, as `kv_rank`"}, setNothing},
	{TransferKey{"kv_ip", "", "no effect: the side channel has its own address"}, setNothing},
	{TransferKey{"kv_port", "", "no effect, as `kv_ip`"}, setNothing},
	{TransferKey{"kv_buffer_size", "", "no effect: blocks go from cache to cache without a buffer between"}, setNothing},
}

// TransferKeys describes every key that ParseTransferConfig knows, for documents.
func TransferKeys() []TransferKey {
	out := make([]TransferKey, len(transferKeys))
	for i, k := range transferKeys {
		out[i] = k.TransferKey
	}
	return out
}

// ParseTransferConfig reads vLLM's kv_transfer_config, a JSON object, with its
// kv_connector_extra_config. Unknown keys are refused with the nearest known one, and so are values
// that this connector cannot honour; keys that the NIXL connectors do not read either have no
// effect. Null or nothing is a configuration with nothing given. Typed error: *ExtraError.
func ParseTransferConfig(raw []byte) (TransferConfig, error) {
	c := TransferConfig{Extra: DefaultConfig()}
	var names []string
	for _, k := range transferKeys {
		names = append(names, k.Name)
	}
	given, err := jsonObject(transferObject, raw, names)
	if err != nil {
		return TransferConfig{}, err
	}
	for _, k := range transferKeys {
		value, ok := given[k.Name]
		if !ok {
			continue
		}
		if err := k.set(&c, value); err != nil {
			if inner := (*ExtraError)(nil); errors.As(err, &inner) {
				return TransferConfig{}, inner
			}
			return TransferConfig{}, &ExtraError{transferObject, k.Name, err.Error()}
		}
		c.Given = append(c.Given, k.Name)
	}
	var extra map[string]json.RawMessage
	if value, ok := given[extraObject]; ok {
		_ = json.Unmarshal(value, &extra) // ParseExtra has read it
	}
	for name := range extra {
		c.Given = append(c.Given, extraObject+"."+name)
	}
	slices.Sort(c.Given)
	return c, nil
}

// oneOf reads a text that must be a key of values.
func oneOf[T any](raw json.RawMessage, dst *T, values map[string]T) error {
	var s string
	err := json.Unmarshal(raw, &s)
	v, ok := values[s]
	if err != nil || !ok {
		return fmt.Errorf("is %s, want %s", shortJSON(raw), strings.Join(slices.Sorted(maps.Keys(values)), " or "))
	}
	*dst = v
	return nil
}

func setConnector(c *TransferConfig, raw json.RawMessage) error {
	return oneOf(raw, &c.Mode, map[string]kv.TransferMode{"NixlConnector": kv.Pull, "NixlPullConnector": kv.Pull, "NixlPushConnector": kv.Push})
}

func setRole(c *TransferConfig, raw json.RawMessage) error {
	return oneOf(raw, &c.Role, map[string]Role{"kv_producer": Producer, "kv_consumer": Consumer, "kv_both": Both})
}

func setEngineID(c *TransferConfig, raw json.RawMessage) error {
	if string(raw) == "null" {
		return nil
	}
	return decodeExtra(raw, &c.EngineID, "a text")
}

func setPolicy(c *TransferConfig, raw json.RawMessage) error {
	return oneOf(raw, &c.LoadFailurePolicy, map[string]kv.LoadFailurePolicy{
		string(kv.FailOnLoadFailure): kv.FailOnLoadFailure, string(kv.RecomputeOnLoadFailure): kv.RecomputeOnLoadFailure})
}

func setBufferDevice(_ *TransferConfig, raw json.RawMessage) error {
	var device string
	if string(raw) == "null" {
		return nil
	}
	if err := oneOf(raw, &device, map[string]string{"cpu": "cpu"}); err != nil {
		return fmt.Errorf("%w: KV is in the memory of the host here", err)
	}
	return nil
}

func setPermute(_ *TransferConfig, raw json.RawMessage) error {
	var on bool
	if err := decodeExtra(raw, &on, "true or false"); err != nil {
		return err
	}
	if on {
		return fmt.Errorf("is true, want false: choose the layout of the cache itself instead")
	}
	return nil
}

func setModulePath(_ *TransferConfig, raw json.RawMessage) error {
	if string(raw) != "null" {
		return fmt.Errorf("is %s, want null: no connector is loaded from elsewhere", shortJSON(raw))
	}
	return nil
}

func setNothing(*TransferConfig, json.RawMessage) error { return nil }
