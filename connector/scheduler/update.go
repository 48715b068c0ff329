package scheduler

import (
	"time"

	"github.com/kvferry/kvferry/connector"
)

// Update takes one rank's report and returns what ended by it: a request ends when every rank has
// reported it; progress re-arms its watchdog. Reports of unknown requests or ranks, and second reports of one rank, are counted
// and change nothing.
func (h *Half) Update(now time.Time, out connector.WorkerOutput) []connector.Outcome {
	rank := out.Rank.PP*h.cfg.TP + out.Rank.TP
	if out.Rank.PP < 0 || out.Rank.PP >= h.cfg.PP || out.Rank.TP < 0 || out.Rank.TP >= h.cfg.TP {
		h.stats.UnknownReports += uint64(len(out.Sent) + len(out.Recv))
		return nil
	}
	var ended []connector.Outcome
	for _, r := range out.Sent {
		if o, ok := h.sent(rank, r); ok {
			ended = append(ended, o)
		}
	}
	for _, r := range out.Recv {
		if o, ok := h.received(rank, r); ok {
			ended = append(ended, o)
		}
	}
	for _, id := range out.Progress {
		h.progress(now, id)
	}
	return ended
}

// rankSet is the ranks that have reported one request.
type rankSet struct {
	seen []bool
	left int
}

func newRankSet(n int) rankSet { return rankSet{make([]bool, n), n} }

// add reports whether rank was not in the set.
func (s *rankSet) add(rank int) bool {
	if s.seen[rank] {
		return false
	}
	s.seen[rank] = true
	s.left--
	return true
}

func (s *rankSet) full() bool { return s.left == 0 }
