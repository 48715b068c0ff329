package main

import (
	"encoding/json"
	"io"
	"log/slog"

	"github.com/spf13/pflag"
)

// logFlags are the flags that every server command has.
type logFlags struct{ level, format string }

func (l *logFlags) add(f *pflag.FlagSet) {
	f.StringVar(&l.level, "log-level", "info", "least `LEVEL` that is logged: debug, info, warn or error")
	f.StringVar(&l.format, "log-format", "text", "`FORMAT` of log lines: text or json")
}

// logger makes the program's log; w is stderr.
func (l *logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, usagef("--log-level %q: use debug, info, warn or error", l.level)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch l.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, usagef("--log-format %q: use text or json", l.format)
}

// isWarning tells whether a JSON log line is a warning or an error. A line that is not JSON (a crash,
// a runtime message) is one.
func isWarning(line string) bool {
	var l struct {
		Level slog.Level `json:"level"`
	}
	if json.Unmarshal([]byte(line), &l) != nil {
		return true
	}
	return l.Level >= slog.LevelWarn
}
