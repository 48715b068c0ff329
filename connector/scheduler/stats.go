package scheduler

// Stats is the ledger's counters since New and its sizes now, for metrics and tests.
type Stats struct {
	Refused          uint64 // at arrival
	Registered       uint64 // D: registrations staged
	Expired          uint64 // D: by the watchdog
	Cancelled        uint64 // D: workers told to give up
	Withdrawn        uint64 // D: ended before any worker knew of them
	Received         uint64 // D: whole KV in place
	Failed           uint64 // D: KV will not come
	Held             uint64 // P: finished under a lease
	Dropped          uint64 // P: ended without KV for anybody
	GivenUp          uint64 // P: holds that Release ended
	StrayReleases    uint64 // P: Releases of what is no hold
	Released         uint64 // blocks of finished or aborted requests given back
	UnknownReports   uint64 // of requests or ranks that the ledger does not have
	DuplicateReports uint64 // a second one of the same rank

	Requests    int // in the ledger now
	HeldNow     int // P: finished, not yet released
	Receiving   int // D: registered, not yet ended
	HeldBlocks  int // P: logical blocks under lease
	Heartbeats  int // D: requests that send signs of life
	PendingMeta int // entries that the next Metadata will carry, at most
}

// Stats returns a copy.
func (h *Half) Stats() Stats {
	s := h.stats
	s.Requests = len(h.requests)
	s.Heartbeats = len(h.heartbeats.waiting)
	s.PendingMeta = len(h.registrations) + len(h.queued) + len(h.processing) + len(h.withdrawn) + len(h.cancels) + len(h.finishing) + len(h.releasing) + len(h.dropped)
	for _, q := range h.requests {
		switch q.state {
		case finished, held:
			s.HeldNow++
			s.HeldBlocks += q.blocks
		case staged, shipped, cancelling:
			s.Receiving++
		}
	}
	return s
}

// Pending tells whether any hand-off is under way. Nothing depends on engine steps while it is; it
// serves a program that wants to drain before it ends.
func (h *Half) Pending() bool { return len(h.requests) > 0 }
