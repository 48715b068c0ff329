package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"

	"github.com/kvferry/kvferry/proxy/core"
)

// How telling a prefill engine to let a hold go has ended, as metric labels.
const (
	releaseDone    = "released"
	releaseOver    = "over"    // there was no such hold any more
	releaseFailed  = "failed"  // the engine was not reached, or would not
	releaseDropped = "dropped" // too many are being told, or the router has ended
)

// release tells P that no D will ask for what it keeps of an attempt. Nobody waits for it, it is tried
// once, within releaseTimeout, and at most maxReleases at a time: what is not reached by it is for the
// lease.
//
// If P's answer was read, it says how. If it was not, P is told by the key that went with the leg: whether
// the answer is written, crosses this or is never made, nothing is held afterwards. A P that knows no such
// release, which a stock one does not, is asked once.
func (r *Router) release(a *attempt) {
	t := a.targets[core.Prefill]
	if a.handoff.Releasable() {
		r.letGo(t, a.handoff.ReleaseBody(), r.engineHeader(a), nil)
	} else if !t.keyless.Load() {
		r.letGo(t, core.KeyReleaseBody(a.key), r.engineHeader(a), &t.keyless)
	}
}

// statusError is what /kv/release answers instead of 200.
type statusError struct {
	status int
	body   []byte
}

func (e *statusError) Error() string {
	return fmt.Sprintf("/kv/release answered %d: %.200s", e.status, e.body)
}

// unknown tells whether it comes from an engine that has no such endpoint, or does not understand what it is
// sent.
func (e *statusError) unknown() bool {
	switch e.status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return true
	}
	return false
}

// letGo tells an engine that nobody will ask for what it keeps. unknown, if not nil, is set when the engine does
// not know what it is told.
func (r *Router) letGo(t *target, body []byte, header http.Header, unknown *atomic.Bool) {
	do := func() {
		defer r.releases.Add(-1)
		ctx, cancel := context.WithTimeout(r.ctx, releaseTimeout)
		defer cancel()
		released, err := r.postRelease(ctx, t, header, body)
		var said *statusError
		if unknown != nil && errors.As(err, &said) && said.unknown() {
			unknown.Store(true)
		}
		if err != nil && r.ctx.Err() == nil {
			r.log.Warn("a "+t.leg.String()+" engine was not told to let go; KV that it keeps stays until its lease ends", "engine", t.name, "leg_id", header.Get("X-Request-Id"), "error", err)
		}
		r.countRelease(released, err)
	}
	if r.releases.Add(1) > maxReleases || r.ctx.Err() != nil || !r.words.start(do) {
		r.releases.Add(-1)
		r.metrics.released(releaseDropped)
	}
}

func (r *Router) countRelease(released bool, err error) {
	switch {
	case err != nil:
		r.metrics.released(releaseFailed)
	case released:
		r.metrics.released(releaseDone)
	default:
		r.metrics.released(releaseOver)
	}
}

func (r *Router) postRelease(ctx context.Context, t *target, header http.Header, body []byte) (released bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url.String()+"/kv/release", bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	req.Header = header
	req.Header["Idempotency-Key"] = nil // not sent: net/http tries anew if a kept connection was dead
	resp, err := r.transport.RoundTrip(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	answer, err := readAll(resp.Body, maxReleaseAnswer)
	if err != nil {
		return false, err
	}
	if resp.StatusCode != http.StatusOK {
		return false, &statusError{resp.StatusCode, answer}
	}
	var said struct{ Released bool }
	if err := json.Unmarshal(answer, &said); err != nil {
		return false, fmt.Errorf("/kv/release answered what cannot be read: %w", err)
	}
	return said.Released, nil
}

// engineHeader is what every message about an attempt has.
func (r *Router) engineHeader(a *attempt) http.Header {
	h := http.Header{}
	for _, name := range r.forward {
		if v := a.header[name]; len(v) > 0 {
			h[name] = v
		}
	}
	h.Set("Content-Type", "application/json")
	h.Set("User-Agent", "kvferry-router")
	h.Set("X-Request-Id", string(a.request))
	return h
}
