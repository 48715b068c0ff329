package main

import (
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// need is what some settings do nothing without.
type need struct {
	flags []string
	met   bool
	give  string // what meets it
}

// refuseIdle refuses settings that were said and would do nothing: whoever says them expects something of them. The
// first need that is not met counts. A value under a stock engine's name is left alone: an operator says it
// to a whole fleet, in which some engines have no use for it.
func refuseIdle(fs *pflag.FlagSet, needs ...need) error {
	for _, n := range needs {
		if n.met {
			continue
		}
		var idle []string
		for _, name := range n.flags {
			f := fs.Lookup(name)
			if _, stock := f.Annotations[stockKey]; f.Changed && !stock && !saysNothing(f) {
				idle = append(idle, fmt.Sprintf("--%s %s", name, shownValue(f)))
			}
		}
		switch {
		case len(idle) == 1:
			return usagef("%s does nothing without %s: give that too, or leave it out", idle[0], n.give)
		case len(idle) > 1:
			return usagef("%s do nothing without %s: give that too, or leave them out", strings.Join(idle, ", "), n.give)
		}
	}
	return nil
}

// saysNothing tells of a text or list that was given and is empty, as from a template.
func saysNothing(f *pflag.Flag) bool { return shownValue(f) == "" }

// shownValue is a flag's value as one writes it.
func shownValue(f *pflag.Flag) string {
	if list, ok := f.Value.(pflag.SliceValue); ok {
		return strings.Join(list.GetSlice(), ",")
	}
	return f.Value.String()
}
