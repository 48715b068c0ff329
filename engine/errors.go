package engine

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/core"
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
	// KindUnavailable: the engine is closing or closed, or was closed before the answer was
	// complete (503).
	KindUnavailable ErrorKind = "unavailable"
	// KindTransfer: the KV cache of the prompt did not arrive from the peer (502). Phase says
	// where it failed; Unwrap gives the *connector.Error.
	KindTransfer ErrorKind = "kv_transfer_failed"
	// KindAborted: the client went away or closed its Stream (499; nobody reads it).
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
	// Phase is where it failed: "submit", "client", "model", "close", or for KindTransfer a
	// connector.Phase.
	Phase string
	Err   error
}

func (e *RequestError) Error() string {
	return fmt.Sprintf("request %s: %s: %v", e.Request, e.Phase, e.Err)
}

func (e *RequestError) Unwrap() error { return e.Err }

// CacheBusyError is why the prefix cache was not reset: peers read or write blocks.
type CacheBusyError = core.CacheBusyError

var (
	errClosing    = errors.New("the engine is shutting down and takes no more requests")
	errClosed     = errors.New("the engine was shut down before the answer was complete")
	errClientGone = errors.New("the client gave the request up")
)

// refusal is why the machine did not take a request.
func refusal(id kv.RequestID, err error) *RequestError {
	e := &RequestError{Request: id, Kind: KindInvalid, Phase: "submit", Err: err}
	var (
		full     *core.QueueFullError
		long     *core.TooLongError
		never    *core.NeverFitsError
		transfer *connector.Error
	)
	switch {
	case errors.As(err, &full):
		e.Kind = KindOverload
	case errors.As(err, &transfer) && transfer.Phase == connector.PhaseLimit:
		e.Kind = KindOverload
	case errors.Is(err, core.ErrDuplicate):
		e.Field = "request_id"
	case errors.Is(err, core.ErrEmptyPrompt), errors.As(err, &long), errors.As(err, &never):
		e.Field = "prompt"
	default: // of the connector
		e.Field = "kv_transfer_params"
	}
	return e
}

// failure is why a request ended without a whole answer; nil for a nil err.
func failure(id kv.RequestID, err error) *RequestError {
	var e *RequestError
	var transfer *connector.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return e
	case errors.As(err, &transfer):
		return &RequestError{Request: id, Kind: KindTransfer, Phase: string(transfer.Phase), Err: err}
	}
	return &RequestError{Request: id, Kind: KindInternal, Phase: "model", Err: err}
}
