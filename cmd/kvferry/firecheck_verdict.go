package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// fireAnswer is what became of one request of the fault check.
type fireAnswer struct {
	fireRequest
	got        *completion // what came, perhaps not all of it
	err        error
	begin, end time.Time
	left       bool // the client left before the end
}

// verdict is what an answer is worth. A zero fault means that the answer is as it may be.
type verdict struct {
	class string // right, error, aborted
	phase string // of an error: where it happened
	fault string // why the check fails
}

const (
	right   = "right"
	errored = "error"
	aborted = "aborted"
)

// span is a time in which something was broken.
type span struct{ from, to time.Time }

// judge compares an answer with what a single engine gives. routerDown are the times at which there
// was no router to answer; own finds the request whose tokens an answer has.
func judge(a *fireAnswer, want *completion, bound time.Duration, routerDown []span, own func([]int) int) verdict {
	fault := func(class, format string, args ...any) verdict {
		return verdict{class: class, fault: fmt.Sprintf("request #%d: ", a.number) + fmt.Sprintf(format, args...)}
	}
	if took := a.end.Sub(a.begin); took > bound {
		return fault(errored, "ended after %v, the bound is %v: %v", took.Round(time.Millisecond), bound, a.err)
	}
	var tokens []int
	if a.got != nil {
		tokens = a.got.Tokens
	}
	if !isPrefix(tokens, want.Tokens) {
		whose := ""
		if n := own(tokens); n >= 0 {
			whose = fmt.Sprintf("; these are the tokens of request #%d", n)
		}
		return fault(errored, "got tokens %v, a single engine gives %v%s", tokens, want.Tokens, whose)
	}
	switch {
	case a.err == nil && (len(tokens) != len(want.Tokens) || a.got.Finish != want.Finish):
		return fault(errored, "got %d tokens (%s) and no error, a single engine gives %d (%s)", len(tokens), a.got.Finish, len(want.Tokens), want.Finish)
	case a.err == nil:
		return verdict{class: right}
	case a.left && errors.Is(a.err, context.Canceled):
		return verdict{class: aborted}
	}
	var told *answerError
	if !errors.As(a.err, &told) {
		if slices.ContainsFunc(routerDown, func(s span) bool { return a.begin.Before(s.to) && a.end.After(s.from) }) {
			return verdict{class: errored, phase: "no router"}
		}
		return fault(errored, "no answer although the router was there: %v", a.err)
	}
	phase := told.phase()
	if told.Message == "" || phase == "" || !honestStatus(told) {
		return fault(errored, "an error that names nothing, or that no fault explains: %+v", *told)
	}
	return verdict{class: errored, phase: phase}
}

// phase is the code of an error, with the leg that failed.
func (e *answerError) phase() string {
	code, ok := e.Code.(string)
	if !ok {
		code = e.Type
	}
	return strings.TrimSpace(cmp.Or(e.Leg, "router") + " " + code)
}

// honestStatus tells whether an error says that an engine or the way to it failed. The requests of
// the check are valid, and no fault of the check makes an engine fail in itself.
func honestStatus(e *answerError) bool {
	return e.Status == 0 || e.Status == 502 || e.Status == 503 || e.Status == 504
}

func isPrefix(a, of []int) bool {
	return len(a) <= len(of) && slices.Equal(a, of[:len(a)])
}

// tally counts verdicts.
type tally struct {
	right, aborted int
	errors         map[string]int // by phase
	faults         []string
	slowest        time.Duration
}

func (t *tally) add(a *fireAnswer, v verdict) {
	t.slowest = max(t.slowest, a.end.Sub(a.begin))
	switch {
	case v.fault != "":
		t.faults = append(t.faults, v.fault)
	case v.class == right:
		t.right++
	case v.class == aborted:
		t.aborted++
	default:
		if t.errors == nil {
			t.errors = map[string]int{}
		}
		t.errors[v.phase]++
	}
}

// String accounts for every request.
func (t *tally) String() string {
	total := 0
	var phases []string
	for _, p := range slices.Sorted(maps.Keys(t.errors)) {
		total += t.errors[p]
		phases = append(phases, fmt.Sprintf("%s %d", p, t.errors[p]))
	}
	s := fmt.Sprintf("%d right, %d aborted by their clients, %d honest errors", t.right, t.aborted, total)
	if total > 0 {
		s += " (" + strings.Join(phases, ", ") + ")"
	}
	if n := len(t.faults); n > 0 {
		s += fmt.Sprintf(", %d WRONG", n)
	}
	return s
}
