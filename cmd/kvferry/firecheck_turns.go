package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
)

// fireTurns is the conversations of a fault check with --bidirectional-kv-xfer. Some requests go on when they
// are answered: what is said next follows the answer, so that its KV is with the decode engine, if that still
// lives and keeps it.
type fireTurns struct {
	context int // tokens of the engines
	mu      struct {
		sync.Mutex
		answers []*fireAnswer // of all turns but the first, and of the conversations after the fire, in no order
	}
}

func (t *fireTurns) add(a *fireAnswer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.answers = append(t.mu.answers, a)
}

// planTurns gives every other request one turn more, or two, by a chance of its own: the rest of a seed's schedule stays.
func planTurns(seed uint64, plan []fireRequest) {
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range plan {
		if plan[i].turns = max(0, rng.IntN(4)-1); plan[i].turns > 0 {
			plan[i].conversation = fmt.Sprintf("conversation %d", i)
		}
	}
}

// goOn sends the next turns of a request, each when the last is answered.
func (c *fireChecker) goOn(ctx context.Context, router string, a *fireAnswer) {
	for turn := 1; turn <= a.turns && a.err == nil && len(a.got.Prompt) > 0; turn++ {
		next := a.fireRequest
		next.abort, next.tokens = 0, slices.Concat(a.got.Prompt, a.got.Tokens)
		for _, b := range []byte(text(5000+10*a.number+turn, 30)) {
			next.tokens = append(next.tokens, int(b)%64+1)
		}
		if len(next.tokens)+next.maxTokens >= c.turns.context {
			return
		}
		a = c.ask(ctx, router, next)
		c.turns.add(a)
	}
}

// converse has a conversation after the last fault, and others, until a turn was read back: under fire that
// is chance. Peers that have lost each other a moment ago may compute a turn instead.
func (c *fireChecker) converse(ctx context.Context) {
	c.progress.show("a conversation after the fire")
	ctx, cancel := context.WithTimeout(ctx, requestBound)
	defer cancel()
	for n := len(c.fire); c.site.readBack() == 0; n++ {
		first := c.ask(ctx, c.site.router.url(), fireRequest{
			number: n, prompt: text(1000+n, 200), maxTokens: 8, conversation: fmt.Sprintf("conversation %d", n), turns: 1,
		})
		c.turns.add(first)
		c.goOn(ctx, c.site.router.url(), first)
		// The engine's line may be on its way.
		if !sleep(ctx, settlePoll) {
			c.failf("turns: after the last fault no turn was read back within %v", requestBound)
			return
		}
	}
}

// judgeTurns asks the single engine the same and compares.
func (c *fireChecker) judgeTurns(ctx context.Context, own func([]int) int) {
	said := c.turns.mu.answers
	want := make([]*fireAnswer, len(said))
	c.each(oracleClients, len(said), func(i int) { want[i] = c.ask(ctx, c.single.ready["url"], said[i].fireRequest) })
	for i, a := range said {
		if want[i].err != nil {
			c.failf("a later turn of request #%d: the single engine gave no answer: %v", a.number, want[i].err)
			continue
		}
		v := judge(a, want[i].got, requestBound, c.routerDown, own)
		if v.fault != "" {
			v.fault += " (a later turn of it)"
		}
		c.tally.add(a, v)
	}
}
