package main

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/kv"
)

// envPrefix begins the names of our own variables.
const envPrefix = "KVFERRY_"

func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// stockVariable is an environment variable of a stock engine, or of what it is built on.
type stockVariable struct {
	name    string
	flag    string // the setting that it gives; "" if it has no effect
	meaning string // what it does here, or why nothing
	value   func(env map[string]string) string
}

// Where a stock engine's side channel and P2P tier are, and by default.
const (
	stockHost, stockPort, stockDefaultPort          = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"
	stockP2PHost, stockP2PPort, stockDefaultP2PPort = "VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT", "5710"
)

// stockVariables are those that nixl-connector.md section 9, p2p-tier.md section 9 and proxy.md name.
var stockVariables = []stockVariable{
	{stockHost, "side-channel", "the host of the side channel, to listen at and to tell peers; with no port beside it, port " + stockDefaultPort, stockAddress(stockHost, stockPort, stockDefaultPort)},
	{stockPort, "side-channel", "the port of the side channel, of data-parallel rank 0; with no host beside it, on 127.0.0.1", stockAddress(stockHost, stockPort, stockDefaultPort)},
	{stockP2PHost, "p2p-listen", "the host of the P2P tier; with no port beside it, port " + stockDefaultP2PPort, stockAddress(stockP2PHost, stockP2PPort, stockDefaultP2PPort)},
	{stockP2PPort, "p2p-listen", "the port of the P2P tier, of data-parallel rank 0; with no host beside it, on 127.0.0.1", stockAddress(stockP2PHost, stockP2PPort, stockDefaultP2PPort)},
	{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "request-id-suffix", "1 or true: request ids get no random suffix", func(env map[string]string) string {
		switch strings.ToLower(env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"]) {
		case "", "0", "false":
			return "true"
		}
		return "false"
	}},
	{name: "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", meaning: "no effect, as in release 0.32.0: the lease took its place; set `--lease`"},
	{name: "VLLM_SSM_CONV_STATE_LAYOUT", meaning: "no effect: the engine has no state-space layers"},
	{name: "VLLM_P2P_MAX_PEERS", meaning: "no effect: the bound is fixed"},
	{name: "VLLM_P2P_HANDSHAKE_TIMEOUT_S", meaning: "no effect: the bound is fixed"},
	{name: "VLLM_P2P_IDLE_TIMEOUT_S", meaning: "no effect: the bound is fixed"},
	{name: "UCX_RCACHE_MAX_UNRELEASED", meaning: "no effect: no UCX is loaded"},
}

// said names the variables that are set of those that make the setting.
func (v stockVariable) said(env map[string]string) string {
	var names []string
	for _, o := range stockVariables {
		if _, ok := env[o.name]; ok && o.flag == v.flag {
			names = append(names, o.name)
		}
	}
	return strings.Join(names, " and ")
}

// stockAddress joins a stock engine's host and port.
func stockAddress(hostName, portName, defaultPort string) func(env map[string]string) string {
	return func(env map[string]string) string {
		return net.JoinHostPort(kv.BareHost(cmp.Or(env[hostName], "127.0.0.1")), cmp.Or(env[portName], defaultPort))
	}
}

// environment reads the settings of one command from environ. An empty variable is none. Variables of
// other commands are left to them. One that is no setting is refused if its name is nearly one; others
// that begin alike are not ours: Kubernetes puts the addresses of a service named kvferry there.
func environment(fs *pflag.FlagSet, environ, known []string) ([]setting, error) {
	env := map[string]string{}
	for _, e := range environ {
		if name, value, _ := strings.Cut(e, "="); value != "" {
			env[name] = value
		}
	}
	if err := checkVariables(env, known); err != nil {
		return nil, err
	}
	var out []setting
	fs.VisitAll(func(f *pflag.Flag) {
		value, ok := env[envName(f.Name)]
		if !ok || !isSetting(f) {
			return
		}
		s := setting{flag: f.Name, values: []string{value}, from: envName(f.Name)}
		if _, list := f.Value.(pflag.SliceValue); list {
			s.values = strings.Fields(value)
		}
		out = append(out, s)
	})
	for _, v := range stockVariables {
		if _, ok := env[v.name]; ok && v.flag != "" && fs.Lookup(v.flag) != nil {
			out = append(out, setting{flag: v.flag, values: []string{v.value(env)}, from: v.said(env), stock: true})
		}
	}
	return out, nil
}

// checkVariables refuses a name that is nearly that of a setting.
func checkVariables(env map[string]string, known []string) error {
	var ours, given []string
	for _, k := range known {
		ours = append(ours, envName(k))
	}
	for name := range env {
		if strings.HasPrefix(name, envPrefix) && !slices.Contains(ours, name) {
			given = append(given, name)
		}
	}
	slices.Sort(given)
	for _, name := range given {
		rest := strings.TrimPrefix(name, envPrefix)
		if near, edits := nearestName(name, ours); edits <= len(rest)/4 {
			return fmt.Errorf("%s is no setting; did you mean %s?", name, near)
		}
	}
	return nil
}

// childEnviron is the environment of a command that this one starts and gives its settings as flags:
// what the environment says is said to this one.
func childEnviron(known []string) []string {
	var out []string
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		ours := slices.ContainsFunc(known, func(k string) bool { return name == envName(k) })
		stock := slices.ContainsFunc(stockVariables, func(v stockVariable) bool { return name == v.name })
		if !ours && !stock {
			out = append(out, e)
		}
	}
	return out
}
