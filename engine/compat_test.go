package engine

import (
	"strings"
	"testing"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// With the check of the compatibility hash off, engines that differ in what the hash covers hand over, if
// what they exchange is alike all the same; those of unlike modes or forms of keys never do, and say so in
// bounded time.
func TestAnyCompat(t *testing.T) {
	for name, c := range map[string]struct {
		p    func(*Config)
		says string
	}{
		"other vLLM version": {p: func(c *Config) { c.VLLMVersion = "0.31.0" }},
		"other name":         {p: func(c *Config) { c.ServedName = "x" }},
		"other version":      {p: func(c *Config) { c.ConnectorVersion = 13 }},
		"P pulls":            {p: func(c *Config) { c.Mode = kv.Pull }, says: "has not acknowledged it"},
		"other keys":         {p: func(c *Config) { c.Keys = model.RotatedKeys }, says: "start both with the same --keys"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			with := func(role connector.Role, change func(*Config)) *Engine {
				return newEngine(t, func(c *Config) {
					c.Role, c.AnyCompat, c.Lease, c.RegistrationTimeout = role, true, shortLease, 2*shortLease
					if change != nil {
						change(c)
					}
				})
			}
			x := pair{p: with(connector.Producer, c.p), d: with(connector.Consumer, nil)}
			prefill, decode := x.legs("r", prompt(40, 3), 3)
			s := submit1(t, x.p, prefill)
			a := generate(t, x.d, decode)
			read(t, s)
			if c.says == "" {
				checkAnswer(t, name, a, expect(t, prompt(40, 3), 3, model.Sampling{}))
			} else if a.Err == nil || len(a.Tokens) != 0 || !strings.Contains(a.Err.Error(), c.says) {
				t.Errorf("%+v\nwant %q", a.Output, c.says)
			}
			settle(t, x.p)
		})
	}
}

// With the check on, engines that differ in one setting are told which.
func TestNearHashes(t *testing.T) {
	for says, change := range map[string]func(*Config){
		"start both with the same --keys":               func(c *Config) { c.Keys = model.RotatedKeys },
		"start this engine with --connector-version 13": func(c *Config) { c.ConnectorVersion = 13 },
	} {
		x := newPair(t, func(c *Config) {
			c.Lease = shortLease
			if c.Role == connector.Producer {
				change(c)
			}
		})
		a := handOffAt(t, x, "r", prompt(20, 1), func(*kv.TransferParams) {})
		if a.Err == nil || !strings.Contains(a.Err.Error(), says) {
			t.Errorf("%+v, want %q", a.Output, says)
		}
		settle(t, x.p)
	}
}
