package api

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// statusClientGone is in metrics only: the client has closed the connection.
const statusClientGone = 499

// writeError answers in the API's shape. Nothing must have been written before.
func writeError(w http.ResponseWriter, e *openai.Error) {
	if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	_ = writeJSON(w, e.Status, e.AppendJSON(nil)) // a client that has gone needs no answer
}

func writeJSON(w http.ResponseWriter, status int, body []byte) error {
	// An answer may come long after its request, when the deadline of ServeHTTP is over.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(clientWriteTimeout))
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, err := w.Write(body)
	return err
}

func internalError() *openai.Error {
	return &openai.Error{Status: http.StatusInternalServerError, Type: openai.TypeServer, Message: "The engine failed on this request; its log says why."}
}

func unknownURL(method, path string) *openai.Error {
	if len(path) > 100 {
		path = path[:100] + "…"
	}
	return &openai.Error{
		Status: http.StatusNotFound, Type: openai.TypeNotFound, Code: "unknown_url",
		Message: fmt.Sprintf("There is no %s %s here; the engine serves POST /v1/completions, POST /v1/chat/completions, "+
			"GET /v1/models, /health, /ready, /metrics and /kv/coordinates, and POST /kv/release and /kv/reset-prefix-cache.", method, path),
	}
}

func invalid(param, code, format string, args ...any) *openai.Error {
	return &openai.Error{
		Status: http.StatusBadRequest, Type: openai.TypeInvalidRequest, Param: param, Code: code,
		Message: fmt.Sprintf(format, args...),
	}
}

// asAPIError gives any failure of a request its status and shape. It is the one place where that is
// decided.
func asAPIError(err error) *openai.Error {
	var api *openai.Error
	if errors.As(err, &api) {
		return api
	}
	var param *wire.ParamError
	if errors.As(err, &param) {
		field := "kv_transfer_params"
		if param.Field != field {
			field += "." + param.Field
		}
		return invalid(field, openai.CodeInvalidValue, "%s", param.Error())
	}
	var req *engine.RequestError
	if !errors.As(err, &req) {
		return internalError()
	}
	e := &openai.Error{Type: openai.TypeServer, Code: string(req.Kind), Message: req.Error()}
	switch req.Kind {
	case engine.KindInvalid:
		e.Status, e.Type, e.Code = http.StatusBadRequest, openai.TypeInvalidRequest, openai.CodeInvalidValue
		if e.Param = req.Field; e.Param == "request_id" {
			e.Param = "X-Request-Id"
		}
	case engine.KindOverload:
		e.Status, e.Type = http.StatusTooManyRequests, openai.TypeRateLimit
	case engine.KindUnavailable, engine.KindAborted: // an abort that a client sees is the engine's closing
		e.Status = http.StatusServiceUnavailable
	case engine.KindTransfer:
		e.Status, e.Type, e.Code = http.StatusBadGateway, openai.TypeTransfer, openai.CodeTransfer+"_"+req.Phase
	default:
		e.Status = http.StatusInternalServerError
	}
	return e
}
