package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
)

// writeError answers in the API's shape. Nothing must have been written before.
func writeError(w http.ResponseWriter, e *openai.Error) {
	writeJSON(w, e.Status, e.AppendJSON(nil))
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that has gone needs no answer
}

func internalError() *openai.Error {
	return &openai.Error{Status: http.StatusInternalServerError, Type: openai.TypeServer, Message: "The router failed on this request; its log says why."}
}

func overloaded(format string, args ...any) *openai.Error {
	return &openai.Error{
		Status: http.StatusTooManyRequests, Type: openai.TypeRateLimit, Code: "router_overloaded",
		Message: fmt.Sprintf(format, args...),
	}
}

// connectFailure is a leg that could not be sent.
func connectFailure(t *target, err error) *core.Failure {
	what := err.Error()
	var op *net.OpError
	if errors.As(err, &op) && op.Err != nil {
		what = op.Err.Error()
	}
	return &core.Failure{
		Leg: t.leg, Engine: t.name, Kind: core.Connect, Status: http.StatusServiceUnavailable, RetryAfter: "1",
		Message: fmt.Sprintf("No connection to the %s engine at %s: %s. Start it, or correct the router's --%s address.", t.leg, t.name, what, t.leg),
	}
}

func brokenFailure(t *target, kind core.Kind, format string, args ...any) *core.Failure {
	return &core.Failure{
		Leg: t.leg, Engine: t.name, Kind: kind, Status: http.StatusBadGateway,
		Message: fmt.Sprintf("The %s engine at %s %s.", t.leg, t.name, fmt.Sprintf(format, args...)),
	}
}

// statusFailure is an engine's own error, for the client as it is.
func statusFailure(t *target, resp *http.Response, body []byte) *core.Failure {
	f := brokenFailure(t, core.Status, "answered with status %d", resp.StatusCode)
	if resp.StatusCode >= 400 && resp.StatusCode < 600 {
		f.Status = resp.StatusCode
	}
	f.Body = body
	said := readUpstream(body)
	f.NoKV = strings.HasPrefix(said.code, openai.CodeTransfer)
	f.ByClient = said.byClient(resp.StatusCode)
	f.RetryAfter = resp.Header.Get("Retry-After")
	return f
}

// failureBody is what the client is told: the engine's own error object with the leg and the engine
// added, or one made for the failure.
func failureBody(f *core.Failure) []byte {
	if o, err := openai.ParseObject(f.Body); err == nil {
		if inner, err := openai.ParseObject(o.Present("error")); err == nil {
			blame(inner, f)
			o.Set("error", inner.Bytes())
			return o.Bytes()
		}
		if o.Present("message") != nil { // the error object itself, as older engines answer
			blame(o, f)
			return []byte(`{"error":` + string(o.Bytes()) + `}`)
		}
	}
	e := openai.Error{Message: f.Message, Type: openai.TypeServer, Code: "upstream_" + string(f.Kind)}
	if text := strings.TrimSpace(string(f.Body)); text != "" {
		e.Message += " It said: " + strings.ToValidUTF8(clip(text, 500), "�")
	}
	if f.Status < 500 {
		e.Type = openai.TypeInvalidRequest
	}
	o, err := openai.ParseObject(e.AppendJSON(nil))
	if err != nil {
		panic("proxy: an own error is not JSON: " + err.Error())
	}
	inner, err := openai.ParseObject(o.Raw("error"))
	if err != nil {
		panic("proxy: an own error is not JSON: " + err.Error())
	}
	blame(inner, f)
	o.Set("error", inner.Bytes())
	return o.Bytes()
}

func blame(o *openai.Object, f *core.Failure) {
	engine, err := json.Marshal(f.Engine)
	if err != nil { // a string cannot fail to marshal
		panic(err)
	}
	o.Set("leg", []byte(`"`+f.Leg.String()+`"`))
	o.Set("engine", engine)
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}

// upstream is what an engine's error says of its reason, as far as it is text.
type upstream struct{ code, param string }

func readUpstream(body []byte) upstream {
	var e struct {
		Error struct {
			Code  any `json:"code"`
			Param any `json:"param"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &e) != nil {
		return upstream{}
	}
	var u upstream
	u.code, _ = e.Error.Code.(string)
	u.param, _ = e.Error.Param.(string)
	return u
}

// byClient tells whether the engine refuses what the client wants. That it is full is not the client's fault, nor
// what is wrong with a transfer or its parameters, which the router writes.
func (u upstream) byClient(status int) bool {
	return status/100 == 4 && status != http.StatusTooManyRequests && !strings.HasPrefix(u.code, openai.CodeTransfer) && !strings.HasPrefix(u.param, "kv_transfer_params")
}
