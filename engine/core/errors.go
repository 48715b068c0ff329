package core

import (
	"errors"
	"fmt"
)

// Why an Add is refused. Errors of Connector.Arrived are passed on as they are.
var (
	// ErrDuplicate: a request of this id lives, or its blocks are still held.
	ErrDuplicate = errors.New("a request of this id is still in the engine")
	// ErrEmptyPrompt: there is nothing to continue.
	ErrEmptyPrompt = errors.New("the prompt has no tokens")
)

// TooLongError: the prompt leaves no room for an answer.
type TooLongError struct {
	Prompt  int // tokens
	Context int // tokens of prompt and answer together
}

func (e *TooLongError) Error() string {
	return fmt.Sprintf("the prompt has %d tokens, and the context of %d has room for a prompt of at most %d",
		e.Prompt, e.Context, e.Context-1)
}

// NeverFitsError: the prompt needs more blocks than there are.
type NeverFitsError struct {
	Prompt int // tokens
	Need   int // blocks
	Total  int // blocks
}

func (e *NeverFitsError) Error() string {
	return fmt.Sprintf("the prompt of %d tokens needs %d KV blocks, and the engine has %d in all", e.Prompt, e.Need, e.Total)
}

// QueueFullError: too many requests wait already, or would with those that come together.
type QueueFullError struct{ Limit, Together int }

func (e *QueueFullError) Error() string {
	if e.Together > 1 {
		return fmt.Sprintf("at most %d requests can wait, and there is no room for all %d answers; try again later", e.Limit, e.Together)
	}
	return fmt.Sprintf("%d requests wait already, which is the limit; try again later", e.Limit)
}

// CacheBusyError: the prefix cache cannot be reset while peers read or write blocks.
type CacheBusyError struct {
	Receiving int // requests whose KV is on its way
	Held      int // ended requests whose blocks are kept for a peer
	Waiting   int // resets that wait already, if that is why
}

func (e *CacheBusyError) Error() string {
	if e.Waiting > 0 {
		return fmt.Sprintf("%d resets of the prefix cache wait already, which is the limit; try again later", e.Waiting)
	}
	return fmt.Sprintf("the prefix cache cannot be reset: KV of %d requests is on its way and blocks of %d are held for peers; "+
		"wait for them or try again later", e.Receiving, e.Held)
}

// ModelError: a step of the model failed.
type ModelError struct{ Err error }

func (e *ModelError) Error() string { return "the model step failed: " + e.Err.Error() }

func (e *ModelError) Unwrap() error { return e.Err }
