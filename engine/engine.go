package engine

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry/engine/model"
)

// Engine is one running engine. Its methods may be called from any goroutine.
type Engine struct{}

// New starts an engine: its transfer agent, its side channel and its loop. It reports everything
// that is wrong with the configuration, and an address in use by name. The caller ends the engine
// with Close.
func New(cfg Config) (*Engine, error) {
	return nil, errors.New("engine: not assembled")
}

// Submit admits a request, or refuses it with a *RequestError: KindInvalid, KindOverload or
// KindUnavailable. It does not wait for the model. When ctx ends, the request is aborted: it is the
// client's context and not one of this call only.
func (e *Engine) Submit(ctx context.Context, r Request) (*Stream, error) { return nil, nil }

// Coordinates is what a router must know. It does not change.
func (e *Engine) Coordinates() Coordinates { return Coordinates{} }

// Stats is a snapshot, taken by the loop. After Close it is the last one.
func (e *Engine) Stats() Stats { return Stats{} }

// Model describes the model that is served.
func (e *Engine) Model() ModelInfo { return ModelInfo{} }

// Tokenizer is the model's. It is immutable.
func (e *Engine) Tokenizer() *model.Tokenizer { return nil }

// MaxContext is the number of tokens that prompt and answer may have together: the model's context
// or what the blocks can hold, whichever is less. A prompt may have one less.
func (e *Engine) MaxContext() int { return 0 }

// Ready reports nil when requests can be served: the loop runs and the side channel listens. After
// Close has been called or a fault it says what is wrong.
func (e *Engine) Ready() error { return nil }

// Close refuses new requests at once, lets those that live end until ctx does, aborts the others
// and stops everything. Blocks held for a peer are waited for until ctx ends, too. It returns when
// no goroutine of the engine is left and its memory is unmapped; further calls return the same.
func (e *Engine) Close(ctx context.Context) error { return nil }
