package connector

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// ExtraError says which key of vLLM's kv_transfer_config or its kv_connector_extra_config cannot be
// used, and why.
type ExtraError struct {
	Object string // what holds the key; "" means kv_connector_extra_config
	Key    string // "" for the object as a whole
	Reason string
}

func (e *ExtraError) Error() string {
	object := e.Object
	if object == "" {
		object = extraObject
	}
	if e.Key == "" {
		return object + ": " + e.Reason
	}
	return object + "." + e.Key + ": " + e.Reason
}

// extraObject is where the connector's own keys are, as vLLM names it.
const extraObject = "kv_connector_extra_config"

// ExtraKey describes a key of kv_connector_extra_config.
type ExtraKey struct {
	Name    string
	Default string // as JSON
	Unit    string
	Meaning string
}

type extraKey struct {
	ExtraKey
	set func(c *Config, raw json.RawMessage) error
}

// extraKeys is every key and how it is read, in the order of nixl-connector.md section 9.
var extraKeys = []extraKey{
	{ExtraKey{"backends", `["UCX"]`, "names", "NIXL plugins to load, first wish first"},
		func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.Backends, "a list of names") }},
	{ExtraKey{"num_threads", "4", "threads", "threads of NIXL's UCX plugin"},
		func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.NumThreads, "an integer") }},
	{ExtraKey{"kv_lease_duration", "30", "whole seconds", "how long a prefill engine keeps blocks for a silent decode engine; a sixth of it is the heartbeat interval"},
		func(c *Config, raw json.RawMessage) error { return wholeSeconds(raw, &c.Lease) }},
	{ExtraKey{"decoder_kv_blocks_ttl", "480", "whole seconds", "how long a decode engine keeps blocks for a second turn"},
		func(c *Config, raw json.RawMessage) error { return wholeSeconds(raw, &c.DecoderBlocksTTL) }},
	{ExtraKey{"push_registration_timeout", "that of `decoder_kv_blocks_ttl`", "whole seconds", "how long a decode engine waits for a silent prefill engine"},
		func(c *Config, raw json.RawMessage) error { return wholeSeconds(raw, &c.RegistrationTimeout) }},
	{ExtraKey{"engine_ttl", "3600.0", "seconds", "after how long without use a peer is forgotten; 0 or less: never"},
		func(c *Config, raw json.RawMessage) error { return seconds(raw, &c.EngineTTL) }},
	{ExtraKey{"enforce_handshake_compat", "true", "", "refuse peers whose compatibility hash differs"},
		func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.EnforceCompat, "true or false") }},
	{ExtraKey{"bidirectional_kv_xfer", "false", "", "a decode engine gives blocks back for a second turn (pull only)"},
		func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.Bidirectional, "true or false") }},
	{ExtraKey{"kv_recompute_threshold", "64", "tokens", "below so many a prefill engine recomputes instead of reading back; 0: it always reads"},
		func(c *Config, raw json.RawMessage) error {
			return decodeExtra(raw, &c.RecomputeThreshold, "an integer")
		}},
}

// ExtraKeys describes every key that ParseExtra knows, for documents.
func ExtraKeys() []ExtraKey {
	out := make([]ExtraKey, len(extraKeys))
	for i, k := range extraKeys {
		out[i] = k.ExtraKey
	}
	return out
}

func extraNames() []string {
	var names []string
	for _, k := range extraKeys {
		names = append(names, k.Name)
	}
	return names
}

// ParseExtra reads vLLM's kv_connector_extra_config, a JSON object (nixl-connector.md, section 9).
// Absent keys take their defaults; push_registration_timeout follows decoder_kv_blocks_ttl. A null
// or empty input is the default configuration. The reference connector ignores what it does not
// know and checks no value; this refuses both, an unknown key with the nearest known one. Typed
// error: *ExtraError.
func ParseExtra(raw []byte) (Config, error) {
	c := DefaultConfig()
	given, err := jsonObject(extraObject, raw, extraNames())
	if err != nil {
		return Config{}, err
	}
	for _, k := range extraKeys {
		value, ok := given[k.Name]
		if !ok {
			continue
		}
		if err := k.set(&c, value); err != nil {
			return Config{}, &ExtraError{Key: k.Name, Reason: err.Error()}
		}
	}
	if _, ok := given["push_registration_timeout"]; !ok {
		c.RegistrationTimeout = c.DecoderBlocksTTL
	}
	if err := c.Validate(); err != nil {
		return Config{}, &ExtraError{Reason: err.Error()}
	}
	return c, nil
}

// jsonObject reads an object of which every key must be known. Null and nothing are an empty one.
func jsonObject(object string, raw []byte, known []string) (map[string]json.RawMessage, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if len(raw) > maxExtra {
		return nil, &ExtraError{Object: object, Reason: fmt.Sprintf("has %d bytes, more than %d", len(raw), maxExtra)}
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal(raw, &given); err != nil {
		return nil, &ExtraError{Object: object, Reason: "is not a JSON object: " + err.Error()}
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if !slices.Contains(known, name) {
			return nil, &ExtraError{object, shortName(name), fmt.Sprintf("is not known; did you mean %s?", nearest(name, known))}
		}
	}
	return given, nil
}

func decodeExtra(raw json.RawMessage, dst any, want string) error {
	if string(raw) == "null" || json.Unmarshal(raw, dst) != nil {
		return fmt.Errorf("is %s, want %s", shortJSON(raw), want)
	}
	return nil
}

// wholeSeconds reads a duration that the reference connector computes with as an integer.
func wholeSeconds(raw json.RawMessage, dst *time.Duration) error {
	var n int64
	if err := decodeExtra(raw, &n, "whole seconds"); err != nil {
		return err
	}
	return setSeconds(float64(n), dst)
}

func seconds(raw json.RawMessage, dst *time.Duration) error {
	var s float64
	if err := decodeExtra(raw, &s, "seconds"); err != nil {
		return err
	}
	return setSeconds(s, dst)
}

func setSeconds(s float64, dst *time.Duration) error {
	if most := float64(math.MaxInt64 / int64(time.Second)); s > most || s < -most {
		return fmt.Errorf("is %g seconds, which is out of range", s)
	}
	*dst = time.Duration(s * float64(time.Second))
	return nil
}

// nearest is the known key with the fewest edits to name; one that begins with it is one edit away.
func nearest(name string, known []string) string {
	best, least := "", math.MaxInt
	for _, k := range known {
		d := editDistance(strings.ToLower(name), k)
		if name != "" && strings.HasPrefix(k, strings.ToLower(name)) {
			d = min(d, 1)
		}
		if d < least {
			best, least = k, d
		}
	}
	return best
}

// editDistance counts insertions, deletions and replacements of bytes.
func editDistance(a, b string) int {
	if len(a) > maxKeyCompared {
		a = a[:maxKeyCompared]
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		left := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := left
			if a[i] != b[j] {
				replace++
			}
			left = row[j+1]
			row[j+1] = min(replace, left+1, row[j]+1)
		}
	}
	return row[len(b)]
}

func shortJSON(raw json.RawMessage) string { return shortName(string(raw)) }

func shortName(s string) string {
	const most = 40
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
