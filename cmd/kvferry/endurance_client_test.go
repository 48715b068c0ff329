package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/kvferry/kvferry/kv"
)

// enduranceAnswer is what came, by the index of each answer.
type enduranceAnswer struct {
	tokens map[int][]int
	finish map[int]string
	params json.RawMessage // kv_transfer_params
}

type enduranceChunk struct {
	Choices []struct {
		Index        int    `json:"index"`
		TokenIDs     []int  `json:"token_ids"`
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
	Params json.RawMessage `json:"kv_transfer_params"`
	Error  *answerError    `json:"error"`
}

func (a *enduranceAnswer) add(c enduranceChunk) error {
	if c.Error != nil {
		return c.Error
	}
	for _, choice := range c.Choices {
		a.tokens[choice.Index] = append(a.tokens[choice.Index], choice.TokenIDs...)
		if choice.FinishReason != "" {
			a.finish[choice.Index] = choice.FinishReason
		}
	}
	if len(c.Params) > 0 {
		a.params = c.Params
	}
	return nil
}

// isWhole compares with what a single engine gives; isPart allows for less.
func (a *enduranceAnswer) isWhole(want *enduranceAnswer) bool {
	if len(a.tokens) != len(want.tokens) {
		return false
	}
	for i, t := range want.tokens {
		if !slices.Equal(a.tokens[i], t) || a.finish[i] != want.finish[i] {
			return false
		}
	}
	return true
}

func (a *enduranceAnswer) isPart(want *enduranceAnswer) bool {
	for i, t := range a.tokens {
		if !isPrefix(t, want.tokens[i]) {
			return false
		}
	}
	return true
}

// enduranceClient sends requests on connections of its own.
type enduranceClient struct{ http http.Client }

func newEnduranceClient() *enduranceClient {
	return &enduranceClient{http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
}

func (c *enduranceClient) close() { c.http.CloseIdleConnections() }

// ask sends one body. With an error comes what was streamed before it.
func (c *enduranceClient) ask(ctx context.Context, url, id string, body map[string]any) (*enduranceAnswer, error) {
	a := &enduranceAnswer{tokens: map[int][]int{}, finish: map[int]string{}}
	raw, err := json.Marshal(body)
	if err != nil {
		return a, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(raw))
	if err != nil {
		return a, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := c.http.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	limited := io.LimitReader(resp.Body, maxAnswer)
	if resp.StatusCode != http.StatusOK {
		return a, readAnswerError(resp, limited)
	}
	if body["stream"] != true {
		var chunk enduranceChunk
		if err := json.NewDecoder(limited).Decode(&chunk); err != nil {
			return a, fmt.Errorf("the answer is not JSON: %w", err)
		}
		return a, a.add(chunk)
	}
	sc := bufio.NewScanner(limited)
	sc.Buffer(nil, maxAnswer)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return a, nil
		}
		var chunk enduranceChunk
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return a, fmt.Errorf("a streamed chunk is not JSON: %w", err)
		}
		if err := a.add(chunk); err != nil {
			return a, err
		}
	}
	if err := sc.Err(); err != nil {
		return a, err
	}
	return a, fmt.Errorf("the stream ended without [DONE]")
}

// byHand sends the legs of a hand-off as a router does that makes the mistake of its kind.
func (c *enduranceClient) byHand(ctx context.Context, s *enduranceSite, r *enduranceRequest) (*enduranceAnswer, error) {
	p, d := s.prefill[r.engines[0]], s.decode[r.engines[1]]
	id := fmt.Sprintf("q%d.hand", r.number)
	first := r.first()
	decode := first.json(r.stream)
	if s.mode == kv.Push {
		l := p.engine()
		if l == nil {
			return nil, errDown
		}
		at, transfer := l.Coordinates(), fmt.Sprintf("xfer-%d", r.number)
		params := map[string]any{"do_remote_prefill": true, "remote_engine_id": at.EngineID, "remote_host": at.Host, "remote_port": at.Port,
			"tp_size": at.TPSize, "pp_size": at.PPSize, "remote_request_id": id, "transfer_id": transfer}
		if r.kind == noDecode || r.kind == wrongEngine {
			if _, err := c.prefill(ctx, p, id, first, map[string]any{"do_remote_decode": true, "transfer_id": transfer}); err != nil || r.kind == noDecode {
				return nil, err
			}
			params["remote_engine_id"] = "nobody"
		}
		decode["kv_transfer_params"] = params
		return c.ask(ctx, d.url, id, decode)
	}
	params, err := c.prefill(ctx, p, id, first, map[string]any{"do_remote_decode": true})
	if err != nil || r.kind == noDecode {
		return nil, err
	}
	switch r.kind {
	case wrongEngine:
		params["remote_engine_id"] = "nobody"
	case wrongBlocks:
		params["remote_request_id"] = fmt.Sprintf("cmpl-q%d.other-0-aaaaaaaa", r.number)
	case afterLease:
		sleep(ctx, enduranceLease+time.Second)
	}
	decode["kv_transfer_params"] = params
	return c.ask(ctx, d.url, id, decode)
}

var errDown = &answerError{Status: http.StatusServiceUnavailable, Message: "the engine is down", Code: "down"}

// prefill sends a prefill leg and gives P's parameters.
func (c *enduranceClient) prefill(ctx context.Context, p *host, id string, b *enduranceBody, params map[string]any) (map[string]any, error) {
	body := b.json(false)
	delete(body, "n")
	body["max_tokens"], body["kv_transfer_params"] = 1, params
	a, err := c.ask(ctx, p.url, id, body)
	if err != nil {
		return nil, err
	}
	var out map[string]any
	dec := json.NewDecoder(bytes.NewReader(a.params))
	dec.UseNumber()
	if err := dec.Decode(&out); err != nil {
		return nil, fmt.Errorf("the prefill leg's parameters: %w", err)
	}
	return out, nil
}
