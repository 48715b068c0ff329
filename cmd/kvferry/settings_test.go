package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
)

// engineSettings reads an engine's settings from arguments, an environment and a file.
func engineSettings(t *testing.T, args, environ []string, file string) (*engineFlags, error) {
	t.Helper()
	var f engineFlags
	fs := pflag.NewFlagSet("engine", pflag.ContinueOnError)
	f.add(fs)
	fs.String(configFlag, "", "")
	if file != "" {
		path := filepath.Join(t.TempDir(), "engine.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", path)
	}
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return &f, readSettings(fs, environ, allSettings(newRoot()))
}

func TestPrecedence(t *testing.T) {
	const file = "lease: 10s\nblocks: 100\nblock_size: 8\nlisten: 127.0.0.1:1\nkv_transfer_config:\n  kv_role: kv_producer\n  engine_id: json\n  kv_connector_extra_config: {kv_lease_duration: 9, engine_ttl: 0}\n"
	f, err := engineSettings(t,
		[]string{"--lease", "30s", "--prefix-cache=false"}, // 30 s is the default, but said
		[]string{"KVFERRY_LEASE=20s", "KVFERRY_BLOCKS=200", "KVFERRY_PREFIX_CACHE=true", "KVFERRY_MAX_QUEUE=", "VLLM_NIXL_SIDE_CHANNEL_PORT=5601"},
		file)
	if err != nil {
		t.Fatal(err)
	}
	if f.cfg.Lease != 30*time.Second || f.cfg.NumBlocks != 200 || f.cfg.BlockSize != 8 || f.prefixCache || f.listen != "127.0.0.1:1" ||
		f.cfg.MaxQueue != 256 || f.role != string(connector.Producer) || f.engineID != "json" || f.cfg.SideChannel != "127.0.0.1:5601" || f.engineTTL != 0 {
		t.Errorf("%+v", f)
	}
	cfg, err := f.settings()
	if err != nil || cfg.EngineTTL != engine.Forever {
		t.Errorf("engine ttl %v, %v", cfg.EngineTTL, err)
	}
}

// A layer's own names come before its stock ones, and a layer before those below it whatever the name.
func TestStockNamesKeepTheirPlace(t *testing.T) {
	f, err := engineSettings(t, []string{"--kv-transfer-config", `{"kv_connector":"NixlPullConnector","engine_id":"of the flag"}`},
		[]string{"KVFERRY_ENGINE_ID=of the environment", "KVFERRY_SIDE_CHANNEL=127.0.0.1:1", "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.5", "KVFERRY_MODE=push"},
		"engine_id: of the file\n")
	if err != nil || f.engineID != "of the flag" || f.mode != string(kv.Pull) || f.cfg.SideChannel != "127.0.0.1:1" {
		t.Errorf("id %q, mode %s, side channel %s, %v", f.engineID, f.mode, f.cfg.SideChannel, err)
	}
	f, err = engineSettings(t, []string{"--engine-id", "x", "--kv-transfer-config", `{"engine_id":"y"}`}, nil, "")
	if err != nil || f.engineID != "x" {
		t.Errorf("id %q, %v", f.engineID, err)
	}
}

func TestStockEnvironment(t *testing.T) {
	for _, c := range []struct {
		env  []string
		side string
		ids  bool
	}{
		{nil, "127.0.0.1:0", true},
		{[]string{"VLLM_P2P_SIDE_CHANNEL_HOST=10.0.0.5"}, "127.0.0.1:0", true},
		{[]string{"VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.5"}, "10.0.0.5:5600", true},
		{[]string{"VLLM_NIXL_SIDE_CHANNEL_HOST=::1", "VLLM_NIXL_SIDE_CHANNEL_PORT=7"}, "[::1]:7", true},
		{[]string{"VLLM_NIXL_SIDE_CHANNEL_HOST=[fd00::5]"}, "[fd00::5]:5600", true},
		{[]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT=7", "UCX_RCACHE_MAX_UNRELEASED=x"}, "127.0.0.1:0", false},
		{[]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=0"}, "127.0.0.1:0", true},
	} {
		f, err := engineSettings(t, nil, c.env, "")
		if err != nil || f.cfg.SideChannel != c.side || f.randomIDs != c.ids || f.cfg.Lease != 30*time.Second {
			t.Errorf("%v: %s, %v, lease %v, %v", c.env, f.cfg.SideChannel, f.randomIDs, f.cfg.Lease, err)
		}
	}
}

func TestLists(t *testing.T) {
	f, err := engineSettings(t, nil, []string{"KVFERRY_ADAPTER=a  b"}, "inject_kv_fault: [zero-head, \"zero-layer\"]\n")
	if err != nil || !slices.Equal(f.cfg.Adapters, []string{"a", "b"}) || !slices.Equal(f.kvFaults, []string{"zero-head", "zero-layer"}) {
		t.Errorf("%v, %v, %v", f.cfg.Adapters, f.kvFaults, err)
	}
	root := newRoot()
	router, _, err := root.Find([]string{"router"})
	if err != nil {
		t.Fatal(err)
	}
	fs := router.Flags()
	settings, err := parseSettings(fs, "r.yaml", []byte("prefill:\n  - h:1,engine-id=a,side-channel=h:2\n  - h:3\ndecode: h:4\n"))
	if err != nil {
		t.Fatal(err)
	}
	if err := apply(fs, settings); err != nil {
		t.Fatal(err)
	}
	prefill, _ := fs.GetStringArray("prefill")
	decode, _ := fs.GetStringArray("decode")
	if !slices.Equal(prefill, []string{"h:1,engine-id=a,side-channel=h:2", "h:3"}) || !slices.Equal(decode, []string{"h:4"}) {
		t.Errorf("prefill %q, decode %q", prefill, decode)
	}
}

// Every refusal names where the value stands, the key, and what it should be.
func TestSettingsRefused(t *testing.T) {
	for file, says := range map[string][]string{
		"blocks: 5\nblock-size: 8\n":            {"engine.yaml:2: block-size: is not known; did you mean block_size?"},
		"leese: 3s":                             {"engine.yaml:1: leese: is not known; did you mean lease?"},
		"config: x":                             {"engine.yaml:1: config: is not known"},
		"help: true":                            {"engine.yaml:1: help: is not known"},
		"\n\nlease: 30":                         {`engine.yaml:3: lease: is the number "30", want a time with its unit, such as 30s`},
		"lease: soon":                           {`engine.yaml:1: lease: is "soon", want a time with its unit`},
		"blocks: many":                          {`engine.yaml:1: blocks: is "many", want a whole number`},
		"blocks: 1.5":                           {`engine.yaml:1: blocks: is the number "1.5", want a whole number`},
		"blocks: \"5\"":                         {`engine.yaml:1: blocks: is "5", want a whole number`},
		"blocks: 99999999999999999999":          {"engine.yaml:1: blocks:"},
		"blocks:":                               {"engine.yaml:1: blocks: is nothing, want a whole number"},
		"blocks: [1]":                           {"engine.yaml:1: blocks: is a list, want a whole number"},
		"prefix_cache: yes":                     {`engine.yaml:1: prefix_cache: is "yes", want true or false`},
		"engine_id: 7":                          {`engine.yaml:1: engine_id: is the number "7", want a text`},
		"engine_id: {a: b}":                     {"engine.yaml:1: engine_id: is a mapping, want a text"},
		"adapter: [a,\n 2]":                     {`engine.yaml:1: adapter: has the number "2" in line 2, want a list of texts`},
		"lease: 1s\nlease: 2s":                  {"engine.yaml:2: lease: is said twice, in line 1 before"},
		"- lease":                               {"engine.yaml:1: is no mapping"},
		"lease: 1s\n---\nlease: 2s":             {"more than one document"},
		"lease: [":                              {"engine.yaml: yaml:"},
		"? [a]\n: b":                            {"engine.yaml:1: a key is no text"},
		"kv_transfer_config: {kv_rol: kv_both}": {"engine.yaml:1: kv_transfer_config:", "kv_rol: is not known; did you mean kv_role?"},
		"kv_transfer_config: {kv_role: producer}":                                   {`kv_role: is "producer", want kv_both or kv_consumer or kv_producer`},
		"kv_transfer_config: {kv_connector_extra_config: {kv_lease_duratio: 3}}":    {"kv_lease_duratio: is not known; did you mean kv_lease_duration?"},
		"kv_transfer_config: {kv_connector_extra_config: {kv_lease_duration: 1.5}}": {"kv_lease_duration: is 1.5, want whole seconds"},
		"kv_transfer_config: {1: 2}":                                                {"kv_transfer_config: is no JSON"},
	} {
		_, err := engineSettings(t, nil, nil, file)
		for _, s := range says {
			if err == nil || !strings.Contains(err.Error(), s) {
				t.Errorf("%q: %v\nwant %q", file, err, s)
			}
		}
	}
	for env, says := range map[string]string{
		"KVFERRY_LEASE=30":                    `KVFERRY_LEASE: is "30", want a time with its unit`,
		"KVFERRY_BLOCK_SIZE=abc":              `KVFERRY_BLOCK_SIZE: is "abc", want a whole number;`,
		"KVFERRY_CPU_CACHE=much":              `KVFERRY_CPU_CACHE: is "much", want a size with its unit, such as 256MiB;`,
		"KVFERRY_BLOCK_SIZ=3":                 "KVFERRY_BLOCK_SIZ is no setting; did you mean KVFERRY_BLOCK_SIZE?",
		"KVFERRY_PREFIL=3":                    "KVFERRY_PREFIL is no setting; did you mean KVFERRY_PREFILL?",
		"KVFERRY_KV_TRANSFER_CONFIG=[]":       "KVFERRY_KV_TRANSFER_CONFIG:",
		"KVFERRY_CONFIG=nowhere/kvferry.yaml": "--config (or KVFERRY_CONFIG): open nowhere/kvferry.yaml",
	} {
		if _, err := engineSettings(t, nil, []string{env}, ""); err == nil || !strings.Contains(err.Error()+";", says) {
			t.Errorf("%s: %v\nwant %q", env, err, says)
		}
	}
	// Of other commands, of this repository's tests, and what Kubernetes says of a service named kvferry.
	for _, env := range []string{"KVFERRY_PREFILL=h:1", "KVFERRY_SOAK=1m", "KVFERRY_SOAK_SEED=1", "KVFERRY_PORT=tcp://10.0.0.1:80",
		"KVFERRY_SERVICE_HOST=10.0.0.1", "KVFERRY_SERVICE_PORT=80", "KVFERRY_PORT_80_TCP_ADDR=10.0.0.1", "KVFERRY_ROUTER_SERVICE_HOST=10.0.0.2"} {
		if _, err := engineSettings(t, nil, []string{env}, ""); err != nil {
			t.Errorf("%s: %v", env, err)
		}
	}
	if f, err := engineSettings(t, nil, nil, "# nothing\n"); err != nil || f.cfg.BlockSize != 16 {
		t.Errorf("a file of comments: %v", err)
	}
}

// Every setting can be said in a file.
func TestEverySettingInAFile(t *testing.T) {
	for _, c := range newRoot().Commands() {
		forSettings(c, func(f *pflag.Flag) {
			if _, list := f.Value.(pflag.SliceValue); list || f.Value.Type() == jsonType {
				return
			}
			value := f.DefValue
			if f.Value.Type() == "string" {
				value = `"` + value + `"`
			}
			if value == "" {
				value = "1"
			}
			settings, err := parseSettings(c.Flags(), "x.yaml", []byte(yamlName(f.Name)+": "+value))
			if f.Name == configFlag {
				return
			}
			if err != nil || len(settings) != 1 || settings[0].flag != f.Name {
				t.Errorf("%s: %v %v", f.Name, settings, err)
			}
		})
	}
}

// forSettings visits the settings of a command.
func forSettings(c *cobra.Command, visit func(*pflag.Flag)) {
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if isSetting(f) {
			visit(f)
		}
	})
}

// What `up` starts is told by flags alone.
func TestChildrenDoNotHearTheEnvironment(t *testing.T) {
	t.Setenv("KVFERRY_BLOCKS", "1")
	t.Setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1")
	t.Setenv("KVFERRY_SOMETHING_ELSE", "1")
	env := childEnviron(allSettings(newRoot()))
	for name, want := range map[string]bool{"KVFERRY_BLOCKS=1": false, "VLLM_NIXL_SIDE_CHANNEL_PORT=1": false, "KVFERRY_SOMETHING_ELSE=1": true} {
		if slices.Contains(env, name) != want {
			t.Errorf("%s: %v", name, !want)
		}
	}
}

// The program itself reads all three.
func TestConfigOfAProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "e.yaml")
	if err := os.WriteFile(path, []byte("served_model_name: filed\nlisten: 127.0.0.1:0\nengine_id: filed\nrole: prefill\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVFERRY_CONFIG", path)
	t.Setenv("KVFERRY_ENGINE_ID", "environed")
	p := launch(t, "engine", "--role", "decode", "--data-parallel-rank", "3")
	line := p.waitLine(func(l string) bool { return strings.HasPrefix(l, "ready ") })
	ready, _ := parseReady(line)
	want := readyLine{"role": "decode", "model": "filed", "engine_id": "environed_dp3"}
	for k, v := range want {
		if ready[k] != v {
			t.Errorf("%s is %q, want %q", k, ready[k], v)
		}
	}
	t.Setenv("KVFERRY_ENGINE_IDD", "x")
	bad := launch(t, "engine")
	if code, out := bad.wait(), bad.output(); code != 2 || !strings.Contains(out, "did you mean KVFERRY_ENGINE_ID?") {
		t.Errorf("exit %d: %s", code, out)
	}
}

func TestUnreachableIsSaid(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		says string
	}{
		{"all on loopback", nil, ""},
		{"one host by name", []string{"--listen", "localhost:0", "--side-channel", "localhost:0"}, ""},
		{"all for others", []string{"--listen", "10.0.0.5:1", "--side-channel", "10.0.0.5:2", "--agent-listen", "10.0.0.5:3"}, ""},
		{"only HTTP for others", []string{"--listen", "10.0.0.5:1"}, "peers there do not"},
		{"HTTP everywhere", []string{"--listen", "0.0.0.0:1"}, "peers there do not"},
		{"no agent for others", []string{"--side-channel", "[fd00::5]:0"}, "not the agent"},
		{"no side channel for others", []string{"--agent-listen", "10.0.0.5:0"}, "the side channel is at"},
		{"shared memory only", []string{"--side-channel", "10.0.0.5:0", "--transport", "shm"}, ""},
		{"tier on loopback", []string{"--cpu-cache", "1MiB", "--tier", "p2p"}, ""},
		{"no tier for others", []string{"--listen", "10.0.0.5:1", "--side-channel", "10.0.0.5:2", "--agent-listen", "10.0.0.5:3", "--cpu-cache", "1MiB", "--tier", "p2p"}, "but not its CPU tier"},
		{"tier for others", []string{"--listen", "10.0.0.5:1", "--side-channel", "10.0.0.5:2", "--agent-listen", "10.0.0.5:3", "--cpu-cache", "1MiB", "--tier", "p2p", "--p2p-listen", "10.0.0.5:4"}, ""},
		{"forwarded", []string{"--listen", "0.0.0.0:1", "--advertise-host", "p1", "--agent-advertise", "p1:5"}, ""},
	} {
		var f engineFlags
		fs := pflag.NewFlagSet("engine", pflag.ContinueOnError)
		f.add(fs)
		if err := fs.Parse(c.args); err != nil {
			t.Fatal(err)
		}
		got := f.unreachable()
		if (c.says == "") != (len(got) == 0) || c.says != "" && !strings.Contains(strings.Join(got, "\n"), c.says) {
			t.Errorf("%s: %q, want %q", c.name, got, c.says)
		}
	}
}

func FuzzSettingsFile(f *testing.F) {
	f.Add("lease: 30s\nblocks: 5\nkv_transfer_config: {kv_role: kv_both}\n")
	f.Add("adapter: [a, b]\nprefix_cache: false\n")
	f.Add("blocks: &a 5\nblock_size: *a\n<<: {x: y}\n? {}\n: 1\n")
	f.Fuzz(func(t *testing.T, raw string) {
		var e engineFlags
		fs := pflag.NewFlagSet("engine", pflag.ContinueOnError)
		e.add(fs)
		settings, err := parseSettings(fs, "f.yaml", []byte(raw))
		if err != nil {
			if !strings.Contains(err.Error(), "f.yaml") {
				t.Errorf("%q: %v", raw, err)
			}
			return
		}
		seen := map[string]bool{}
		for _, s := range settings {
			if seen[s.flag] || fs.Lookup(s.flag) == nil {
				t.Errorf("%q gives %s, twice or without a flag", raw, s.flag)
			}
			seen[s.flag] = true
		}
		_ = apply(fs, settings)
	})
}

// Keys of kv_transfer_config that have a setting of another name give it; the others are told.
func TestTransferConfigFlag(t *testing.T) {
	f, err := engineSettings(t, []string{"--kv-transfer-config", `{"kv_connector":"NixlPullConnector","kv_role":"kv_consumer","engine_id":"d1","kv_buffer_device":"cpu","kv_port":14579,
		"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"backends":["UCX","GDS"],"num_threads":8,"kv_lease_duration":60,"decoder_kv_blocks_ttl":120,
		"engine_ttl":10.5,"enforce_handshake_compat":false}}`}, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := f.settings()
	if err != nil {
		t.Fatal(err)
	}
	got := engine.Config{Mode: cfg.Mode, Role: cfg.Role, EngineID: cfg.EngineID, LoadFailurePolicy: cfg.LoadFailurePolicy, Lease: cfg.Lease,
		RegistrationTimeout: cfg.RegistrationTimeout, EngineTTL: cfg.EngineTTL, AnyCompat: cfg.AnyCompat}
	want := engine.Config{Mode: kv.Pull, Role: connector.Consumer, EngineID: "d1", LoadFailurePolicy: kv.RecomputeOnLoadFailure, Lease: time.Minute,
		RegistrationTimeout: 2 * time.Minute, EngineTTL: 10500 * time.Millisecond, AnyCompat: true}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	if keys := f.transfer.ineffective(); len(keys) != 2 {
		t.Errorf("without effect: %v", keys)
	}
}

// A deployment whose addresses are all IPv6 serves in both modes.
func TestIPv6Deployment(t *testing.T) {
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skipf("no IPv6 here: %v", err)
	} else {
		_ = l.Close()
	}
	for _, mode := range []string{"push", "pull"} {
		args := []string{"engine", "--mode", mode, "--transport", "tcp", "--listen", "[::1]:0", "--side-channel", "[::1]:0", "--agent-listen", "[::1]:0"}
		p, d := serverUp(t, append(args, "--role", "prefill")...), serverUp(t, append(args, "--role", "decode")...)
		if !strings.HasPrefix(p.ready["side_channel"], "[::1]:") {
			t.Errorf("side channel %s", p.ready["side_channel"])
		}
		r := serverUp(t, "router", "--listen", "[::1]:0", "--prefill", p.ready["url"], "--decode", strings.TrimPrefix(d.ready["url"], "http://"))
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		a := post(ctx, r.ready["url"]+"/v1/completions", `{"prompt":"The ferry leaves at noon, and","max_tokens":4,"temperature":0}`)
		cancel()
		if a.status != 200 {
			t.Errorf("%s: %d %s %v", mode, a.status, a.body, a.err)
		}
		if n, err := gauge(context.Background(), d.ready["url"], "kvferry_engine_received_bytes_total"); err != nil || n == 0 {
			t.Errorf("%s: received %v bytes, %v", mode, n, err)
		}
	}
}
