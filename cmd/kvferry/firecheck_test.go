package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestFaultCheckPasses(t *testing.T) {
	t.Parallel()
	p := launch(t, "up", "--check", "--faults", "--requests", "60", "--seed", "3")
	code := p.wait()
	lines := strings.Split(strings.TrimSpace(p.output()), "\n")
	last := lines[len(lines)-1]
	if code != 0 || !strings.HasPrefix(last, "fault check passed: ") {
		t.Fatalf("exit status %d:\n%s", code, p.output())
	}
	if !strings.HasPrefix(lines[0], "schedule of seed 3: [#") || len(lines) != 2 {
		t.Errorf("the output is not a schedule and a summary:\n%s", p.output())
	}
	for _, m := range faultMix {
		if !strings.Contains(last, " "+string(m.kind)) || strings.Contains(last, " 0 "+string(m.kind)) {
			t.Errorf("fault %s was not inflicted: %s", m.kind, last)
		}
	}
}

// Conversations go on under the same faults: what the decode engine kept is read back, or computed; after the
// last fault it is read back.
func TestFaultCheckOfConversations(t *testing.T) {
	t.Parallel()
	p := launch(t, "up", "--check", "--faults", "--mode", "pull", "--bidirectional-kv-xfer", "--requests", "30", "--seed", "4")
	if code := p.wait(); code != 0 || !strings.Contains(p.output(), "fault check passed: ") {
		t.Fatalf("exit status %d:\n%s", code, p.output())
	}
	if !strings.Contains(p.output(), " turns read back") {
		t.Errorf("no turn was read back:\n%s", p.output())
	}
}

// A decode engine that damages what it receives must fail the check, whatever else fails.
func TestFaultCheckSeesDamage(t *testing.T) {
	t.Parallel()
	p := launch(t, "up", "--check", "--faults", "--requests", "30", "--inject-kv-fault", "zero-head")
	if code := p.wait(); code != 1 || !strings.Contains(p.output(), "fault check FAILED: ") || !strings.Contains(p.output(), "a single engine gives") {
		t.Fatalf("exit status %d:\n%s", code, p.output())
	}
}

func TestFaultsNeedCheck(t *testing.T) {
	for _, args := range []string{"up --faults", "up --check --faults --requests 3"} {
		p := launch(t, strings.Fields(args)...)
		if code := p.wait(); code != 2 {
			t.Errorf("%s: exit status %d:\n%s", args, code, p.output())
		}
	}
}

func TestSchedulesAreSeeded(t *testing.T) {
	plan := func(seed uint64) ([]plannedFault, []fireRequest) {
		rng := rand.New(rand.NewPCG(seed, 0))
		return planFaults(rng, 180), planRequests(rng, 180, 16, 2048)
	}
	f1, r1 := plan(1)
	f2, r2 := plan(1)
	if !reflect.DeepEqual(f1, f2) || !reflect.DeepEqual(r1, r2) {
		t.Error("the same seed gives two schedules")
	}
	other, _ := plan(2)
	if reflect.DeepEqual(f1, other) {
		t.Error("two seeds give the same schedule")
	}
	for _, n := range []int{9, 54, 180} {
		kinds := map[faultKind]bool{}
		for _, f := range planFaults(rand.New(rand.NewPCG(5, 0)), n) {
			kinds[f.kind] = true
			if f.at < 0 || f.at >= n || f.lasts > longFault || f.delay > faultDelay {
				t.Errorf("%d requests: fault %v is out of bounds", n, f)
			}
		}
		if len(kinds) != len(faultMix) {
			t.Errorf("%d requests: only %d kinds of faults", n, len(kinds))
		}
	}
}

func TestFirePromptsDiffer(t *testing.T) {
	const context = 512
	seen := map[string]bool{}
	shared := 0
	plan := planRequests(rand.New(rand.NewPCG(9, 0)), 300, 16, context)
	for i, r := range plan {
		if seen[r.prompt] {
			t.Errorf("request %d has the prompt of another", i)
		}
		seen[r.prompt] = true
		if len(r.prompt)+r.maxTokens >= context {
			t.Errorf("request %d does not fit: %d + %d tokens", i, len(r.prompt), r.maxTokens)
		}
		for _, other := range plan[:i] {
			if strings.HasPrefix(r.prompt, other.prompt[:min(16, len(other.prompt))]) {
				shared++
				break
			}
		}
	}
	if shared < 30 || shared > 150 {
		t.Errorf("%d of %d prompts begin like an earlier one", shared, len(plan))
	}
}

func TestCalmRepeatsFailedPrompts(t *testing.T) {
	fire := planRequests(rand.New(rand.NewPCG(9, 0)), 10, 16, 2048)
	calm := planCalm(fire, []int{7, 3}, 4)
	var numbers []int
	for _, r := range calm {
		numbers = append(numbers, r.number)
		if r.abort != 0 || r.prompt != fire[r.number].prompt {
			t.Errorf("request %d is not repeated as it was", r.number)
		}
	}
	if !reflect.DeepEqual(numbers, []int{7, 3, 0, 1}) {
		t.Errorf("requests %v are repeated", numbers)
	}
}

func TestJudge(t *testing.T) {
	begin := time.Unix(1000, 0)
	want := &completion{Tokens: []int{5, 6, 7}, Finish: "length"}
	told := func(status int, code any, message string) error {
		return &answerError{Status: status, Code: code, Message: message, Leg: "decode"}
	}
	down := []span{{begin.Add(time.Second), begin.Add(2 * time.Second)}}
	for _, tc := range []struct {
		name  string
		got   *completion
		err   error
		took  time.Duration
		left  bool
		down  []span
		class string
		phase string
		fault string // part of it; empty: none
	}{
		{name: "right", got: &completion{Tokens: []int{5, 6, 7}, Finish: "length"}, class: right},
		{name: "wrong tokens", got: &completion{Tokens: []int{5, 6, 8}, Finish: "length"}, fault: "got tokens [5 6 8]"},
		{name: "tokens of another", got: &completion{Tokens: []int{9, 9}, Finish: "length"}, fault: "of request #42"},
		{name: "a 200 that lacks tokens", got: &completion{Tokens: []int{5}, Finish: "length"}, fault: "got 1 tokens (length) and no error"},
		{name: "another end", got: &completion{Tokens: []int{5, 6, 7}, Finish: "stop"}, fault: "(stop)"},
		{name: "wrong tokens before an error", got: &completion{Tokens: []int{6}}, err: told(0, "x", "y"), fault: "got tokens [6]"},
		{name: "error", err: told(502, "kv_transfer_wait", "y"), class: errored, phase: "decode kv_transfer_wait"},
		{name: "error in a stream", got: &completion{Tokens: []int{5}}, err: told(0, 502.0, "y"), class: errored, phase: "decode"},
		{name: "internal error", err: told(500, "internal_error", "y"), fault: "names nothing"},
		{name: "the request is blamed", err: told(400, "invalid_value", "y"), fault: "names nothing"},
		{name: "error without a message", err: told(502, "kv_transfer_wait", ""), fault: "names nothing"},
		{name: "too late", err: told(502, "kv_transfer_wait", "y"), took: time.Minute, fault: "ended after 1m0s"},
		{name: "too late and right", got: want, took: time.Minute, fault: "ended after 1m0s"},
		{name: "left", err: context.Canceled, left: true, class: aborted},
		{name: "left, but answered", got: want, left: true, class: right},
		{name: "cancelled, but not by the client", err: context.Canceled, fault: "no answer"},
		{name: "connection lost", err: errors.New("EOF"), fault: "no answer although"},
		{name: "connection lost with the router", err: errors.New("EOF"), took: 1500 * time.Millisecond, down: down, class: errored, phase: "no router"},
		{name: "connection lost before the router", err: errors.New("EOF"), took: 500 * time.Millisecond, down: down, fault: "no answer although"},
	} {
		a := &fireAnswer{got: tc.got, err: tc.err, begin: begin, end: begin.Add(tc.took), left: tc.left}
		v := judge(a, want, 10*time.Second, tc.down, func(tokens []int) int {
			if tokens[0] == 9 {
				return 42
			}
			return -1
		})
		if tc.fault != "" {
			if !strings.Contains(v.fault, tc.fault) {
				t.Errorf("%s: fault %q, want one with %q", tc.name, v.fault, tc.fault)
			}
		} else if v != (verdict{class: tc.class, phase: tc.phase}) {
			t.Errorf("%s: %+v", tc.name, v)
		}
		var sum tally
		sum.add(a, v)
		if n := sum.right + sum.aborted + len(sum.faults) + len(sum.errors); n != 1 {
			t.Errorf("%s: counted %d times", tc.name, n)
		}
	}
}
