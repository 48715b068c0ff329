package main

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// A value that a command refuses when it looks at its settings is told with where it stands.
func TestRefusedValueHasAnOrigin(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	none := []string{"engine"}
	for _, c := range []struct {
		args  []string
		env   string // NAME=VALUE, of several separated by blanks
		file  string
		says  string // its end
		usage bool   // exit status 2
	}{
		{none, "VLLM_NIXL_SIDE_CHANNEL_PORT=abc", "", "; --side-channel is from VLLM_NIXL_SIDE_CHANNEL_PORT", true},
		{none, "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.5 VLLM_NIXL_SIDE_CHANNEL_PORT=70000", "", "; --side-channel is from VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT", true},
		{none, "VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0", "", "; --side-channel is from VLLM_NIXL_SIDE_CHANNEL_HOST", true},
		{[]string{"engine", "--cpu-cache", "1MiB", "--tier", "p2p"}, "VLLM_P2P_SIDE_CHANNEL_PORT=abc", "", "; --p2p-listen is from VLLM_P2P_SIDE_CHANNEL_PORT", true},
		{none, "KVFERRY_SIDE_CHANNEL=x", "", "; --side-channel is from KVFERRY_SIDE_CHANNEL", true},
		{none, "KVFERRY_LISTEN=foo KVFERRY_BLOCKS=300", "", "; --listen is from KVFERRY_LISTEN", true},
		{none, "KVFERRY_LISTEN=" + busy.Addr().String(), "", "; --listen is from KVFERRY_LISTEN", false},
		{none, "KVFERRY_LEASE=0s", "", "; --lease is from KVFERRY_LEASE", true},
		{none, "KVFERRY_BLOCKS=-1 KVFERRY_LEASE=20s", "", "; --blocks is from KVFERRY_BLOCKS", true},
		{none, "KVFERRY_MODE=bla", "", "; --mode is from KVFERRY_MODE", true},
		{none, "KVFERRY_TRANSFER_SILENCE=500ms", "", "; --transfer-silence is from KVFERRY_TRANSFER_SILENCE", true},
		{[]string{"engine", "--prefix-cache=false"}, "KVFERRY_INJECT_KV_FAULT=bla", "", "; --inject-kv-fault is from KVFERRY_INJECT_KV_FAULT", true},
		{none, "", "blocks: 9\n\nmode: bla\n", "engine.yaml:3: mode", true},
		{none, "", "side_channel: 10.0.0.5\n", "; --side-channel is from engine.yaml:1: side_channel", true},
		{none, "", "lease: 10s\nkv_transfer_config: {kv_connector_extra_config: {decoder_kv_blocks_ttl: 100000000}}\n", "engine.yaml:2: kv_transfer_config: kv_connector_extra_config: decoder_kv_blocks_ttl is", true},
		{none, "", "kv_transfer_config: {kv_connector_extra_config: {bidirectional_kv_xfer: true}}\nmode: push\n",
			"; --bidirectional-kv-xfer is from engine.yaml:1: kv_transfer_config: kv_connector_extra_config.bidirectional_kv_xfer, --mode is from engine.yaml:2: mode", true},
		{none, `KVFERRY_KV_TRANSFER_CONFIG={"kv_role":"zz"}`, "", `KVFERRY_KV_TRANSFER_CONFIG: kv_transfer_config.kv_role: is "zz", want`, true},
		{[]string{"engine", "--blocks", "-1"}, "", "", "must be 1 to 1073741824", true},
		{[]string{"engine", "--mode", "bla"}, "KVFERRY_MODE=push", "", "use push or pull", true},
		{[]string{"router", "--decode", "h:1"}, "KVFERRY_PREFILL=ftp://h", "", "; --prefill is from KVFERRY_PREFILL", true},
		{[]string{"router", "--prefill", "h:1", "--decode", "h:2"}, "KVFERRY_DRAIN=-1s", "", "; --drain is from KVFERRY_DRAIN", true},
		{[]string{"store"}, "KVFERRY_AGENT_LISTEN=x", "", "; --agent-listen is from KVFERRY_AGENT_LISTEN", true},
		{[]string{"store", "--listen", "127.0.0.1:0", "--p2p-listen", "127.0.0.1:0"}, "KVFERRY_AGENT_LISTEN=" + busy.Addr().String(), "", "; --agent-listen is from KVFERRY_AGENT_LISTEN", false},
		{[]string{"up"}, "KVFERRY_MODE=bla", "", "; --mode is from KVFERRY_MODE", true},
	} {
		t.Run(strings.Join(c.args, " ")+" "+c.env+c.file, func(t *testing.T) {
			said, err := runSaid(t, c.args, c.env, c.file)
			if err == nil {
				t.Fatal("it is not refused")
			}
			usage := (*usageError)(nil)
			if !strings.Contains(said, c.says) || strings.Contains(c.says, "is from") && !strings.HasSuffix(said, c.says) || errors.As(err, &usage) != c.usage || strings.Contains(said, "\n") {
				t.Errorf("%s\nwant %q, usage %v", said, c.says, c.usage)
			}
			if c.env == "" && c.file == "" && strings.Contains(said, " is from ") {
				t.Errorf("a value of the command line: %s", said)
			}
		})
	}
}

// runSaid runs a command in this process, with variables (NAME=VALUE, several separated by blanks) and a settings file,
// "" for none, and gives its error and what that says of the file "engine.yaml". What is not refused ends at once.
func runSaid(t *testing.T, args []string, env, file string) (said string, err error) {
	t.Helper()
	for _, e := range strings.Fields(env) {
		name, value, _ := strings.Cut(e, "=")
		t.Setenv(name, value)
	}
	path := filepath.Join(t.TempDir(), "engine.yaml")
	if file != "" {
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = slices.Concat(args, []string{"--config", path})
	}
	over, end := context.WithCancel(t.Context())
	end()
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	if err = root.ExecuteContext(over); err != nil {
		said = strings.ReplaceAll(err.Error(), path, "engine.yaml")
	}
	return said, err
}

func TestHasWord(t *testing.T) {
	for _, c := range []struct {
		text, word string
		want       bool
	}{
		{"--listen x", "--listen", true}, {"--listen-more x", "--listen", false}, {"the --agent-listen x --listen", "--listen", true},
		{"is -1, must", "-1", true}, {"is -10, must", "-1", false}, {`mode "bla" is`, "bla", true}, {"abc", "b", false}, {"h:80 is", ":80", true}, {"x", "", false}, {"", "x", false},
	} {
		if got := hasWord(c.text, c.word); got != c.want {
			t.Errorf("%q in %q: %v", c.word, c.text, got)
		}
	}
}

// Which settings are named: those whose flag or key is told, by any error; else, by a refusal of settings, those whose
// value is told, as it was written or as it is understood; else all. What names its origin itself is left as it is.
func TestTellOrigin(t *testing.T) {
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	fs.String("name", "", "")
	fs.Bool("fast", false, "")
	fs.Duration("some-time", 0, "")
	fs.Int("other", 7, "")
	for _, s := range []setting{{flag: "name", values: []string{"bla"}, from: "N"}, {flag: "fast", values: []string{"true"}, from: "F"}, {flag: "some-time", values: []string{"60s"}, from: "T"}} {
		if err := s.set(fs); err != nil {
			t.Fatal(err)
		}
	}
	if err := fs.Set("other", "8"); err != nil {
		t.Fatal(err)
	}
	const name, fast, some = "--name is from N", "--fast is from F", "--some-time is from T"
	for _, c := range []struct {
		said         string
		usage, other string // what is added, to a refusal and to another error
	}{
		{"--name does not do", name, name},
		{"some_time does not do", some, some},
		{"--some-time and --fast do not go together", fast + ", " + some, fast + ", " + some},
		{"bla does not do", name, ""},
		{"60s does not do", some, ""},
		{"1m0s does not do", some, ""},
		{"if bla is true", name, ""},
		{"the name does not do", fast + ", " + name + ", " + some, ""},
		{"--other does not do", "", ""},
		{"it is 8, which does not do", "", ""},
		{"N: --name does not do", "", ""},
	} {
		want := func(added string) string {
			if added == "" {
				return c.said
			}
			return c.said + "; " + added
		}
		if got := tellOrigin(fs, usagef("%s", c.said)).Error(); got != want(c.usage) {
			t.Errorf("a refusal is %q, want %q", got, want(c.usage))
		}
		if got := tellOrigin(fs, errors.New(c.said)).Error(); got != want(c.other) {
			t.Errorf("another error is %q, want %q", got, want(c.other))
		}
	}
	if err := tellOrigin(fs, nil); err != nil {
		t.Error(err)
	}
}
