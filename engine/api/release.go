package api

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// releaseRequest is the body of POST /kv/release.
type releaseRequest struct {
	ID    *kv.RequestID  `json:"request_id"`
	Lease *kv.Generation `json:"lease"`
	Token *string        `json:"token"`
	Key   *string        `json:"key"`
}

// serveRelease lets a hold go that nobody will ask for.
func (s *Server) serveRelease(w http.ResponseWriter, req *http.Request) {
	body, err := s.readBody(w, req, maxReleaseBody)
	if err != nil {
		writeError(w, asAPIError(err))
		return
	}
	r, err := parseRelease(body)
	s.bodyDone(body)
	if err != nil {
		writeError(w, asAPIError(err))
		return
	}
	if r.Key != nil {
		s.releaseByKey(w, *r.Key)
		return
	}
	if !s.mayRelease(*r.ID, *r.Lease, *r.Token) {
		writeError(w, &openai.Error{
			Status: http.StatusForbidden, Type: openai.TypeInvalidRequest, Param: "token", Code: "wrong_token",
			Message: "The token is not of this request_id and lease, or the engine was started anew since; send all three as the prefill answer's kv_transfer_params have them.",
		})
		return
	}
	released, err := s.engine.Release(*r.ID, *r.Lease)
	if err != nil {
		writeError(w, unavailable(err))
		return
	}
	writeReleased(w, released)
}

// releaseByKey lets go what the request with a key holds, or will. One that runs ends without a hold.
func (s *Server) releaseByKey(w http.ResponseWriter, key string) {
	holds, released := s.keys.release(time.Now(), key)
	var failed error
	for _, h := range holds {
		ok, err := s.engine.Release(h.id, h.lease)
		if err != nil {
			failed = err
		}
		released = released || ok
	}
	if failed != nil {
		writeError(w, unavailable(failed))
		return
	}
	writeReleased(w, released)
}

func writeReleased(w http.ResponseWriter, released bool) {
	_ = writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"released":%t}`, released))
}

func unavailable(err error) *openai.Error {
	return &openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: string(engine.KindUnavailable), Message: err.Error()}
}

func parseRelease(body []byte) (releaseRequest, error) {
	var r releaseRequest
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	err := d.Decode(&r)
	if err == nil {
		if _, more := d.Token(); more != io.EOF {
			err = fmt.Errorf("something follows the object")
		}
	}
	const shape = `want {"request_id": TEXT, "lease": NUMBER, "token": TEXT} or {"key": TEXT}`
	switch {
	case err != nil:
		return r, invalid("", openai.CodeInvalidJSON, "The body cannot be read: %v; "+shape+".", err)
	case r.Key != nil && (r.ID != nil || r.Lease != nil || r.Token != nil):
		return r, invalid("key", openai.CodeInvalidValue, "key stands beside other fields; "+shape+".")
	case r.Key != nil && !wire.IsReleaseKey(*r.Key):
		return r, invalid("key", openai.CodeInvalidValue, "key must be %d hexadecimal digits in lower case; "+shape+".", wire.ReleaseKeyLen)
	case r.Key != nil:
	case r.ID == nil || *r.ID == "":
		return r, invalid("request_id", openai.CodeInvalidValue, "request_id is missing; "+shape+".")
	case r.Lease == nil:
		return r, invalid("lease", openai.CodeInvalidValue, "lease is missing; "+shape+".")
	case r.Token == nil:
		return r, invalid("token", openai.CodeInvalidValue, "token is missing; "+shape+".")
	}
	return r, nil
}

// mayRelease tells whether a token is that of a hold.
func (s *Server) mayRelease(id kv.RequestID, lease kv.Generation, token string) bool {
	return hmac.Equal([]byte(token), []byte(s.releaseToken(id, lease)))
}

// releaseToken is what whoever was given a hold's parameters has, and nobody else.
func (s *Server) releaseToken(id kv.RequestID, lease kv.Generation) string {
	h := hmac.New(sha256.New, s.secret[:])
	_, _ = io.WriteString(h, strconv.FormatUint(uint64(lease), 10)+" "+string(id)) // never fails
	return hex.EncodeToString(h.Sum(nil)[:16])
}
