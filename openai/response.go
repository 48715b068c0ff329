package openai

import (
	"encoding/json"

	"github.com/kvferry/kvferry/kv"
)

// Usage counts tokens.
type Usage struct {
	PromptTokens        int                  `json:"prompt_tokens"`
	TotalTokens         int                  `json:"total_tokens"`
	CompletionTokens    int                  `json:"completion_tokens"`
	PromptTokensDetails *PromptTokensDetails `json:"prompt_tokens_details,omitempty"`
}

// PromptTokensDetails says how many prompt tokens were not computed for this request: found in the
// prefix cache or received from another engine.
type PromptTokensDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

// Completion is an answer of /v1/completions, or one chunk of its stream. Object is
// "text_completion" for both.
type Completion struct {
	ID               string             `json:"id"`
	Object           string             `json:"object"`
	Created          int64              `json:"created"` // seconds since 1970
	Model            string             `json:"model"`
	Choices          []CompletionChoice `json:"choices"`
	Usage            *Usage             `json:"usage,omitempty"`
	KVTransferParams json.RawMessage    `json:"kv_transfer_params,omitempty"`
}

// CompletionChoice is one answer or, in a stream, what is new of it.
type CompletionChoice struct {
	Index          int        `json:"index"`
	Text           string     `json:"text"`
	Logprobs       *struct{}  `json:"logprobs"`      // always null
	FinishReason   *string    `json:"finish_reason"` // null until the last chunk
	StopReason     any        `json:"stop_reason"`   // the stop string or stop token that ended it
	PromptTokenIDs []kv.Token `json:"prompt_token_ids,omitempty"`
	TokenIDs       []kv.Token `json:"token_ids,omitempty"`
}

// Chat is an answer of /v1/chat/completions. Object is "chat.completion".
type Chat struct {
	ID               string          `json:"id"`
	Object           string          `json:"object"`
	Created          int64           `json:"created"` // seconds since 1970
	Model            string          `json:"model"`
	Choices          []ChatChoice    `json:"choices"`
	Usage            *Usage          `json:"usage,omitempty"`
	PromptTokenIDs   []kv.Token      `json:"prompt_token_ids,omitempty"`
	KVTransferParams json.RawMessage `json:"kv_transfer_params,omitempty"`
}

// ChatChoice is one answer.
type ChatChoice struct {
	Index        int         `json:"index"`
	Message      ChatMessage `json:"message"`
	Logprobs     *struct{}   `json:"logprobs"` // always null
	FinishReason *string     `json:"finish_reason"`
	StopReason   any         `json:"stop_reason"` // the stop string or stop token that ended it
	TokenIDs     []kv.Token  `json:"token_ids,omitempty"`
}

// ChatMessage is an answer's message.
type ChatMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// ChatChunk is one chunk of a chat's stream. Object is "chat.completion.chunk".
type ChatChunk struct {
	ID               string            `json:"id"`
	Object           string            `json:"object"`
	Created          int64             `json:"created"` // seconds since 1970
	Model            string            `json:"model"`
	Choices          []ChatDeltaChoice `json:"choices"`
	Usage            *Usage            `json:"usage,omitempty"`
	PromptTokenIDs   []kv.Token        `json:"prompt_token_ids,omitempty"`
	KVTransferParams json.RawMessage   `json:"kv_transfer_params,omitempty"` // in the last chunk, of a decode engine that keeps its KV
}

// ChatDeltaChoice is what is new of one answer.
type ChatDeltaChoice struct {
	Index        int        `json:"index"`
	Delta        ChatDelta  `json:"delta"`
	Logprobs     *struct{}  `json:"logprobs"`              // always null
	FinishReason *string    `json:"finish_reason"`         // null until the last chunk
	StopReason   any        `json:"stop_reason,omitempty"` // the stop string or stop token that ended it
	TokenIDs     []kv.Token `json:"token_ids,omitempty"`
}

// ChatDelta is new text. Role is set in an answer's first chunk only.
type ChatDelta struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

// ModelList is the answer of /v1/models. Object is "list".
type ModelList struct {
	Object string  `json:"object"`
	Data   []Model `json:"data"`
}

// Model is one served model. Object is "model".
type Model struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"` // seconds since 1970
	OwnedBy     string `json:"owned_by"`
	MaxModelLen int    `json:"max_model_len"`    // tokens of prompt and answer together, as vLLM tells it
	Parent      string `json:"parent,omitempty"` // of an adapter: the model that it changes
}
