package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// maxSettingsFile bounds the file, bytes: some hundred settings need some kilobytes.
const maxSettingsFile = 1 << 20

// yamlName is a flag's key in a file.
func yamlName(flag string) string { return strings.ReplaceAll(flag, "-", "_") }

// settingsFile reads the file of --config.
func settingsFile(fs *pflag.FlagSet, path string) ([]setting, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--config (or KVFERRY_CONFIG): %w", err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxSettingsFile+1))
	if err != nil {
		return nil, fmt.Errorf("--config (or KVFERRY_CONFIG): %w", err)
	}
	if len(raw) > maxSettingsFile {
		return nil, fmt.Errorf("--config (or KVFERRY_CONFIG): %s has more than %d bytes", path, maxSettingsFile)
	}
	return parseSettings(fs, path, raw)
}

// parseSettings reads one YAML mapping of settings. Every error names the file, the line and the key.
func parseSettings(fs *pflag.FlagSet, path string, raw []byte) ([]setting, error) {
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil // nothing but comments
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: has more than one document, or no YAML behind the first", path)
	}
	root := doc.Content[0]
	switch {
	case root.Kind == yaml.ScalarNode && root.Tag == "!!null":
		return nil, nil
	case root.Kind != yaml.MappingNode:
		return nil, fmt.Errorf("%s:%d: is no mapping of settings, want KEY: VALUE on each line", path, root.Line)
	}
	var names []string
	flags := map[string]*pflag.Flag{}
	fs.VisitAll(func(f *pflag.Flag) {
		if isSetting(f) && f.Name != configFlag {
			names = append(names, yamlName(f.Name))
			flags[yamlName(f.Name)] = f
		}
	})
	lines := map[string]int{}
	var out []setting
	for i := 0; i < len(root.Content); i += 2 {
		key, node := root.Content[i], root.Content[i+1]
		at := func(format string, args ...any) error {
			return fmt.Errorf("%s:%d: %.64s: %s", path, key.Line, key.Value, fmt.Sprintf(format, args...))
		}
		f := flags[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode:
			return nil, fmt.Errorf("%s:%d: a key is no text", path, key.Line)
		case f == nil:
			near, _ := nearestName(key.Value, names)
			return nil, at("is not known; did you mean %s?", near)
		case lines[key.Value] != 0:
			return nil, at("is said twice, in line %d before", lines[key.Value])
		}
		lines[key.Value] = key.Line
		values, err := yamlValues(f, node)
		if err != nil {
			return nil, at("%v, want %s", err, wanted(f))
		}
		out = append(out, setting{flag: f.Name, values: values, from: fmt.Sprintf("%s:%d: %s", path, key.Line, key.Value)})
	}
	return out, nil
}

// yamlValues is a node's value as its flag takes it; the error says what the node is.
func yamlValues(f *pflag.Flag, n *yaml.Node) ([]string, error) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	_, list := f.Value.(pflag.SliceValue)
	switch {
	case f.Value.Type() == jsonType && n.Kind == yaml.MappingNode:
		var v any
		if err := n.Decode(&v); err != nil {
			return nil, err
		}
		raw, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("is no JSON: %w", err)
		}
		return []string{string(raw)}, nil
	case list && n.Kind == yaml.SequenceNode:
		var out []string
		for _, item := range n.Content {
			if item.Kind != yaml.ScalarNode || item.Tag != "!!str" {
				return nil, fmt.Errorf("has %s in line %d", nodeText(item), item.Line)
			}
			out = append(out, item.Value)
		}
		return out, nil
	case n.Kind != yaml.ScalarNode || !fits(f.Value.Type(), n):
		return nil, fmt.Errorf("is %s", nodeText(n))
	}
	return []string{n.Value}, nil
}

// fits tells whether a scalar is of a flag's type.
func fits(flagType string, n *yaml.Node) bool {
	switch flagType {
	case "bool":
		return n.Tag == "!!bool"
	case "int", "int64", "uint", "uint64":
		return n.Tag == "!!int"
	case "float64":
		return n.Tag == "!!int" || n.Tag == "!!float"
	case "string", "stringSlice", "stringArray", "duration", jsonType:
		return n.Tag == "!!str" || flagType == "duration" && n.Value == "0"
	}
	return n.Tag != "!!null"
}

func nodeText(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	kind := map[string]string{"!!int": "the number ", "!!float": "the number ", "!!bool": "the truth value ", "!!null": "nothing", "!!timestamp": "the date "}[n.Tag]
	if n.Tag == "!!null" {
		return kind
	}
	return fmt.Sprintf("%s%.80q", kind, n.Value)
}
