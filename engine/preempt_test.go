package engine

import (
	"testing"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
)

// P takes the blocks of a prompt that it computes for D, for an earlier request that grows: D gets the
// right KV, once. In push it waits meanwhile, in pull it is not asked before.
func TestPrefillIsPreempted(t *testing.T) {
	eachMode(t, func(c *Config) {
		c.BlockSize, c.NumBlocks, c.MaxBatchTokens, c.NoPrefixCache, c.Role = 8, 30, 32, true, connector.Both
	}, func(t *testing.T, x pair) {
		smallPrompt, largePrompt, victimPrompt := prompt(95, 1), prompt(120, 2), prompt(119, 3)
		_, smallLeg := x.begin(t, "small", smallPrompt, 3)
		small, smallDecode := smallLeg()
		_, largeLeg := x.begin(t, "large", largePrompt, 3)
		large, largeDecode := largeLeg()
		checkAnswer(t, "small", small, expect(t, smallPrompt, 1, model.Sampling{}))
		checkAnswer(t, "large", large, expect(t, largePrompt, 1, model.Sampling{}))
		// 12 and 15 blocks are held for D, and there are 3 for this one, which needs 7.
		own := submit1(t, x.p, Request{ID: "own", Prompt: prompt(20, 4), MaxTokens: 30})
		_, victimLeg := x.begin(t, "victim", victimPrompt, 3)
		// With the 12 the victim, which needs 15, can begin, but not end before the other takes some.
		checkAnswer(t, "small on D", generate(t, x.d, smallDecode), expect(t, smallPrompt, 3, model.Sampling{}))
		eventually(t, x.p, func(s Stats) bool { return s.Preemptions > 0 })
		checkAnswer(t, "large on D", generate(t, x.d, largeDecode), expect(t, largePrompt, 3, model.Sampling{}))
		checkAnswer(t, "own", read(t, own), expect(t, prompt(20, 4), 30, model.Sampling{}))
		victim, victimDecode := victimLeg()
		checkAnswer(t, "P's answer to the victim", victim, expect(t, victimPrompt, 1, model.Sampling{}))
		checkAnswer(t, "D's answer to the victim", generate(t, x.d, victimDecode), expect(t, victimPrompt, 3, model.Sampling{}))
		if victim.Usage.Preemptions == 0 {
			t.Errorf("the victim was not preempted: %+v", victim.Usage)
		}
		settle(t, x.p)
		settle(t, x.d)
		if s := x.d.Stats(); s.Received != 3 || s.Preemptions != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// D takes the blocks of a request whose KV has come, for an earlier one that grows: the prompt is
// computed by D then, and not transferred again.
func TestDecodeIsPreempted(t *testing.T) {
	if testing.Short() {
		t.Skip("computes for long under the race detector")
	}
	eachMode(t, func(c *Config) {
		c.BlockSize, c.NumBlocks, c.MaxBatchTokens, c.NoPrefixCache = 8, 30, 32, true
	}, func(t *testing.T, x pair) {
		// The two begin with 3 and 15 blocks of 30 and grow by one token in each step.
		ownPrompt, victimPrompt := prompt(20, 4), prompt(120, 1)
		_, leg := x.begin(t, "victim", victimPrompt, 70)
		a, decode := leg()
		checkAnswer(t, "P", a, expect(t, victimPrompt, 1, model.Sampling{}))
		own := submit1(t, x.d, Request{ID: "own", Prompt: ownPrompt, MaxTokens: 180, IgnoreEOS: true})
		decode.IgnoreEOS = true
		a = generate(t, x.d, decode)
		checkAnswer(t, "the victim", a, expect(t, victimPrompt, 70, model.Sampling{}))
		if u := a.Usage; u.Preemptions == 0 || u.External != 119 || u.ComputedPrompt < 120 {
			t.Errorf("%+v", u)
		}
		checkAnswer(t, "own", read(t, own), expect(t, ownPrompt, 180, model.Sampling{}))
		settle(t, x.p)
		settle(t, x.d)
		if s := x.d.Stats(); s.Received != 1 {
			t.Errorf("%+v", s)
		}
	})
}
