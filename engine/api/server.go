package api

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
)

// Config says what a Server serves.
type Config struct {
	// Engine does the work. The server does not close it.
	Engine *engine.Engine
	// NoRequestIDSuffix leaves the random suffix of internal request ids away.
	NoRequestIDSuffix bool
	// MaxBody bounds a request body in bytes. Default: DefaultMaxBody.
	MaxBody int64
	// Collectors are shown at /metrics, too.
	Collectors []prometheus.Collector
	// Log gets faults of this server. Requests are the engine's to log. Default: none.
	Log *slog.Logger
}

// backend is what the server needs of an engine; *engine.Engine by way of realEngine.
type backend interface {
	Submit(ctx context.Context, r engine.Request) (stream, error)
	Coordinates() engine.Coordinates
	Stats() engine.Stats
	TierStats() (engine.TierStats, bool)
	Model() engine.ModelInfo
	Tokenizer() *model.Tokenizer
	Ready() error
	Release(id kv.RequestID, lease kv.Generation) (bool, error)
	ResetPrefixCache(ctx context.Context, wait bool) (blocks int, err error)
}

// stream is what the server needs of an *engine.Stream.
type stream interface {
	Next(ctx context.Context) (engine.Output, error)
	Close()
	Discard()
}

type realEngine struct{ *engine.Engine }

func (e realEngine) Submit(ctx context.Context, r engine.Request) (stream, error) {
	s, err := e.Engine.Submit(ctx, r)
	if err != nil {
		return nil, err // not a nil *engine.Stream in an interface
	}
	return s, nil
}

// Server is the HTTP handler of one engine. Its methods may be called from any goroutine.
type Server struct {
	engine   backend
	cfg      Config
	log      *slog.Logger
	mux      *http.ServeMux
	metrics  *metrics
	created  int64
	inFlight atomic.Int64
	bodies   atomic.Int64 // bytes of bodies that are being read or parsed
	conns    *conns
	keys     *keys
	secret   [32]byte // of release tokens

	patience  time.Duration // clientWriteTimeout
	silence   time.Duration // clientReadTimeout
	maxBodies int64         // maxBodyBytes
}

// New makes the server of an engine.
func New(cfg Config) (*Server, error) {
	if cfg.Engine == nil {
		return nil, errors.New("engine api: the configuration names no engine")
	}
	return newServer(cfg, realEngine{cfg.Engine})
}

func newServer(cfg Config, e backend) (*Server, error) {
	switch {
	case cfg.MaxBody < 0:
		return nil, errors.New("engine api: the bound of a body is negative")
	case cfg.MaxBody == 0:
		cfg.MaxBody = DefaultMaxBody
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{engine: e, cfg: cfg, log: cfg.Log, mux: http.NewServeMux(), created: time.Now().Unix(),
		conns: newConns(maxConns), keys: newKeys(), patience: clientWriteTimeout, silence: clientReadTimeout, maxBodies: maxBodyBytes}
	_, _ = rand.Read(s.secret[:]) // never fails
	s.metrics = newMetrics(e, &s.inFlight)
	for _, c := range cfg.Collectors {
		if err := s.metrics.registry.Register(c); err != nil {
			return nil, fmt.Errorf("engine api: a collector: %w", err)
		}
	}
	s.mux.HandleFunc("POST /v1/completions", s.serveCompletions)
	s.mux.HandleFunc("POST /v1/chat/completions", s.serveChat)
	s.mux.HandleFunc("GET /v1/models", s.serveModels)
	s.mux.HandleFunc("GET /health", s.serveHealth)
	s.mux.HandleFunc("GET /ready", s.serveReady)
	s.mux.HandleFunc("GET /kv/coordinates", s.serveCoordinates)
	s.mux.HandleFunc("POST /kv/release", s.serveRelease)
	s.mux.HandleFunc("POST /kv/reset-prefix-cache", s.serveReset)
	s.mux.Handle("GET /metrics", s.metrics.handler())
	s.mux.HandleFunc("/", serveUnknown)
	return s, nil
}

// ServeHTTP serves one request. A panic costs that request only.
func (s *Server) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	defer s.conns.handle(req.Context())()
	tw := &trackingWriter{ResponseWriter: w}
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(s.patience)) // a test's writer has no connection
	if req.Body != nil && req.Body != http.NoBody {
		// What the handler leaves of the body is read behind it, so that the connection can go on.
		defer func() { _ = rc.SetReadDeadline(time.Now().Add(s.silence)) }()
	}
	defer func() {
		if p := recover(); p != nil {
			if p == http.ErrAbortHandler || tw.status != 0 {
				panic(http.ErrAbortHandler) // the connection is cut: what was sent is not a whole answer
			}
			s.log.Error("a handler failed", "path", req.URL.Path, "panic", p)
			writeError(tw, internalError())
		}
		s.metrics.served(req.Pattern, tw.status)
	}()
	s.mux.ServeHTTP(tw, req)
}

// trackingWriter remembers the status that was sent; 0 is none.
type trackingWriter struct {
	http.ResponseWriter
	status int
}

func (t *trackingWriter) WriteHeader(status int) {
	if t.status == 0 && status >= 200 {
		t.status = status
	}
	t.ResponseWriter.WriteHeader(status)
}

func (t *trackingWriter) Write(b []byte) (int, error) {
	if t.status == 0 {
		t.status = http.StatusOK
	}
	return t.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController find the connection.
func (t *trackingWriter) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// Server is an http.Server for the engine, with bounds for slow clients. Its Addr is not set.
func (s *Server) Server() *http.Server {
	return &http.Server{
		Handler:           s,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       keepAlive,
		MaxHeaderBytes:    maxHeader,
		ConnContext:       s.conns.opened,
		ConnState:         s.conns.changed,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
}

func serveUnknown(w http.ResponseWriter, req *http.Request) {
	writeError(w, unknownURL(req.Method, req.URL.Path))
}

func (s *Server) serveHealth(w http.ResponseWriter, _ *http.Request) {
	_ = writeJSON(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

func (s *Server) serveReady(w http.ResponseWriter, _ *http.Request) {
	if err := s.engine.Ready(); err != nil {
		writeError(w, &openai.Error{
			Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Code: "not_ready", Message: err.Error(),
		})
		return
	}
	_ = writeJSON(w, http.StatusOK, []byte(`{"ready":true}`))
}

func (s *Server) serveCoordinates(w http.ResponseWriter, _ *http.Request) {
	s.writeValue(w, s.engine.Coordinates())
}

func (s *Server) serveModels(w http.ResponseWriter, _ *http.Request) {
	m := s.engine.Model()
	own := openai.Model{ID: m.Name, Object: "model", Created: s.created, OwnedBy: "kvferry", MaxModelLen: m.MaxContext}
	list := openai.ModelList{Object: "list", Data: []openai.Model{own}}
	for _, name := range m.Adapters {
		adapter := own
		adapter.ID, adapter.Parent = name, m.Name
		list.Data = append(list.Data, adapter)
	}
	s.writeValue(w, list)
}

// writeValue answers 200 with a value as JSON.
func (s *Server) writeValue(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		s.log.Error("an answer cannot be encoded", "error", err)
		writeError(w, internalError())
		return
	}
	_ = writeJSON(w, http.StatusOK, b)
}
