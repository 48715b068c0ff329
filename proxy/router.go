package proxy

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/proxy/core"
)

// Router is the HTTP handler for clients. Its methods may be called from any goroutine.
type Router struct {
	cfg       Config
	log       *slog.Logger
	mux       *http.ServeMux
	transport *http.Transport
	pools     [2]*pool // by core.Leg
	metrics   *metrics
	turns     *turns
	forward   []string      // client headers for the engines
	patience  time.Duration // clientWriteTimeout
	grace     time.Duration // closeGrace

	gate      gate
	inFlight  atomic.Int64
	bodyBytes atomic.Int64
	releases  atomic.Int64 // that are under way

	ctx    context.Context // ends with Close; of questions that no single request owns
	cancel context.CancelFunc
	asking errands
	words  errands // releases
}

// tracing are client headers that belong to one request; forwardAlways are all that engines may need.
var (
	tracing       = []string{"Traceparent", "Tracestate", "Baggage"}
	forwardAlways = append([]string{"Authorization"}, tracing...)
)

// New makes a router. It contacts nobody.
func New(cfg Config) (*Router, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	r := &Router{cfg: cfg, log: cfg.Log, mux: http.NewServeMux(), patience: clientWriteTimeout, grace: closeGrace}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.transport = &http.Transport{
		DialContext:            (&net.Dialer{Timeout: cfg.ConnectTimeout}).DialContext,
		TLSHandshakeTimeout:    cfg.ConnectTimeout,
		DisableCompression:     true,
		MaxIdleConns:           0,
		MaxIdleConnsPerHost:    idlePerEngine,
		IdleConnTimeout:        upstreamIdle,
		MaxResponseHeaderBytes: maxHeader,
		WriteBufferSize:        64 << 10,
		ReadBufferSize:         32 << 10,
	}
	r.pools[core.Prefill] = newPool(core.Prefill, cfg.Prefill, cfg.PrefillPolicy)
	r.pools[core.Decode] = newPool(core.Decode, cfg.Decode, cfg.DecodePolicy)
	r.turns = newTurns(cfg.ConversationTTL)
	r.metrics = newMetrics(r)
	for _, h := range append(append([]string(nil), forwardAlways...), cfg.ForwardHeaders...) {
		r.forward = append(r.forward, http.CanonicalHeaderKey(h))
	}
	r.routes()
	return r, nil
}

func (r *Router) routes() {
	for _, api := range []core.API{core.Completions, core.ChatCompletions} {
		r.mux.HandleFunc("POST "+api.Path(), func(w http.ResponseWriter, req *http.Request) { r.serveCompletion(w, req, api) })
	}
	r.mux.HandleFunc("GET /v1/models", r.serveModels)
	r.mux.HandleFunc("GET /health", r.serveHealth)
	r.mux.HandleFunc("GET /ready", r.serveReady)
	r.mux.HandleFunc("GET /status", r.serveStatus)
	r.mux.Handle("GET /metrics", r.metrics.handler())
	r.mux.HandleFunc("/", serveUnknown)
}

// ServeHTTP serves one request. A panic costs that request only.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	tw := &trackingWriter{ResponseWriter: w}
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if p == http.ErrAbortHandler || tw.wrote {
			panic(http.ErrAbortHandler) // the connection is cut: what was sent is not a whole answer
		}
		r.log.Error("a handler failed", "path", req.URL.Path, "panic", p)
		writeError(w, internalError())
	}()
	r.mux.ServeHTTP(tw, req)
}

// trackingWriter remembers whether an answer has begun.
type trackingWriter struct {
	http.ResponseWriter
	wrote bool
}

func (t *trackingWriter) WriteHeader(status int) {
	t.wrote = t.wrote || status >= 200
	t.ResponseWriter.WriteHeader(status)
}

func (t *trackingWriter) Write(b []byte) (int, error) {
	t.wrote = true
	return t.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController find the connection.
func (t *trackingWriter) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// Server is an http.Server for the router, with bounds for slow clients. Its Addr is not set.
func (r *Router) Server() *http.Server {
	return &http.Server{
		Handler:           r,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       keepAlive,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(r.log.Handler(), slog.LevelWarn),
	}
}
