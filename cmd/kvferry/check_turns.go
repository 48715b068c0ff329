package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
)

// checkedTurns is how many turns the conversation of a check has.
const checkedTurns = 4

// conversation goes through a pair whose prefill engine reads back what the decode engine kept: every answer
// is a single engine's, and the prefill engine computes of each turn no more than what is new.
func (c *checker) conversation(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, c.letGo(ctx)) }()
	bs := c.flags.pair.blockSize
	var prompt any = text(70, 3*bs+1)
	had := 0 // tokens that D keeps
	for i := range checkedTurns {
		ask := completionRequest{Model: c.single.ready["model"], Prompt: prompt, MaxTokens: 2*bs + i, ReturnTokenIDs: true, IgnoreEOS: true}
		want, err := complete(ctx, c.single.ready["url"], ask)
		if err != nil {
			return fmt.Errorf("turn %d: single engine: %w", i, err)
		}
		ask.ConversationID, ask.Stream = "check", i%2 == 1
		before, err := gauge(ctx, c.pair.prefill.ready["url"], computedPrompt)
		if err != nil {
			return err
		}
		got, err := complete(ctx, c.pair.router.ready["url"], ask)
		if err != nil {
			return fmt.Errorf("turn %d: pair: %w", i, err)
		}
		c.requests++
		after, err := gauge(ctx, c.pair.prefill.ready["url"], computedPrompt)
		switch {
		case err != nil:
			return err
		case !slices.Equal(got.Tokens, want.Tokens):
			return fmt.Errorf("turn %d: the pair gives %v, a single engine %v", i, got.Tokens, want.Tokens)
		case len(want.Prompt) == 0:
			return errors.New("the single engine does not say what its prompt was")
		case i > 0 && after-before > float64(len(want.Prompt)-had):
			return fmt.Errorf("turn %d: the prefill engine computed %v tokens of a prompt of %d, of which the decode engine had %d",
				i, after-before, len(want.Prompt), had)
		case i > 0:
			c.turns++
		}
		if err := c.checkDecode(ctx, got); err != nil {
			return fmt.Errorf("turn %d: %w", i, err)
		}
		next := slices.Concat(want.Prompt, want.Tokens)
		had = len(next) - 1
		for _, b := range []byte(text(71+i, bs+3)) {
			next = append(next, int(b)%64+1)
		}
		prompt = next
	}
	return nil
}

// letGo ends what the decode engine keeps of a conversation that does not go on.
func (c *checker) letGo(ctx context.Context) error {
	return resetCache(ctx, c.pair.decode.ready["url"])
}

// resetCache has an engine forget its prefix cache and what it keeps for next turns.
func resetCache(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/kv/reset-prefix-cache?wait=5", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("the decode engine keeps blocks for a turn that does not come: status %d: %.200s", resp.StatusCode, answer)
	}
	return err
}
