package core

// Candidate is an engine that may be chosen.
type Candidate struct {
	Name     string // HTTP address
	InFlight int    // legs of this router that run on it
}

// Policy chooses engines of one pool. It is called by one goroutine at a time.
type Policy interface {
	// Pick returns an index into candidates, which has at least one.
	Pick(candidates []Candidate) int
}

// RoundRobin takes engines in turn. The zero value is ready.
type RoundRobin struct{ last string }

// Pick takes the first candidate behind the last one chosen, in the order of the list, and so stays
// fair when candidates come and go.
func (r *RoundRobin) Pick(candidates []Candidate) int {
	pick := 0
	for i, c := range candidates {
		if c.Name == r.last {
			pick = (i + 1) % len(candidates)
			break
		}
	}
	r.last = candidates[pick].Name
	return pick
}
