package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// originKey annotates a flag that the command line has not set: where its value stands, for people, and then
// what that says.
const originKey = "kvferry-origin"

// origin is where a flag's value was said; "" for its default.
func origin(f *pflag.Flag) string {
	if o := f.Annotations[originKey]; o != nil {
		return o[0]
	}
	if f.Changed {
		return "--" + f.Name
	}
	return ""
}

// tellOrigin adds to a command's error where the values that it refuses stand, as far as that is not the
// command line. What is refused may only show when the command looks at its settings together, and is told by
// the name of a flag, by its value, or in other words; in the last case all are named that may be meant.
func tellOrigin(fs *pflag.FlagSet, err error) error {
	if err == nil {
		return nil
	}
	said := err.Error()
	var named, shown, all []string
	fs.VisitAll(func(f *pflag.Flag) {
		o := f.Annotations[originKey]
		if o == nil || hasWord(said, o[0]) {
			return
		}
		line := "--" + f.Name + " is from " + o[0]
		all = append(all, line)
		if key := yamlName(f.Name); hasWord(said, "--"+f.Name) || strings.Contains(key, "_") && hasWord(said, key) {
			named = append(named, line)
		}
		values := append(slices.Clone(o[1:]), f.Value.String())
		if slices.ContainsFunc(values, func(v string) bool { return f.Value.Type() != "bool" && hasWord(said, v) }) {
			shown = append(shown, line)
		}
	})
	lines := named
	if usage := (*usageError)(nil); errors.As(err, &usage) && len(lines) == 0 {
		if lines = shown; len(lines) == 0 {
			lines = all
		}
	}
	if len(lines) == 0 {
		return err
	}
	return fmt.Errorf("%w; %s", err, strings.Join(lines, ", "))
}

// hasWord tells whether a word stands in a text, and not as a part of a longer one.
func hasWord(text, word string) bool {
	inside := func(b byte) bool {
		return b == '_' || b == '-' || b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z'
	}
	for at := 0; word != ""; {
		i := strings.Index(text[at:], word)
		if i < 0 {
			return false
		}
		start, end := at+i, at+i+len(word)
		if (start == 0 || !inside(text[start-1]) || !inside(word[0])) && (end == len(text) || !inside(text[end])) {
			return true
		}
		at = start + 1
	}
	return false
}
