package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvferry/kvferry/engine"
)

// maxRemembered bounds the request lines that are kept for somebody who asks later.
const maxRemembered = 4096

// requestLine is an engine's log line of one finished request.
type requestLine struct {
	Msg            string  `json:"msg"`
	ID             string  `json:"id"`
	Prompt         int     `json:"prompt_tokens"`
	Cached         int     `json:"cached_tokens"`
	External       int     `json:"external_tokens"`
	ComputedPrompt int     `json:"computed_prompt_tokens"`
	Completion     int     `json:"completion_tokens"`
	Finish         string  `json:"finish"`
	Error          string  `json:"error"`
	Recomputed     int     `json:"recomputed_tokens"` // that were to come from P
	RecomputedWhy  string  `json:"recomputed_why"`
	Blocks         int     `json:"blocks"`
	Bytes          int64   `json:"bytes"`
	TransferMS     float64 `json:"transfer_ms"`
	GBps           float64 `json:"gb_per_s"`
	WaitMS         float64 `json:"wait_ms"`
	Transport      string  `json:"transport"`
	Why            string  `json:"why"`
	TierTokens     int     `json:"tier_tokens"`
	TierFrom       string  `json:"tier"` // "cpu=32,p2p=64": tokens
}

// tierTokens is how many tokens one tier has brought.
func (r requestLine) tierTokens(tier string) int {
	for _, part := range strings.Split(r.TierFrom, ",") {
		if name, n, _ := strings.Cut(part, "="); name == tier {
			tokens, _ := strconv.Atoi(n) // 0 if it is no number
			return tokens
		}
	}
	return 0
}

// tierString is the line that `up --topology p2p` prints for one request.
func (r requestLine) tierString() string {
	s := fmt.Sprintf("request %s: %d prompt tokens, %d cached", r.ID, r.Prompt, r.Cached)
	if r.TierTokens > 0 {
		s += fmt.Sprintf(", %d loaded (%s)", r.TierTokens, r.TierFrom)
	}
	s += fmt.Sprintf(", %d computed, %d generated, %s", r.ComputedPrompt, r.Completion, r.Finish)
	if r.Error != "" {
		s += ": " + r.Error
	}
	return s
}

// parseRequestLine reads a JSON log line; false for any other line.
func parseRequestLine(line string) (requestLine, bool) {
	var r requestLine
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &r) != nil {
		return r, false
	}
	return r, r.Msg == engine.LogFinished && r.ID != ""
}

// String is the line that `up` prints for one request of the decode engine.
func (r requestLine) String() string {
	var sb strings.Builder
	fmt.Fprintf(&sb, "request %s: %d prompt tokens", r.ID, r.Prompt)
	if r.External > 0 || r.Blocks > 0 {
		fmt.Fprintf(&sb, ", %d blocks (%s) received in %.2f ms", r.Blocks, byteCount(r.Bytes), r.TransferMS)
		if r.GBps > 0 {
			fmt.Fprintf(&sb, " = %.2f GB/s", r.GBps)
		}
		fmt.Fprintf(&sb, " over %s (%s)", r.Transport, r.Why)
	}
	fmt.Fprintf(&sb, ", %d cached, %d computed on D, %d generated, %s", r.Cached, r.ComputedPrompt, r.Completion, r.Finish)
	if r.Recomputed > 0 {
		fmt.Fprintf(&sb, "; recomputed, since %s", r.RecomputedWhy)
	}
	if r.Error != "" {
		fmt.Fprintf(&sb, ": %s", r.Error)
	}
	return sb.String()
}

func byteCount(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}

// requestLog remembers the request lines of one engine, so that the check can ask what became of a
// request after its answer has come. The oldest are dropped beyond maxRemembered.
type requestLog struct {
	mu struct {
		sync.Mutex
		lines   []requestLine
		changed chan struct{} // closed and replaced at each line
	}
}

func newRequestLog() *requestLog {
	l := &requestLog{}
	l.mu.changed = make(chan struct{})
	return l
}

// add takes one log line of the engine, whatever it is.
func (l *requestLog) add(r requestLine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.lines = append(l.mu.lines, r)
	if n := len(l.mu.lines); n > maxRemembered {
		l.mu.lines = l.mu.lines[n-maxRemembered:]
	}
	close(l.mu.changed)
	l.mu.changed = make(chan struct{})
}

// wait returns the line of the request whose internal id begins with prefix: the answer's id lacks
// the engine's random suffix.
func (l *requestLog) wait(ctx context.Context, prefix string, bound time.Duration) (requestLine, error) {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	for {
		l.mu.Lock()
		for _, r := range l.mu.lines {
			if strings.HasPrefix(r.ID, prefix) {
				l.mu.Unlock()
				return r, nil
			}
		}
		changed := l.mu.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return requestLine{}, fmt.Errorf("no log line of request %s within %v", prefix, bound)
		}
	}
}
