package model

import "fmt"

// FormatError means that a checkpoint file is broken: no engine can use it.
type FormatError struct {
	File   string // base name
	Where  string // field or tensor; may be empty
	Reason string
}

func (e *FormatError) Error() string {
	if e.Where == "" {
		return fmt.Sprintf("%s: %s", e.File, e.Reason)
	}
	return fmt.Sprintf("%s: %s: %s", e.File, e.Where, e.Reason)
}

// UnsupportedError means that a checkpoint asks for something that this package does not compute.
// Going on without it would give wrong tokens.
type UnsupportedError struct {
	File  string // base name
	Field string // field or tensor
	Value string // what the file says, shortened
	Need  string // what is supported
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s: %s is %s, supported is only %s", e.File, e.Field, e.Value, e.Need)
}

// short makes a value from a file fit into a message.
func short[T ~string | ~[]byte](v T) string {
	const most = 80
	if len(v) > most {
		return string(v[:most]) + "…"
	}
	return string(v)
}
