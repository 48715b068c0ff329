package connector

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"
)

// ExtraError says which key of vLLM's kv_connector_extra_config cannot be used, and why.
type ExtraError struct {
	Key    string // "" for the object as a whole
	Reason string
}

func (e *ExtraError) Error() string {
	if e.Key == "" {
		return "kv_connector_extra_config: " + e.Reason
	}
	return "kv_connector_extra_config." + e.Key + ": " + e.Reason
}

// extraKeys is every key and how it is read, in the order of nixl-connector.md section 9.
var extraKeys = []struct {
	name string
	set  func(c *Config, raw json.RawMessage) error
}{
	{"backends", func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.Backends, "a list of names") }},
	{"num_threads", func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.NumThreads, "an integer") }},
	{"kv_lease_duration", func(c *Config, raw json.RawMessage) error { return wholeSeconds(raw, &c.Lease) }},
	{"decoder_kv_blocks_ttl", func(c *Config, raw json.RawMessage) error { return wholeSeconds(raw, &c.DecoderBlocksTTL) }},
	{"push_registration_timeout", func(c *Config, raw json.RawMessage) error { return wholeSeconds(raw, &c.RegistrationTimeout) }},
	{"engine_ttl", func(c *Config, raw json.RawMessage) error { return seconds(raw, &c.EngineTTL) }},
	{"enforce_handshake_compat", func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.EnforceCompat, "true or false") }},
	{"bidirectional_kv_xfer", func(c *Config, raw json.RawMessage) error { return decodeExtra(raw, &c.Bidirectional, "true or false") }},
	{"kv_recompute_threshold", func(c *Config, raw json.RawMessage) error {
		return decodeExtra(raw, &c.RecomputeThreshold, "an integer")
	}},
}

// ParseExtra reads vLLM's kv_connector_extra_config, a JSON object (nixl-connector.md, section 9).
// Absent keys take their defaults; push_registration_timeout follows decoder_kv_blocks_ttl. A null
// or empty input is the default configuration. The reference connector ignores what it does not
// know and checks no value; this refuses both, an unknown key with the nearest known one. Typed
// error: *ExtraError.
func ParseExtra(raw []byte) (Config, error) {
	c := DefaultConfig()
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return c, nil
	}
	if len(raw) > maxExtra {
		return Config{}, &ExtraError{Reason: fmt.Sprintf("has %d bytes, more than %d", len(raw), maxExtra)}
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal(raw, &given); err != nil {
		return Config{}, &ExtraError{Reason: "is not a JSON object: " + err.Error()}
	}
	for name := range given {
		if !knownExtra(name) {
			return Config{}, &ExtraError{name, fmt.Sprintf("is not known; did you mean %s?", nearestExtra(name))}
		}
	}
	for _, k := range extraKeys {
		value, ok := given[k.name]
		if !ok {
			continue
		}
		if err := k.set(&c, value); err != nil {
			return Config{}, &ExtraError{k.name, err.Error()}
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

func knownExtra(name string) bool {
	for _, k := range extraKeys {
		if k.name == name {
			return true
		}
	}
	return false
}

// nearestExtra is the known key with the fewest edits to name.
func nearestExtra(name string) string {
	best, least := "", math.MaxInt
	for _, k := range extraKeys {
		if d := editDistance(strings.ToLower(name), k.name); d < least {
			best, least = k.name, d
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

func shortJSON(raw json.RawMessage) string {
	const most = 40
	if len(raw) > most {
		return strings.ToValidUTF8(string(raw[:most]), "") + "…"
	}
	return string(raw)
}
