package api

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/openai"
)

// readBody reads a body of at most limit bytes, within the limits of silence.
func (s *Server) readBody(w http.ResponseWriter, req *http.Request, limit int64) ([]byte, error) {
	tooLarge := &openai.Error{
		Status: http.StatusRequestEntityTooLarge, Type: openai.TypeInvalidRequest, Code: openai.CodeBodyTooLarge,
	}
	tooLarge.Message = invalid("", "", "The request body is larger than %d bytes, this engine's limit.", limit).Message
	if req.ContentLength > limit {
		return nil, tooLarge
	}
	rc := http.NewResponseController(w)
	p := &pacedReader{s: s, r: http.MaxBytesReader(w, req.Body, limit), rc: rc, start: time.Now()}
	body, err := io.ReadAll(p)
	_ = rc.SetReadDeadline(time.Time{}) // from here on, the client may be silent
	var over *http.MaxBytesError
	switch {
	case err == nil:
		return body, nil
	case errors.As(err, &over):
		err = tooLarge
	case !errors.Is(err, errBodies):
		err = invalid("", openai.CodeInvalidJSON, "The request body could not be read: %v.", err)
	}
	s.bodies.Add(-p.n)
	return nil, err
}

// bodyDone tells that a body that readBody gave is not needed any more.
func (s *Server) bodyDone(body []byte) { s.bodies.Add(-int64(len(body))) }

var errBodies = &openai.Error{
	Status: http.StatusTooManyRequests, Type: openai.TypeRateLimit, Code: string(engine.KindOverload),
	Message: "The engine is reading as many bytes of request bodies as it may at a time; try again later.",
}

// pacedReader bounds the silence of a client inside its body, its slowness, and what all bodies take
// together.
type pacedReader struct {
	s     *Server
	r     io.Reader
	rc    *http.ResponseController
	start time.Time
	n     int64 // bytes read, which are in Server.bodies
}

func (p *pacedReader) Read(b []byte) (int, error) {
	by := time.Now().Add(p.s.silence)
	if slow := p.start.Add(p.s.silence + time.Duration(p.n)*time.Second/minBodyRate); slow.Before(by) {
		by = slow
	}
	_ = p.rc.SetReadDeadline(by) // a test's writer has no connection
	n, err := p.r.Read(b)
	p.n += int64(n)
	if p.s.bodies.Add(int64(n)) > p.s.maxBodies && (err == nil || err == io.EOF) {
		err = errBodies
	}
	return n, err
}
