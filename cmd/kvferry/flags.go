package main

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// usageError is a command line that cannot be carried out; the exit status is 2.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

// flagError answers a bad flag with the nearest known one.
func flagError(cmd *cobra.Command, err error) error {
	hint := fmt.Sprintf("see `%s --help`", cmd.CommandPath())
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		if near := nearestFlag(cmd, unknown.GetSpecifiedName()); near != "" {
			hint = fmt.Sprintf("did you mean --%s? (%s)", near, hint)
		}
	}
	return &usageError{fmt.Errorf("%w; %s", err, hint)}
}

// nearestFlag is the flag of cmd with the smallest edit distance to name, or "" if none is like it. A
// flag that begins with name is nearer than one that does not.
func nearestFlag(cmd *cobra.Command, name string) string {
	best, bestDist := "", len(name)/2+2
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		d := editDistance(name, f.Name)
		if strings.HasPrefix(f.Name, name) || strings.Contains(f.Name, "-"+name) {
			d = min(d, 1)
		}
		if d < bestDist {
			best, bestDist = f.Name, d
		}
	})
	return best
}

// editDistance counts insertions, deletions and replacements between a and b.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diag
			if a[i] != b[j] {
				cost++
			}
			diag = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// newHelp is the command that shows the help of others.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Show the help of a command",
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil {
				return &usageError{err}
			}
			if err := knownCommand(about, rest); err != nil {
				return err
			}
			about.InitDefaultHelpFlag() // as `about --help` has them
			about.InitDefaultVersionFlag()
			return about.Help()
		},
	}
}

// knownCommand refuses a command that does not exist, with the nearest that does.
func knownCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	see := fmt.Sprintf("see `%s --help`", root.CommandPath())
	if near := root.SuggestionsFor(args[0]); len(near) > 0 {
		return usagef("unknown command %q; did you mean %s? (%s)", args[0], strings.Join(near, " or "), see)
	}
	var all []string
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			all = append(all, c.Name())
		}
	}
	if len(all) > 0 {
		see = fmt.Sprintf("there are %s (%s)", strings.Join(all, ", "), see)
	}
	return usagef("unknown command %q; %s", args[0], see)
}

// noArgs refuses positional arguments with a line that says so.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no arguments, got %s; see `%s --help`", cmd.CommandPath(), strings.Join(args, " "), cmd.CommandPath())
	}
	return nil
}

// version is the module's version, or the commit for a build from a checkout.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return "devel"
}

// optionalInt is a flag's number that may be absent.
type optionalInt struct{ p **int }

func (o optionalInt) Type() string { return "int" }

func (o optionalInt) String() string {
	if o.p == nil || *o.p == nil {
		return ""
	}
	return strconv.Itoa(**o.p)
}

func (o optionalInt) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil {
		return errors.New("it is no whole number")
	}
	*o.p = &n
	return nil
}
