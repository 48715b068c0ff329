package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/kvferry/kvferry/openai"
)

// readBody reads a client's body within the limits. Release gives its bytes back to the bound of all
// bodies.
func (r *Router) readBody(w http.ResponseWriter, req *http.Request) (body []byte, release func(), err error) {
	tooLarge := &openai.Error{
		Status: http.StatusRequestEntityTooLarge, Type: openai.TypeInvalidRequest, Code: openai.CodeBodyTooLarge,
		Message: fmt.Sprintf("The request body is larger than %d bytes, the router's limit.", r.cfg.MaxBody),
	}
	size := req.ContentLength
	if size > r.cfg.MaxBody {
		return nil, nil, tooLarge
	}
	if size < 0 {
		size = r.cfg.MaxBody // not told: the most that it can be
	}
	if r.bodyBytes.Add(size) > r.cfg.MaxBodyBytes {
		r.bodyBytes.Add(-size)
		return nil, nil, overloaded("The router already holds bodies of %d bytes; try again later.", r.cfg.MaxBodyBytes)
	}
	release = func() { r.bodyBytes.Add(-size) }
	rc := http.NewResponseController(w)
	body, err = io.ReadAll(&pacedReader{http.MaxBytesReader(w, req.Body, r.cfg.MaxBody), rc})
	_ = rc.SetReadDeadline(time.Time{}) // from here on, the client may be silent
	if err == nil {
		return body, release, nil
	}
	release()
	var limit *http.MaxBytesError
	if errors.As(err, &limit) {
		return nil, nil, tooLarge
	}
	return nil, nil, &openai.Error{
		Status: http.StatusBadRequest, Type: openai.TypeInvalidRequest, Code: openai.CodeInvalidJSON,
		Message: "The request body could not be read: " + err.Error() + ".",
	}
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
