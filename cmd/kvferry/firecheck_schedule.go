package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// faultKind is one thing that the fault check does to the trio.
type faultKind string

const (
	killPrefill faultKind = "kill-prefill" // SIGKILL, started again at once at the same addresses
	killDecode  faultKind = "kill-decode"
	killRouter  faultKind = "kill-router"
	stopPrefill faultKind = "stop-prefill" // SIGSTOP, SIGCONT after a while
	stopDecode  faultKind = "stop-decode"
	cutAgents   faultKind = "cut-agents"  // every connection between the agents is reset, new ones are refused for a while
	holdAgents  faultKind = "hold-agents" // the connections stay, nothing flows for a while
	// The side channel matters when peers meet, so these two kill an engine first.
	cutSide  faultKind = "cut-side-channel"  // refused for a while when the decode engine comes back
	holdSide faultKind = "hold-side-channel" // mute for a while when the prefill engine comes back
)

// faultMix is how often each fault comes among fireRequests requests.
var faultMix = []struct {
	kind  faultKind
	times int
}{
	{killPrefill, 3}, {killDecode, 3}, {killRouter, 2}, {stopPrefill, 3}, {stopDecode, 3},
	{cutAgents, 3}, {holdAgents, 3}, {cutSide, 2}, {holdSide, 2},
}

const (
	// fireRequests is how many requests a fault check sends in all, calm ones included.
	fireRequests = 200
	// calmShare of them, one in calmShare, are sent after the last fault.
	calmShare = 10
	// fireSpacing is the mean time between two requests under fire.
	fireSpacing = 110 * time.Millisecond
	// faultDelay is how long after its request a fault comes at most: about the life of a request,
	// so that it meets all of its phases.
	faultDelay = 300 * time.Millisecond
	// shortFault and longFault bound how long a stall or a refusal lasts: the one is hardly felt,
	// the other is longer than an engine waits for a sign of life of its peer.
	shortFault = 100 * time.Millisecond
	longFault  = 2 * time.Second
)

// plannedFault is one line of a schedule.
type plannedFault struct {
	kind  faultKind
	at    int           // comes with this request
	delay time.Duration // after it
	lasts time.Duration // of a stall or a refusal
}

func (f plannedFault) String() string {
	s := fmt.Sprintf("#%d+%dms %s", f.at, f.delay.Milliseconds(), f.kind)
	if f.lasts > 0 {
		s += fmt.Sprintf(" %dms", f.lasts.Milliseconds())
	}
	return s
}

// planFaults spreads the faults over the first n requests. Each kind comes at least once.
func planFaults(rng *rand.Rand, n int) []plannedFault {
	var plan []plannedFault
	for _, m := range faultMix {
		for range (m.times*n + fireRequests - 1) / fireRequests {
			f := plannedFault{kind: m.kind, delay: between(rng, 0, faultDelay)}
			switch m.kind {
			case killPrefill, killDecode, killRouter:
			case cutSide, holdSide:
				f.lasts = between(rng, shortFault, longFault/2)
			default:
				f.lasts = between(rng, shortFault, longFault/2)
				if rng.IntN(4) == 0 {
					f.lasts = longFault
				}
			}
			plan = append(plan, f)
		}
	}
	rng.Shuffle(len(plan), func(i, j int) { plan[i], plan[j] = plan[j], plan[i] })
	for i := range plan {
		plan[i].at = (i + 1) * n / (len(plan) + 1)
	}
	return plan
}

func between(rng *rand.Rand, lo, hi time.Duration) time.Duration {
	return (lo + time.Duration(rng.Int64N(int64(hi-lo)+1))).Round(time.Millisecond)
}

// countFaults says how often each kind is in a list, in the order of faultMix.
func countFaults(done []plannedFault) string {
	var parts []string
	for _, m := range faultMix {
		n := 0
		for _, f := range done {
			if f.kind == m.kind {
				n++
			}
		}
		parts = append(parts, fmt.Sprintf("%d %s", n, m.kind))
	}
	return strings.Join(parts, ", ")
}

// fireRequest is one request of the fault check.
type fireRequest struct {
	number    int
	prompt    string
	maxTokens int
	stream    bool
	after     time.Duration // the request before it
	abort     time.Duration // the client leaves then; 0: it stays

	conversation string // none without further turns
	turns        int    // that follow
	tokens       []int  // of a later turn, instead of prompt
}

// body is the prompt as it is sent.
func (r fireRequest) body() any {
	if r.tokens != nil {
		return r.tokens
	}
	return r.prompt
}

// planRequests makes n requests. Every prompt has a region that only it has, in its beginning or
// behind a prefix that it shares with an earlier one, so that tokens tell whose KV they come from.
func planRequests(rng *rand.Rand, n, blockSize, context int) []fireRequest {
	plan := make([]fireRequest, n)
	for i := range plan {
		r := fireRequest{
			number: i, maxTokens: 1 + rng.IntN(32), stream: rng.IntN(3) == 0,
			after: between(rng, 0, 2*fireSpacing),
		}
		if rng.IntN(8) == 0 {
			r.abort = between(rng, time.Millisecond, 400*time.Millisecond)
		}
		room := context - r.maxTokens - 1
		prefix := ""
		if i > 0 && rng.IntN(4) == 0 {
			prefix = plan[rng.IntN(i)].prompt
			prefix = prefix[:min(len(prefix), room/2)]
			if rng.IntN(2) == 0 { // shared blocks that are full
				prefix = prefix[:len(prefix)/blockSize*blockSize]
			}
		}
		r.prompt = prefix + text(1000+i, min(ownLength(rng), room-len(prefix)))
		plan[i] = r
	}
	return plan
}

// ownLength is the length of a prompt's own region: mostly short, sometimes long enough that a
// fault finds it in the middle of its prefill.
func ownLength(rng *rand.Rand) int {
	switch k := rng.IntN(10); {
	case k < 6:
		return 20 + rng.IntN(120)
	case k < 9:
		return 150 + rng.IntN(250)
	}
	return 400 + rng.IntN(500)
}

// planCalm makes the requests after the last fault: the prompts of requests that failed, then those
// of others, all over again. What a failed transfer left in a prefix cache would show here.
func planCalm(fire []fireRequest, failed []int, n int) []fireRequest {
	order := slices.Clone(failed)
	for i := range fire {
		if !slices.Contains(failed, i) {
			order = append(order, i)
		}
	}
	var calm []fireRequest
	for _, i := range order[:min(n, len(order))] {
		r := fire[i]
		r.after, r.abort, r.turns, r.conversation = 0, 0, 0, ""
		calm = append(calm, r)
	}
	return calm
}
