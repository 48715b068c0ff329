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

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
)

// releaseRequest is the body of POST /kv/release.
type releaseRequest struct {
	ID    *kv.RequestID  `json:"request_id"`
	Lease *kv.Generation `json:"lease"`
	Token *string        `json:"token"`
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
	if !s.mayRelease(*r.ID, *r.Lease, *r.Token) {
		writeError(w, &openai.Error{
			Status: http.StatusForbidden, Type: openai.TypeInvalidRequest, Param: "token", Code: "wrong_token",
			Message: "The token is not of this request_id and lease, or the engine was started anew since; send all three as the prefill answer's kv_transfer_params have them.",
		})
		return
	}
	released, err := s.engine.Release(*r.ID, *r.Lease)
	if err != nil {
		writeError(w, &openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: string(engine.KindUnavailable), Message: err.Error()})
		return
	}
	_ = writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"released":%t}`, released))
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
	const shape = `want {"request_id": TEXT, "lease": NUMBER, "token": TEXT}`
	switch {
	case err != nil:
		return r, invalid("", openai.CodeInvalidJSON, "The body cannot be read: %v; "+shape+".", err)
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
