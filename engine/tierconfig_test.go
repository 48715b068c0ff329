package engine

import (
	"net"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/tier"
)

func TestTierConfigValidate(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		says   string
	}{
		"too small":        {func(c *Config) { c.Tier.Memory = 100 }, "one block"},
		"negative":         {func(c *Config) { c.Tier.Memory = -1 }, "CPU cache of -1"},
		"off, with tiers":  {func(c *Config) { c.Tier.Memory = 0 }, "is off"},
		"off, with files":  {func(c *Config) { c.Tier = TierConfig{FSDir: "x"} }, "is off"},
		"off, with store":  {func(c *Config) { c.Tier = TierConfig{P2PStore: "h:1"} }, "is off"},
		"unknown":          {func(c *Config) { c.Tier.Secondaries = []string{"tape"} }, `"tape" is unknown`},
		"twice":            {func(c *Config) { c.Tier.Secondaries = []string{TierP2P, TierP2P} }, "named twice"},
		"files nowhere":    {func(c *Config) { c.Tier.Secondaries = []string{TierFS} }, "has no folder"},
		"folder for none":  {func(c *Config) { c.Tier.FSDir = "x" }, "not asked for"},
		"negative files":   {func(c *Config) { c.Tier.FSBudget = -1 }, "file tier of -1"},
		"timeout":          {func(c *Config) { c.Tier.Timeout = -1 }, "not positive"},
		"address":          {func(c *Config) { c.Tier.P2PListen = "nowhere" }, "p2p address"},
		"every interface":  {func(c *Config) { c.Tier.P2PListen = "0.0.0.0:0" }, "every interface"},
		"agent everywhere": {func(c *Config) { c.Tier.P2PAgentListen = "0.0.0.0:0" }, "p2p agent address"},
		"store":            {func(c *Config) { c.Tier.P2PStore = "host" }, "store"},
		"store, no peers":  {func(c *Config) { c.Tier.Secondaries, c.Tier.P2PStore = nil, "h:1" }, "is off"},
		"fault":            {func(c *Config) { c.Tier.InjectFault = []tier.Fault{"x"} }, `"x" is unknown`},
		"damaged KV":       {func(c *Config) { c.InjectKVFault, c.NoPrefixCache = []KVFault{ZeroLayer}, true }, "CPU cache to be off"},
		"nice":             {func(c *Config) { c.Nice = 20 }, "nice is 20"},
	} {
		cfg := Config{Model: tiny()}
		withTier(TierP2P)(&cfg)
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		c.change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want one that says %q", name, err, c.says)
		}
	}
}

// What peers are told leads to the listener.
func TestP2PName(t *testing.T) {
	at := &net.TCPAddr{IP: net.IPv4(0, 0, 0, 0), Port: 5710}
	for _, c := range []struct{ listen, advertise, host, want, agent string }{
		{listen: "10.0.0.5:0", want: "10.0.0.5:5710"},
		{listen: "0.0.0.0:0", host: "10.0.0.6", want: "10.0.0.6:5710"},
		{listen: "0.0.0.0:0", host: "10.0.0.6", advertise: "10.0.0.7", want: "10.0.0.7:5710", agent: "10.0.0.7"},
		{listen: "10.0.0.5:0", advertise: "198.51.100.7:99", want: "198.51.100.7:99", agent: "198.51.100.7"},
		{listen: "[::1]:0", want: "[::1]:5710"},
	} {
		cfg := Config{Model: tiny(), AdvertiseHost: c.host, Tier: TierConfig{P2PListen: c.listen, P2PAdvertise: c.advertise}}.withDefaults()
		if got := cfg.p2pName(at); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
		if a := cfg.tierAgent(); a.AgentAdvertise != c.agent {
			t.Errorf("%+v: the agent says %s", c, a.AgentAdvertise)
		}
	}
}

// Facts differ where blocks do, and only there.
func TestTierFacts(t *testing.T) {
	base := Config{Model: tiny()}.TierFacts()
	if again := (Config{Model: model.Tiny(), NumBlocks: 7}).TierFacts(); again != base {
		t.Errorf("%+v and %+v", base, again)
	}
	for name, change := range map[string]func(*Config){
		"name":       func(c *Config) { c.ServedName = "x" },
		"block size": func(c *Config) { c.BlockSize = 8 },
		"layout":     func(c *Config) { c.Layout = model.LBNHC },
		"keys":       func(c *Config) { c.Keys = model.RotatedKeys },
		"seed":       func(c *Config) { c.Tier.HashSeed = "x" },
	} {
		c := Config{Model: tiny()}
		change(&c)
		f := c.TierFacts()
		if f.Files == base.Files || f.Fingerprint == base.Fingerprint && f.HashSeed == base.HashSeed {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func TestTierThatCannotStart(t *testing.T) {
	dir := t.TempDir()
	with := func(c *Config) { withTier(TierP2P, TierFS)(c); c.Tier.FSDir = dir }
	_ = newEngine(t, with)
	cfg := Config{Model: tiny()}
	with(&cfg)
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("two engines in one folder: %v", err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	cfg.Tier.FSDir, cfg.Tier.P2PListen = t.TempDir(), taken.Addr().String()
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "p2p tier") {
		t.Errorf("a port that is taken: %v", err)
	}
}
