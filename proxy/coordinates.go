package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/proxy/core"
)

// question is one GET /kv/coordinates under way; all legs that need the answer wait for it together.
// The other fields are set before done is closed.
type question struct {
	done chan struct{}
	peer core.Peer
	gen  uint64
	err  error
}

// coordinates tells where an engine's side channel is and in which mode it works: from memory, or by
// asking the engine. The generation names this answer to forget.
func (r *Router) coordinates(ctx context.Context, t *target) (core.Peer, uint64, error) {
	if t.fixed != nil {
		return *t.fixed, 0, nil
	}
	t.mu.Lock()
	if t.mu.peer != nil {
		peer, gen := *t.mu.peer, t.mu.gen
		t.mu.Unlock()
		return peer, gen, nil
	}
	q := t.mu.question
	if q == nil {
		q = &question{done: make(chan struct{})}
		t.mu.question = q
		if !r.asking.start(func() { r.ask(t, q) }) {
			t.mu.question = nil
			t.mu.Unlock()
			return core.Peer{}, 0, r.ctx.Err()
		}
	}
	t.mu.Unlock()
	select {
	case <-q.done:
		return q.peer, q.gen, q.err
	case <-ctx.Done():
		return core.Peer{}, 0, ctx.Err()
	}
}

// ask puts the question for all who wait.
func (r *Router) ask(t *target, q *question) {
	ctx, cancel := context.WithTimeout(r.ctx, coordinatesTimeout)
	defer cancel()
	peer, err := r.fetchCoordinates(ctx, t)
	r.metrics.coordinates(err)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.question = nil
	if err == nil {
		t.mu.gen++
		t.mu.peer = &peer
	}
	q.peer, q.gen, q.err = peer, t.mu.gen, err
	close(q.done)
}

// forget drops coordinates that have proven wrong, unless they were asked anew since.
func (t *target) forget(gen uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.gen == gen {
		t.mu.peer = nil
	}
}

func (r *Router) fetchCoordinates(ctx context.Context, t *target) (core.Peer, error) {
	var p core.Peer
	status, body, err := r.get(ctx, t, "/kv/coordinates", maxCoordinates)
	switch {
	case err != nil:
		return p, err
	case status == http.StatusNotFound && (t.leg == core.Decode || r.cfg.Sequential):
		return p, nil // a stock engine: nothing is known, and nothing needed
	case status == http.StatusNotFound:
		return p, errors.New("the engine has no /kv/coordinates; name its engine id, side channel and sizes to the router: --prefill URL,engine-id=…,side-channel=HOST:PORT, or mode=pull")
	case status != http.StatusOK:
		return p, fmt.Errorf("/kv/coordinates answered %d: %.200s", status, body)
	}
	if err := json.Unmarshal(body, &p); err != nil {
		return p, fmt.Errorf("/kv/coordinates answered what is no coordinates: %w", err)
	}
	if t.leg == core.Decode {
		err = p.CheckDecode()
	} else {
		p, err = p.Check(t.url.Hostname())
	}
	if err != nil {
		return p, &wrongEngineError{err}
	}
	if t.leg == core.Prefill && kv.OwnHost(p.Host) && !kv.OwnHost(t.url.Hostname()) {
		r.log.Warn("an engine on another host says that its side channel is at an address by which every host means itself; unless all decode engines "+
			"run on its host, start it with --side-channel HOST:PORT or --advertise-host HOST by which they reach it",
			"engine", t.url.Host, "side_channel_host", p.Host)
	}
	return p, nil
}

// get asks an engine for something small and reads the whole answer, at most limit bytes.
func (r *Router) get(ctx context.Context, t *target, path string, limit int64) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.url.String()+path, nil)
	if err != nil {
		return 0, nil, err
	}
	resp, err := r.transport.RoundTrip(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err := readAll(resp.Body, limit)
	return resp.StatusCode, body, err
}

// readAll reads to the end; more than limit bytes are an error.
func readAll(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		return nil, fmt.Errorf("the answer is larger than %d bytes", limit)
	}
	return b, err
}

// forgetAny drops whatever coordinates are known: the engine itself cannot be reached as it was.
func (t *target) forgetAny() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.peer = nil
}
