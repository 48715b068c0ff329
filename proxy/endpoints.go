package proxy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
)

func serveUnknown(w http.ResponseWriter, req *http.Request) {
	e := &openai.Error{Status: http.StatusNotFound, Type: openai.TypeNotFound, Code: "unknown_url"}
	e.Message = fmt.Sprintf("There is no %s %s here; the router serves POST /v1/completions, POST /v1/chat/completions, "+
		"GET /v1/models, /health, /ready, /status and /metrics.", req.Method, clip(req.URL.Path, 100))
	writeError(w, e)
}

// serveHealth says that the router runs.
func (r *Router) serveHealth(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

// serveModels asks the decode engines in turn until one answers.
func (r *Router) serveModels(w http.ResponseWriter, req *http.Request) {
	ctx, cancel := context.WithTimeout(req.Context(), modelsTimeout)
	defer cancel()
	var last *core.Failure
	var avoid *target
	for range maxAttempts {
		t := r.pools[core.Decode].take(avoid)
		status, body, err := r.get(ctx, t, "/v1/models", maxAnswer)
		if err == nil {
			t.give(nil)
			writeJSON(w, status, body)
			return
		}
		last = connectFailure(t, err)
		t.give(last)
		avoid = t
		if len(r.pools[core.Decode].targets) == 1 {
			break
		}
	}
	w.Header().Set("Retry-After", last.RetryAfter)
	writeJSON(w, last.Status, failureBody(last))
}

// Readiness is the answer of /ready.
type Readiness struct {
	Ready   bool              `json:"ready"`
	Prefill map[string]string `json:"prefill"` // "ready", or what is wrong
	Decode  map[string]string `json:"decode"`
}

// serveReady says whether a request can be served: at least one engine of each role is ready.
func (r *Router) serveReady(w http.ResponseWriter, req *http.Request) {
	state := r.Ready(req.Context())
	body, err := json.Marshal(state)
	if err != nil {
		writeError(w, internalError())
		return
	}
	status := http.StatusOK
	if !state.Ready {
		status = http.StatusServiceUnavailable
	}
	writeJSON(w, status, body)
}

// Ready asks every engine, all at once, and takes at most some seconds.
func (r *Router) Ready(ctx context.Context) Readiness {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var wg sync.WaitGroup
	var states [2][]string
	for leg, p := range r.pools {
		states[leg] = make([]string, len(p.targets))
		for i, t := range p.targets {
			wg.Go(func() { states[leg][i] = r.probe(ctx, t) })
		}
	}
	wg.Wait()
	out := Readiness{Prefill: map[string]string{}, Decode: map[string]string{}}
	ready := [2]bool{}
	for leg, byName := range []map[string]string{out.Prefill, out.Decode} {
		for i, t := range r.pools[leg].targets {
			byName[t.name] = states[leg][i]
			if leg == int(core.Decode) && byName[t.name] == "ready" {
				byName[t.name] = cmp.Or(r.unmatched(t, out.Prefill), "ready")
			}
			ready[leg] = ready[leg] || byName[t.name] == "ready"
		}
	}
	out.Ready = ready[core.Prefill] && ready[core.Decode]
	return out
}

// probe asks an engine whether it is ready; a stock one only knows /health. A prefill engine must
// also tell its coordinates.
func (r *Router) probe(ctx context.Context, t *target) string {
	status, body, err := r.get(ctx, t, "/ready", maxCoordinates)
	if err == nil && status == http.StatusNotFound {
		status, body, err = r.get(ctx, t, "/health", maxCoordinates)
	}
	if err != nil {
		return err.Error()
	}
	if status != http.StatusOK {
		return fmt.Sprintf("status %d: %.200s", status, body)
	}
	var wrong *wrongEngineError
	if _, _, err := r.coordinates(ctx, t); err != nil && (t.leg == core.Prefill || errors.As(err, &wrong)) {
		return err.Error()
	}
	return "ready"
}

// unmatched is why a decode engine has no prefill engine to work with; "" if it has one, or if none is
// ready.
func (r *Router) unmatched(d *target, prefill map[string]string) string {
	dp, _, ok := d.known()
	if !ok {
		return ""
	}
	why := ""
	for _, t := range r.pools[core.Prefill].targets {
		p, _, ok := t.known()
		if !ok || prefill[t.name] != "ready" {
			continue
		}
		_, err := core.Pair(p, dp)
		if err == nil {
			return ""
		}
		why = err.Error()
	}
	return why
}

// engineStatus is one engine in the answer of /status.
type engineStatus struct {
	Engine    string      `json:"engine"`
	InFlight  int         `json:"in_flight"`
	Requests  uint64      `json:"requests"`
	Failures  uint64      `json:"failures"`
	Failing   bool        `json:"failing,omitempty"` // its last leg failed by its own fault
	LastError string      `json:"last_error,omitempty"`
	EngineID  kv.EngineID `json:"engine_id,omitempty"`
	Side      string      `json:"side_channel,omitempty"`
	// Mode is the engine's transfer mode, as far as it is known.
	Mode kv.TransferMode `json:"transfer_mode,omitempty"`
}

func (r *Router) serveStatus(w http.ResponseWriter, _ *http.Request) {
	out := struct {
		InFlight  int64          `json:"in_flight"`
		BodyBytes int64          `json:"body_bytes"`
		Prefill   []engineStatus `json:"prefill"`
		Decode    []engineStatus `json:"decode"`
	}{r.inFlight.Load(), r.bodyBytes.Load(), r.pools[core.Prefill].status(), r.pools[core.Decode].status()}
	body, err := json.Marshal(out)
	if err != nil {
		writeError(w, internalError())
		return
	}
	writeJSON(w, http.StatusOK, body)
}

func (p *pool) status() []engineStatus {
	out := make([]engineStatus, 0, len(p.targets))
	for _, t := range p.targets {
		t.mu.Lock()
		s := engineStatus{
			Engine: t.name, InFlight: t.mu.inFlight, Requests: t.mu.requests, Failures: t.mu.failures, LastError: t.mu.lastError,
			Failing: t.mu.failing,
		}
		peer := t.fixed
		if peer == nil {
			peer = t.mu.peer
		}
		if peer != nil {
			s.EngineID, s.Mode = peer.EngineID, peer.Mode
			if peer.Port > 0 {
				s.Side = net.JoinHostPort(peer.Host, strconv.Itoa(peer.Port))
			}
		}
		t.mu.Unlock()
		out = append(out, s)
	}
	return out
}
