package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/kvferry/kvferry/kv"
)

// What a request of the run does besides asking the router. Those that name a fault end with an error
// or, by D's policy, with an answer that D has computed.
const (
	asked       = ""               // through the router
	local       = "local"          // an engine alone, whose answer is long: others lose their blocks to it
	siblings    = "siblings"       // in pull, by hand: one prefill leg, several answers of one decode leg
	noDecode    = "no decode leg"  // the prefill leg alone: its lease ends
	noPrefill   = "no prefill leg" // in push: the decode leg alone
	wrongEngine = "wrong engine"   // the decode leg names an engine that is not there
	wrongBlocks = "wrong blocks"   // in pull: the decode leg names blocks that are not P's
	afterLease  = "after lease"    // in pull: the decode leg comes when P's lease has ended
)

// enduranceBody is what is asked, apart from the way the answer is sent. Several requests ask the same.
type enduranceBody struct {
	prompts   []string
	n         int
	maxTokens int
	seed      int // 0: greedy
}

func (b *enduranceBody) json(stream bool) map[string]any {
	m := map[string]any{"max_tokens": b.maxTokens, "temperature": 0, "return_token_ids": true, "ignore_eos": true, "prompt": b.prompts[0]}
	if len(b.prompts) > 1 {
		m["prompt"] = b.prompts
	}
	if b.n > 1 {
		m["n"] = b.n
	}
	if b.seed != 0 {
		m["temperature"], m["seed"] = 1, b.seed
	}
	if stream {
		m["stream"] = true
	}
	return m
}

// enduranceRequest is one request of the run.
type enduranceRequest struct {
	number  int
	kind    string
	body    *enduranceBody
	stream  bool
	leaves  time.Duration // the client leaves then; 0: it stays
	engines [2]int        // by hand: which prefill and which decode engine
}

// planEndurance makes n requests and the bodies that they ask, fewer, so that prefix caches are hit
// and missed. context is what P and D can hold.
func planEndurance(rng *rand.Rand, mode kv.TransferMode, n, context int) []enduranceRequest {
	bodies := make([]*enduranceBody, max(n/12, 40))
	for i := range bodies {
		bodies[i] = planBody(rng, i, bodies[:i], context)
	}
	plan := make([]enduranceRequest, n)
	for i := range plan {
		r := enduranceRequest{number: i, body: bodies[rng.IntN(len(bodies))], stream: rng.IntN(2) == 0, engines: [2]int{rng.IntN(2), rng.IntN(2)}}
		if rng.IntN(6) == 0 {
			r.leaves = between(rng, time.Millisecond, 300*time.Millisecond)
		}
		r.kind = planKind(rng, mode)
		if r.faulty() {
			r.leaves = 0
		}
		if r.kind == local {
			long := *r.body
			long.prompts = long.prompts[:1]
			long.n, long.maxTokens = 1, min(150, context-len(long.prompts[0]))
			r.body = &long
		}
		if i >= n-n/20 { // when all faults are over, everything must go well
			r.kind, r.leaves = asked, 0
		}
		plan[i] = r
	}
	return plan
}

// faulty tells whether the request is made to fail.
func (r *enduranceRequest) faulty() bool {
	return r.kind != asked && r.kind != local && r.kind != siblings
}

// answers is how many answers a decode leg by hand asks for.
func (r *enduranceRequest) answers() int {
	if r.kind == siblings {
		return 1 + len(r.body.prompts) + r.body.n
	}
	return 1
}

// first is the body of a decode leg by hand: a hand-off is of one prompt.
func (r *enduranceRequest) first() *enduranceBody {
	b := *r.body
	b.prompts, b.n = b.prompts[:1], r.answers()
	return &b
}

// whole is what a single engine is asked for to compare.
func (r *enduranceRequest) whole() map[string]any {
	if r.kind == asked || r.kind == local {
		return r.body.json(false)
	}
	return r.first().json(false)
}

func planKind(rng *rand.Rand, mode kv.TransferMode) string {
	switch k := rng.IntN(1000); {
	case k < 10:
		return noDecode
	case k < 20:
		return wrongEngine
	case k < 23 && mode == kv.Push:
		return noPrefill
	case k < 23:
		return afterLease
	case k < 35 && mode == kv.Pull:
		return wrongBlocks
	case k < 65:
		return local
	case k < 110 && mode == kv.Pull:
		return siblings
	}
	return asked
}

// planBody makes a body. Its prompts are its own, or begin like an earlier one's.
func planBody(rng *rand.Rand, i int, earlier []*enduranceBody, context int) *enduranceBody {
	b := &enduranceBody{n: 1, maxTokens: 1 + rng.IntN(10)}
	if rng.IntN(12) == 0 {
		b.maxTokens = 40 + rng.IntN(60) // it grows out of its pool
	}
	count := 1
	switch rng.IntN(10) {
	case 0:
		b.n = 2 + rng.IntN(2)
	case 1:
		count = 2 + rng.IntN(2)
	}
	if rng.IntN(4) == 0 {
		b.seed = 1 + rng.IntN(1<<20)
	}
	for k := range count {
		length := planLength(rng, context-1)
		if count > 1 || b.n > 1 {
			length = min(length, 200)
		}
		own := text(1+i+1000*k, max(length, 12))
		if length < 12 { // too short to be unlike others
			own = own[:length]
		}
		if len(earlier) > 0 && length > 20 && rng.IntN(3) == 0 {
			shared := earlier[rng.IntN(len(earlier))].prompts[0]
			shared = shared[:min(len(shared), length-1)]
			if rng.IntN(2) == 0 {
				shared = shared[:len(shared)/16*16]
			}
			own = (shared + own)[:length]
		}
		b.prompts = append(b.prompts, own)
		b.maxTokens = min(b.maxTokens, context-length)
	}
	return b
}

// planLength is a prompt's length in tokens: around the edges of blocks, and up to the longest.
func planLength(rng *rand.Rand, longest int) int {
	switch k := rng.IntN(40); {
	case k < 3:
		return 1
	case k < 6:
		return 2 + rng.IntN(14)
	case k < 9:
		return 16
	case k < 11:
		return 17
	case k < 16:
		return 16 * (2 + rng.IntN(8))
	case k < 30:
		return 20 + rng.IntN(120)
	case k < 37:
		return 100 + rng.IntN(200)
	case k < 39:
		return 20 + rng.IntN(60)
	case rng.IntN(2) == 0:
		return longest - rng.IntN(20)
	}
	return longest
}

// describe counts what a plan is made of.
func describePlan(plan []enduranceRequest) string {
	kinds := map[string]int{}
	streams, leave, several := 0, 0, 0
	for _, r := range plan {
		kinds[r.kind]++
		if r.stream {
			streams++
		}
		if r.leaves > 0 {
			leave++
		}
		if r.body.n*len(r.body.prompts) > 1 {
			several++
		}
	}
	var parts []string
	for _, k := range []string{local, siblings, noDecode, noPrefill, wrongEngine, wrongBlocks, afterLease} {
		if kinds[k] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", kinds[k], k))
		}
	}
	return fmt.Sprintf("%d streamed, %d with several answers, %d whose client leaves, %s", streams, several, leave, strings.Join(parts, ", "))
}
