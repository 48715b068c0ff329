package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// maxAnswer bounds what is read of one answer or metrics page.
const maxAnswer = 16 << 20

// completion is what the check needs of an answer to /v1/completions.
type completion struct {
	ID      string
	Prompt  []int
	Tokens  []int
	Finish  string
	Headers http.Header
}

type completionRequest struct {
	Model          string `json:"model"`
	Prompt         any    `json:"prompt"` // text or tokens
	MaxTokens      int    `json:"max_tokens"`
	Temperature    int    `json:"temperature"`
	ReturnTokenIDs bool   `json:"return_token_ids"`
	StopTokenIDs   []int  `json:"stop_token_ids,omitempty"`
	IgnoreEOS      bool   `json:"ignore_eos,omitempty"`
	Stream         bool   `json:"stream,omitempty"`
	ConversationID string `json:"conversation_id,omitempty"`
	KV             any    `json:"kv_transfer_params,omitempty"`
}

type completionChunk struct {
	ID      string `json:"id"`
	Choices []struct {
		PromptIDs    []int  `json:"prompt_token_ids"`
		TokenIDs     []int  `json:"token_ids"`
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
	Error *answerError `json:"error"`
}

// answerError is an error that a server told, in OpenAI's shape.
type answerError struct {
	Status  int    `json:"-"` // 0: told inside a stream
	Message string `json:"message"`
	Type    string `json:"type"`
	Code    any    `json:"code"` // text, or a number within a stream
	Leg     string `json:"leg"`  // that the router blames
}

func (e *answerError) Error() string {
	if e.Status == 0 {
		return "error in the answer: " + e.Message
	}
	return fmt.Sprintf("status %d: %s", e.Status, e.Message)
}

// readAnswerError makes an error of an answer whose status is not 200; text that is not in OpenAI's
// shape becomes the message.
func readAnswerError(resp *http.Response, limited io.Reader) error {
	text, err := io.ReadAll(limited)
	if err != nil {
		return fmt.Errorf("status %d, and the answer broke off: %w", resp.StatusCode, err)
	}
	var body struct {
		Error *answerError `json:"error"`
	}
	if json.Unmarshal(text, &body) != nil || body.Error == nil {
		body.Error = &answerError{Message: string(bytes.TrimSpace(text))}
	}
	body.Error.Status = resp.StatusCode
	return body.Error
}

// complete sends one request and reads the whole answer, streamed or not. With an error comes what
// was streamed before it, or nil.
func complete(ctx context.Context, base string, r completionRequest) (*completion, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	limited := io.LimitReader(resp.Body, maxAnswer)
	if resp.StatusCode != http.StatusOK {
		return nil, readAnswerError(resp, limited)
	}
	c := &completion{Headers: resp.Header}
	if r.Stream {
		return c, c.readStream(limited)
	}
	var chunk completionChunk
	if err := json.NewDecoder(limited).Decode(&chunk); err != nil {
		return nil, fmt.Errorf("the answer is not JSON: %w", err)
	}
	return c, c.add(chunk)
}

func (c *completion) readStream(r io.Reader) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, maxAnswer)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return nil
		}
		var chunk completionChunk
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return fmt.Errorf("a streamed chunk is not JSON: %w", err)
		}
		if err := c.add(chunk); err != nil {
			return err
		}
	}
	if err := sc.Err(); err != nil {
		return err
	}
	return fmt.Errorf("the stream ended without [DONE] after %d tokens", len(c.Tokens))
}

func (c *completion) add(chunk completionChunk) error {
	if chunk.Error != nil {
		return chunk.Error
	}
	c.ID = chunk.ID
	for _, choice := range chunk.Choices {
		c.Prompt = append(c.Prompt, choice.PromptIDs...)
		c.Tokens = append(c.Tokens, choice.TokenIDs...)
		if choice.FinishReason != "" {
			c.Finish = choice.FinishReason
		}
	}
	return nil
}

// gauge reads one unlabelled metric of a server.
func gauge(ctx context.Context, base, name string) (float64, error) {
	sum, found := 0.0, false
	err := eachMetric(ctx, base, func(metric string, v float64) {
		if metric == name {
			sum, found = v, true
		}
	})
	if err == nil && !found {
		err = fmt.Errorf("%s/metrics has no %s", base, name)
	}
	return sum, err
}

// gaugeSum adds up a metric over its labels; 0 when there is none.
func gaugeSum(ctx context.Context, base, name string) (sum float64, err error) {
	err = eachMetric(ctx, base, func(metric string, v float64) {
		if strings.HasPrefix(metric, name+"{") {
			sum += v
		}
	})
	return sum, err
}

// eachMetric calls f with each metric of a server, labels included, and its value.
func eachMetric(ctx context.Context, base string, f func(metric string, v float64)) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/metrics", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	sc := bufio.NewScanner(io.LimitReader(resp.Body, maxAnswer))
	for sc.Scan() {
		metric, value, ok := cutLast(sc.Text(), " ")
		if !ok || strings.HasPrefix(metric, "#") {
			continue
		}
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			f(metric, v)
		}
	}
	return sc.Err()
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
