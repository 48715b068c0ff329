package api

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/kvferry/kvferry/openai"
)

// readBody reads a body within the limits of size and silence.
func (s *Server) readBody(w http.ResponseWriter, req *http.Request) ([]byte, error) {
	tooLarge := &openai.Error{
		Status: http.StatusRequestEntityTooLarge, Type: openai.TypeInvalidRequest, Code: openai.CodeBodyTooLarge,
	}
	tooLarge.Message = invalid("", "", "The request body is larger than %d bytes, this engine's limit.", s.cfg.MaxBody).Message
	if req.ContentLength > s.cfg.MaxBody {
		return nil, tooLarge
	}
	rc := http.NewResponseController(w)
	body, err := io.ReadAll(&pacedReader{http.MaxBytesReader(w, req.Body, s.cfg.MaxBody), rc})
	_ = rc.SetReadDeadline(time.Time{}) // from here on, the client may be silent
	var limit *http.MaxBytesError
	switch {
	case errors.As(err, &limit):
		return nil, tooLarge
	case err != nil:
		return nil, invalid("", openai.CodeInvalidJSON, "The request body could not be read: %v.", err)
	}
	return body, nil
}

// pacedReader bounds the silence of a client inside its body.
type pacedReader struct {
	r  io.Reader
	rc *http.ResponseController
}

func (p *pacedReader) Read(b []byte) (int, error) {
	_ = p.rc.SetReadDeadline(time.Now().Add(clientReadTimeout)) // a test's writer has no connection
	return p.r.Read(b)
}
