package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Every flag of a command is a setting, which may also stand in the environment or in a file:
//
//	command line  >  environment  >  --config FILE  >  default
//
// A flag that is said in one of these is not looked for further down. Within each, a setting under its
// own name comes before one that a stock name gives: kv_transfer_config, VLLM_….

// configFlag names the file; it is no setting of a file itself.
const configFlag = "config"

// setting is one value that does not come from the command line.
type setting struct {
	flag   string
	values []string // one, but for lists
	from   string   // where it was said, for people
	idle   bool     // it is what the setting would be anyway
	stock  bool     // it was said under a stock engine's name
}

// expander is a flag's value that speaks for other settings.
type expander interface {
	// settings are what it says, each from a part of its value; nil if it was not given.
	settings() []setting
}

// layer lets all settings of a command stand in the environment and in a file too.
func layer(cmd *cobra.Command) {
	cmd.Flags().String(configFlag, "", "`FILE` of settings in YAML; environment and flags come before it (docs/configuration.md)")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := readSettings(cmd.Flags(), os.Environ(), allSettings(cmd.Root())); err != nil {
			return &usageError{fmt.Errorf("%w; see `%s --help`", err, cmd.CommandPath())}
		}
		return nil
	}
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return tellOrigin(cmd.Flags(), run(cmd, args)) }
}

// isSetting tells a setting from a flag that only the command line has.
func isSetting(f *pflag.Flag) bool { return !f.Hidden && f.Name != "help" && f.Name != "version" }

// allSettings are the flags of all commands.
func allSettings(root *cobra.Command) []string {
	var names []string
	for _, c := range root.Commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if isSetting(f) && !slices.Contains(names, f.Name) {
				names = append(names, f.Name)
			}
		})
	}
	return names
}

// readSettings sets what the command line left open. known are the settings of all commands, any of
// which may stand in the environment.
func readSettings(fs *pflag.FlagSet, environ, known []string) error {
	if err := expand(fs); err != nil {
		return err
	}
	env, err := environment(fs, environ, known)
	if err != nil {
		return err
	}
	if err := apply(fs, env); err != nil {
		return err
	}
	path, err := fs.GetString(configFlag)
	if err != nil || path == "" {
		return err
	}
	file, err := settingsFile(fs, path)
	if err != nil {
		return err
	}
	return apply(fs, file)
}

// apply sets what is not set, and then what that says of others.
func apply(fs *pflag.FlagSet, settings []setting) error {
	for _, s := range settings {
		if err := s.set(fs); err != nil {
			return err
		}
	}
	return expand(fs)
}

// set sets one flag unless it is set.
func (s setting) set(fs *pflag.FlagSet) error {
	f := fs.Lookup(s.flag)
	if f.Changed {
		return nil
	}
	var err error
	if list, ok := f.Value.(pflag.SliceValue); ok {
		err = list.Replace(s.values)
	} else {
		err = f.Value.Set(s.values[0])
	}
	if err != nil && f.Value.Type() == jsonType {
		return fmt.Errorf("%s: %w", s.from, err) // names the key inside
	}
	if err != nil {
		said := fmt.Sprintf("%s: is %.80q, want %s", s.from, strings.Join(s.values, " "), wanted(f))
		if slices.Contains(plainTypes, f.Value.Type()) {
			return errors.New(said)
		}
		return fmt.Errorf("%s: %w", said, err)
	}
	f.Changed = true
	if s.stock {
		if err := fs.SetAnnotation(f.Name, stockKey, nil); err != nil {
			return err
		}
	}
	return fs.SetAnnotation(f.Name, originKey, append([]string{s.from}, s.values...))
}

// expand carries out what settings that are set say of others.
func expand(fs *pflag.FlagSet) (err error) {
	fs.VisitAll(func(f *pflag.Flag) {
		x, ok := f.Value.(expander)
		if !ok || !f.Changed || err != nil {
			return
		}
		said := x.settings()
		for i := range said {
			said[i].from = origin(f) + ": " + said[i].from
		}
		for _, s := range said {
			switch {
			case fs.Lookup(s.flag) != nil:
				err = s.set(fs)
			case !s.idle && !slices.ContainsFunc(said, func(o setting) bool { return o.from == s.from && fs.Lookup(o.flag) != nil }):
				err = fmt.Errorf("%s: this engine does not do it", s.from)
			}
			if err != nil {
				return
			}
		}
	})
	return err
}

// plainTypes are those whose parsers say no more than wanted.
var plainTypes = []string{"bool", "int", "int64", "uint", "uint64", "float64", "duration", "size"}

// wanted says what a flag's value looks like.
func wanted(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool":
		return "true or false"
	case "int", "int64":
		return "a whole number"
	case "uint", "uint64":
		return "a whole number of 0 or more"
	case "float64":
		return "a number"
	case "duration":
		return "a time with its unit, such as 30s or 5m"
	case "stringSlice", "stringArray":
		return "a list of texts"
	case "string":
		return "a text"
	case "size":
		return "a size with its unit, such as 256MiB"
	case jsonType:
		return "a JSON object"
	}
	return "a value as --" + f.Name + " takes it"
}

// nearestName is the known name with the fewest edits to name, and how many those are; one that begins
// with it is preferred to others that are not one edit away.
func nearestName(name string, known []string) (best string, edits int) {
	least := 0
	for _, k := range known {
		d := editDistance(strings.ToLower(name), strings.ToLower(k))
		rank := d
		if name != "" && strings.HasPrefix(strings.ToLower(k), strings.ToLower(name)) {
			rank = min(rank, 1)
		}
		if best == "" || rank < least {
			best, least, edits = k, rank, d
		}
	}
	return best, edits
}
