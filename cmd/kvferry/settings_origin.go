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

// stockKey annotates a flag whose value was said under a stock engine's name.
const stockKey = "kvferry-stock"

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
// the name of a flag, by its value, or in other words; in the last case all are named that may be meant, unless a flag or
// value of the command line is.
func tellOrigin(fs *pflag.FlagSet, err error) error {
	if err == nil {
		return nil
	}
	said := err.Error()
	var named, shown, all []string
	clear := false // it is about the command line, or says itself where its value stands
	fs.VisitAll(func(f *pflag.Flag) {
		from := origin(f)
		if from == "" {
			return
		}
		key, values := yamlName(f.Name), []string{f.Value.String()}
		isNamed := hasWord(said, "--"+f.Name) || strings.Contains(key, "_") && hasWord(said, key)
		o := f.Annotations[originKey]
		if o != nil {
			values = append(values, o[1:]...)
		}
		isShown := f.Value.Type() != "bool" && slices.ContainsFunc(values, func(v string) bool { return hasWord(said, v) })
		switch line := "--" + f.Name + " is from " + from; {
		case o == nil:
			clear = clear || isNamed || isShown
		case hasWord(said, from):
			clear = true
		default:
			all = append(all, line)
			if isNamed {
				named = append(named, line)
			}
			if isShown {
				shown = append(shown, line)
			}
		}
	})
	lines := named
	if usage := (*usageError)(nil); errors.As(err, &usage) && len(lines) == 0 {
		if lines = shown; len(lines) == 0 && !clear {
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
