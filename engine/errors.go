package engine

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
)

// ErrorKind says whose fault an error is and what a client may do. An HTTP layer maps kinds to
// statuses in one place.
type ErrorKind string

const (
	// KindInvalid: the request can never succeed as it is (400). Field names the culprit.
	KindInvalid ErrorKind = "invalid_request"
	// KindOverload: the queue is full; try again later or elsewhere (429 or 503).
	KindOverload ErrorKind = "overloaded"
	// KindUnavailable: the engine is closing or closed (503).
	KindUnavailable ErrorKind = "unavailable"
	// KindTransfer: the KV cache of the prompt did not arrive from the peer (502). Phase says
	// where it failed; Unwrap gives the *connector.Error.
	KindTransfer ErrorKind = "kv_transfer_failed"
	// KindAborted: the client went away, or Close ended the request (499; nobody reads it).
	KindAborted ErrorKind = "aborted"
	// KindInternal: a fault of the engine (500).
	KindInternal ErrorKind = "internal_error"
)

// RequestError is why a request was refused or ended without an answer. It names the request and
// the phase, and is wrapped no further by this package.
type RequestError struct {
	Request kv.RequestID
	Kind    ErrorKind
	// Field is the request field at fault as clients spell it ("prompt", "max_tokens",
	// "kv_transfer_params", …); set for KindInvalid.
	Field string
	// Phase is where it failed: "submit", "queue", "model", "close", or for KindTransfer a
	// connector.Phase.
	Phase string
	Err   error
}

func (e *RequestError) Error() string {
	return fmt.Sprintf("request %s: %s: %v", e.Request, e.Phase, e.Err)
}

func (e *RequestError) Unwrap() error { return e.Err }
