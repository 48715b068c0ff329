package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/openai"
)

// serveReset empties the prefix cache. While peers read or write blocks it answers 409, with
// ?wait=SECONDS only when they still do after that time.
func (s *Server) serveReset(w http.ResponseWriter, req *http.Request) {
	wait, err := resetWait(req.URL.Query()["wait"])
	if err != nil {
		writeError(w, asAPIError(err))
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), wait)
	defer cancel()
	blocks, err := s.engine.ResetPrefixCache(ctx, wait > 0)
	var busy *engine.CacheBusyError
	switch {
	case req.Context().Err() != nil:
		w.WriteHeader(statusClientGone)
	case errors.As(err, &busy):
		writeError(w, &openai.Error{Status: http.StatusConflict, Type: openai.TypeServer, Code: "kv_in_use", Message: busy.Error()})
	case err != nil:
		writeError(w, &openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: string(engine.KindUnavailable), Message: err.Error()})
	default:
		_ = writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"reset":true,"blocks":%d}`, blocks))
	}
}

func resetWait(values []string) (time.Duration, error) {
	if len(values) == 0 {
		return 0, nil
	}
	most := maxResetWait.Seconds()
	seconds, err := strconv.ParseFloat(values[0], 64)
	if err != nil || len(values) > 1 || !(seconds >= 0 && seconds <= most) {
		return 0, invalid("wait", openai.CodeInvalidValue, "wait must be given once, as a number of seconds from 0 to %v.", most)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
