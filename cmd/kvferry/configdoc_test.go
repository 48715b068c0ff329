package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/connector"
)

//go:generate go test -run TestConfigurationDocument -update

var update = flag.Bool("update", false, "write docs/configuration.md anew")

const configurationDocument = "../../docs/configuration.md"

// TestConfigurationDocument compares docs/configuration.md with the settings that the program has.
func TestConfigurationDocument(t *testing.T) {
	want := configurationText(newRoot())
	if *update {
		if err := os.WriteFile(configurationDocument, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(configurationDocument)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		line := 0
		g, w := strings.Split(string(got), "\n"), strings.Split(want, "\n")
		for line < min(len(g), len(w)) && g[line] == w[line] {
			line++
		}
		t.Errorf("docs/configuration.md is stale from line %d on; run `go generate ./cmd/kvferry`\nthere:   %s\nprogram: %s", line+1, at(g, line), at(w, line))
	}
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(the end)"
}

const configurationIntro = `# Configuration

Generated from the program (` + "`go generate ./cmd/kvferry`" + `); a test fails when it is stale.

Every setting can be said in three places. The first that says it counts:

1. the command line: ` + "`--block-size 32`" + `;
2. the environment: ` + "`KVFERRY_BLOCK_SIZE=32`" + `; an empty variable is none, a list is separated by spaces;
3. the YAML file that ` + "`--config FILE`" + ` or ` + "`KVFERRY_CONFIG`" + ` names: ` + "`block_size: 32`" + `, one mapping of these keys for the command
   that reads it.

Then comes the default. A variable is for every command that has the setting. Within one place, a setting's own name counts before a stock name for it
([kv_transfer_config](#kv_transfer_config), [variables of stock engines](#variables-of-stock-engines)).

A flag or a key that does not exist is refused with the nearest one that does; a value of the wrong type, with the file, the
line and the key. What a command cannot work with otherwise is refused with the variable, or the line of the file, that the
value is from. What would do nothing, as ` + "`--tier-timeout`" + ` without ` + "`--cpu-cache`" + `, is refused likewise, unless it is the default or
stands under a stock name. Times have units (` + "`30s`, `5m`" + `). A variable that begins with ` + "`KVFERRY_`" + ` and is nearly a setting is refused too;
others are left alone, because Kubernetes puts the addresses of a service named kvferry there. ` + "`kvferry up`" + ` tells its engines and
its router their settings by flags: they do not read the environment of ` + "`up`" + `.

` + "```yaml" + `
# engine.yaml, for: kvferry engine --config engine.yaml
role: prefill
listen: 10.0.0.5:8001
side_channel: 10.0.0.5:5600
agent_listen: 10.0.0.5:5700
lease: 60s
kv_transfer_config:          # what vLLM's --kv-transfer-config says, if it is at hand
  kv_connector: NixlPushConnector
  engine_id: p1
` + "```" + `
`

func configurationText(root *cobra.Command) string {
	var b strings.Builder
	b.WriteString(configurationIntro)
	for _, c := range root.Commands() {
		fmt.Fprintf(&b, "\n## kvferry %s\n\n%s.\n\n| flag | key in a file | variable | value | default | meaning |\n|---|---|---|---|---|---|\n", c.Name(), c.Short)
		forSettings(c, func(f *pflag.Flag) { b.WriteString(settingRow(f)) })
	}
	writeStock(&b, root)
	return b.String()
}

func settingRow(f *pflag.Flag) string {
	placeholder, usage := pflag.UnquoteUsage(f)
	value := map[string]string{"bool": "true or false", "duration": "time", "stringSlice": "list of ", "stringArray": "list of "}[f.Value.Type()]
	switch {
	case value == "list of " && placeholder == "strings":
		value += "texts"
	case value == "" && placeholder == "string":
		value = "text"
	case value == "list of ":
		value += "`" + placeholder + "`"
	case value == "":
		value = "`" + placeholder + "`"
	}
	key := "`" + yamlName(f.Name) + "`"
	if f.Name == configFlag {
		key = ""
	}
	def := f.DefValue
	if def == "[]" {
		def = ""
	}
	if def != "" {
		def = "`" + def + "`"
	}
	return fmt.Sprintf("| `--%s` | %s | `%s` | %s | %s | %s |\n", f.Name, key, envName(f.Name), cell(value), cell(def), cell(usage))
}

func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

func writeStock(b *strings.Builder, root *cobra.Command) {
	var names []string
	for _, c := range root.Commands() {
		if c.Flags().Lookup("kv-transfer-config") != nil {
			forSettings(c, func(f *pflag.Flag) { names = append(names, f.Name) })
		}
	}
	gives := func(key string) string {
		var flags []string
		for _, s := range stockSettings {
			if s.key == key && slices.Contains(names, s.flag) {
				flags = append(flags, "`--"+s.flag+"`")
			}
		}
		return strings.Join(flags, ", ")
	}
	b.WriteString("\n## kv_transfer_config\n\nWhat vLLM's option `--kv-transfer-config` takes, as JSON or, in a file, as YAML. In Go it is read by\n" +
		"`connector.ParseTransferConfig`. Unknown keys are refused.\n\n| key | gives | default | meaning |\n|---|---|---|---|\n")
	for _, k := range connector.TransferKeys() {
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", k.Name, gives(k.Name), k.Default, cell(k.Meaning))
	}
	b.WriteString("\n### kv_connector_extra_config\n\nThe keys of the NIXL connectors, with their stock defaults; in Go: `connector.ParseExtra`. A key that gives nothing\n" +
		"is known and has no effect where its value is the default; of another value, `backends` and `num_threads` are warned\nof and the rest is refused.\n\n" +
		"| key | gives | default | unit | meaning |\n|---|---|---|---|---|\n")
	for _, k := range connector.ExtraKeys() {
		def := k.Default
		if !strings.Contains(def, "`") {
			def = "`" + def + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s |\n", k.Name, gives(extraPrefix+k.Name), def, k.Unit, cell(k.Meaning))
	}
	b.WriteString("\n## Variables of stock engines\n\n| variable | gives | meaning |\n|---|---|---|\n")
	for _, v := range stockVariables {
		flag := ""
		if v.flag != "" {
			flag = "`--" + v.flag + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", v.name, flag, cell(v.meaning))
	}
}
