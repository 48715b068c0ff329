package openai

import (
	"encoding/json"
	"fmt"
)

// statusBadRequest is HTTP's; the package does not import net/http for a number.
const statusBadRequest = 400

// Error types as they appear in the `type` field.
const (
	TypeInvalidRequest = "invalid_request_error"
	TypeNotFound       = "not_found_error"
	TypeRateLimit      = "rate_limit_error"
	TypeServer         = "server_error"
	TypeTransfer       = "kv_transfer_error"
)

// Error codes as they appear in the `code` field. CodeTransfer is followed by "_" and the phase.
const (
	CodeInvalidJSON   = "invalid_json"
	CodeInvalidType   = "invalid_type"
	CodeInvalidValue  = "invalid_value"
	CodeMissing       = "missing_required_parameter"
	CodeUnsupported   = "unsupported_parameter"
	CodeTooLong       = "context_length_exceeded"
	CodeModelNotFound = "model_not_found"
	CodeBodyTooLarge  = "body_too_large"
	CodeTransfer      = "kv_transfer"
)

// Error is a failure in the API's shape. Status is the HTTP status it is sent with, not part of the
// body. Param names the field at fault and is empty when none is.
type Error struct {
	Status  int
	Message string
	Type    string
	Param   string
	Code    string
}

func (e *Error) Error() string { return e.Message }

// AppendJSON appends {"error":{…}}: param and code are null when empty.
func (e *Error) AppendJSON(dst []byte) []byte {
	body := struct {
		Error errorBody `json:"error"`
	}{errorBody{Message: e.Message, Type: e.Type, Param: nullable(e.Param), Code: nullable(e.Code)}}
	b, err := json.Marshal(body)
	if err != nil { // four strings cannot fail to marshal
		panic(err)
	}
	return append(dst, b...)
}

type errorBody struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

func nullable(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func badRequest(param, code, format string, args ...any) *Error {
	return &Error{
		Status: statusBadRequest, Type: TypeInvalidRequest, Param: param, Code: code,
		Message: fmt.Sprintf(format, args...),
	}
}

func wrongType(param, want string, got []byte) *Error {
	return badRequest(param, CodeInvalidType, "%s must be %s, not %s.", param, want, describe(got))
}

func wrongValue(param, format string, args ...any) *Error {
	return badRequest(param, CodeInvalidValue, "%s %s", param, fmt.Sprintf(format, args...))
}

// describe names a raw JSON value in an error: its kind, and its text when that is short.
func describe(raw []byte) string {
	if len(raw) == 0 {
		return "nothing"
	}
	switch raw[0] {
	case '{':
		return "an object"
	case '[':
		return "a list"
	case '"':
		return "the string " + clip(raw)
	case 't', 'f':
		return "the boolean " + string(raw)
	case 'n':
		return "null"
	}
	return "the number " + clip(raw)
}

func clip(raw []byte) string {
	if len(raw) <= maxQuoted {
		return string(raw)
	}
	cut := maxQuoted
	for cut > 0 && raw[cut]&0xC0 == 0x80 { // not inside a UTF-8 sequence
		cut--
	}
	return string(raw[:cut]) + "…"
}
