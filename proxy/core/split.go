package core

import (
	"fmt"
	"strconv"

	"github.com/kvferry/kvferry/openai"
)

// split makes a request of its own for each answer that a body asks for: one prompt, n of 1. Answers to
// one prompt are neighbours: answer i is the i%n-th to prompt i/n, as engines count their choices. A
// seed is the body's plus i%n, as engines give it to the answers of one prompt, so that a pair's tokens
// are those of a single engine.
//
// It gives nil when the body asks for one answer, and a reason when the request cannot be split. Values
// that no engine accepts stay as they are: the engine names them.
func split(api API, body *openai.Object) (answers []*openai.Object, n int, reason string) {
	n = 1
	if raw := body.Present("n"); raw != nil && isNumberAbove(raw, 1) {
		var err error
		if n, err = strconv.Atoi(string(raw)); err != nil {
			return nil, 1, "n is no integer"
		}
	}
	var prompts [][]byte // nil: the body's own
	if raw := body.Present("prompt"); api == Completions && severalPrompts(raw) {
		var ok bool
		if prompts, ok = openai.Elements(raw, MaxAnswers); !ok {
			return nil, n, fmt.Sprintf("more than %d prompts", MaxAnswers)
		}
		for _, p := range prompts {
			if p[0] != prompts[0][0] {
				return nil, n, "prompts of several types"
			}
		}
	}
	count := max(1, len(prompts))
	switch {
	case n > MaxAnswers/count:
		return nil, n, fmt.Sprintf("more than %d answers", MaxAnswers)
	case n == 1 && prompts == nil:
		return nil, n, ""
	}
	seed, seeded := int64(0), false
	if raw := body.Present("seed"); raw != nil {
		v, err := strconv.ParseInt(string(raw), 10, 64)
		seed, seeded = v, err == nil
	}
	for i := range count * n {
		o := body.Clone()
		if prompts != nil {
			o.Set("prompt", prompts[i/n])
		}
		if n > 1 {
			o.Set("n", []byte("1"))
		}
		if k := int64(i % n); seeded && k > 0 {
			o.Set("seed", strconv.AppendInt(nil, seed+k, 10)) // beyond the largest it wraps, as engines' does
		}
		answers = append(answers, o)
	}
	return answers, n, ""
}
