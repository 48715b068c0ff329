package wire

import (
	"errors"
	"fmt"
	"strings"
)

// What a DecodeError is about; use with errors.Is.
var (
	// ErrSyntax: the bytes are cut off, malformed, or followed by others.
	ErrSyntax = errors.New("malformed")
	// ErrType: a value has another type than the field.
	ErrType = errors.New("wrong type")
	// ErrRange: a value of the right type is not usable.
	ErrRange = errors.New("out of range")
	// ErrMissing: a mandatory key is absent.
	ErrMissing = errors.New("missing")
	// ErrLimit: the input is larger than a limit of this package.
	ErrLimit = errors.New("too large")
)

// DecodeError says which field of which message cannot be used, and why.
type DecodeError struct {
	Message string // "handshake payload", "PUSH_REG", …
	Field   string // key, perhaps with an index: "block_lens[1]"; "" for the message as a whole
	Offset  int    // byte position in the message; -1 when it says nothing
	Reason  string // what is wrong with it
	Kind    error  // one of the Err values above
}

func (e *DecodeError) Error() string {
	var b strings.Builder
	b.WriteString(e.Message)
	if e.Field != "" {
		b.WriteString(": ")
		b.WriteString(e.Field)
	}
	b.WriteString(": ")
	b.WriteString(e.Reason)
	if e.Offset >= 0 {
		fmt.Fprintf(&b, " (byte %d)", e.Offset)
	}
	return b.String()
}

func (e *DecodeError) Unwrap() error { return e.Kind }

// ParamError says which key of kv_transfer_params cannot be used, and why. It is the sender's fault:
// an HTTP server answers it with status 400.
type ParamError struct {
	Field  string // key of the object; "kv_transfer_params" for the object as a whole
	Reason string
}

func (e *ParamError) Error() string {
	if e.Field == paramsKey {
		return paramsKey + ": " + e.Reason
	}
	return paramsKey + "." + e.Field + ": " + e.Reason
}

const paramsKey = "kv_transfer_params"
