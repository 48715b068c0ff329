package engine

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
)

func TestConfigDefaults(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Fatal(err)
	}
	a, b := Config{}.withDefaults(), Config{}.withDefaults()
	if a.EngineID == b.EngineID {
		t.Error("two engines have one id")
	}
	uuid4 := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	if !uuid4.MatchString(string(a.EngineID)) {
		t.Errorf("engine id %q is no UUID of version 4", a.EngineID)
	}
	if a.Role != connector.Both || a.ServedName != a.Model.Config().Name {
		t.Errorf("role %q, name %q", a.Role, a.ServedName)
	}
}

func TestConfigValidate(t *testing.T) {
	for want, spoil := range map[string]func(*Config){
		`role "x"`:          func(c *Config) { c.Role = "x" },
		"block size":        func(c *Config) { c.BlockSize = -1 },
		"number of blocks":  func(c *Config) { c.NumBlocks = -1 },
		"batch tokens":      func(c *Config) { c.MaxBatchTokens = 1 << 20 },
		"fewer than":        func(c *Config) { c.MaxBatchTokens = 2; c.MaxRunning = 3 },
		"running requests":  func(c *Config) { c.MaxRunning = -1 },
		"queue length":      func(c *Config) { c.MaxQueue = -1 },
		"threads":           func(c *Config) { c.Threads = -1 },
		"more than":         func(c *Config) { c.NumBlocks = 1 << 30 },
		"Layout(7)":         func(c *Config) { c.Layout = 7 },
		"Keys(9)":           func(c *Config) { c.Keys = 9 },
		"needs plain keys":  func(c *Config) { c.Keys, c.NoPrefixCache, c.InjectKVFault = model.RotatedKeys, true, KVFaults },
		"lease":             func(c *Config) { c.Lease = time.Millisecond },
		"timeout":           func(c *Config) { c.RegistrationTimeout = -1 },
		"transfer silence":  func(c *Config) { c.TransferSilence = time.Millisecond },
		"park timeout":      func(c *Config) { c.ParkTimeout = time.Millisecond },
		`policy "retry"`:    func(c *Config) { c.LoadFailurePolicy = "retry" },
		"side channel addr": func(c *Config) { c.SideChannel = "here" },
		"every interface":   func(c *Config) { c.SideChannel = "0.0.0.0:0" },
		"agent address 0":   func(c *Config) { c.AgentListen = "0.0.0.0:0" },
		"agent address":     func(c *Config) { c.AgentListen = "there" },
		`transport "rdma"`:  func(c *Config) { c.Transport = "rdma" },
		`fault "x"`:         func(c *Config) { c.InjectKVFault = []KVFault{"x"}; c.NoPrefixCache = true },
		"prefix cache":      func(c *Config) { c.InjectKVFault = KVFaults },
		"connector version": func(c *Config) { c.ConnectorVersion = 11 },
	} {
		c := Config{Model: tiny()}
		spoil(&c)
		err := c.Validate()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
		if _, err := New(c); err == nil {
			t.Errorf("%s: made an engine", want)
		}
	}
	c := Config{Model: tiny(), BlockSize: -1, NumBlocks: -1}
	if err := c.Validate(); err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("not everything is reported: %v", err)
	}
}
