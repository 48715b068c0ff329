package core

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/kv"
)

// Check reports the first broken invariant of the machine and its pool. It is for tests: it visits
// every request and block.
func (m *Machine) Check() error {
	refs := map[kv.BlockID]int{}
	counts := map[state]int{}
	for id, r := range m.requests {
		counts[r.state]++
		for _, b := range r.blocks {
			refs[b]++
		}
		if err := m.checkRequest(r); err != nil {
			return fmt.Errorf("request %s: %w", id, err)
		}
	}
	for _, f := range m.flight {
		for _, b := range f.blocks {
			refs[b]++
		}
	}
	for _, c := range m.tier.copies {
		for _, b := range c.blocks {
			refs[b]++
		}
	}
	switch {
	case counts[ended] > 0:
		return fmt.Errorf("%d ended requests are still known", counts[ended])
	case counts[waiting] != len(m.waiting), counts[running] != len(m.running), counts[remote] != m.remote, counts[held] != m.held,
		counts[loading] != m.tier.loading:
		return fmt.Errorf("by state there are %v requests, by queue %d waiting, %d running, %d remote, %d loading, %d held",
			counts, len(m.waiting), len(m.running), m.remote, m.tier.loading, m.held)
	case !slices.IsSortedFunc(m.waiting, byArrival), !slices.IsSortedFunc(m.running, byArrival):
		return errors.New("a queue is not in the order of arrival")
	case len(m.running) > m.cfg.MaxRunning:
		return fmt.Errorf("%d requests run, the limit is %d", len(m.running), m.cfg.MaxRunning)
	case !m.inFlight && len(m.waiting)+len(m.running) > 0 && m.remote+m.held+len(m.tier.looking)+len(m.tier.copies) == 0:
		return fmt.Errorf("%d requests wait and %d run, but no step is in flight and no event will come", len(m.waiting), len(m.running))
	case m.inFlight != (len(m.flight) > 0):
		return fmt.Errorf("in flight is %v with %d sequences", m.inFlight, len(m.flight))
	}
	return m.pool.Check(refs)
}

func (m *Machine) checkRequest(r *request) error {
	bs := m.cfg.BlockSize
	switch {
	case r.computed > len(r.blocks)*bs:
		return fmt.Errorf("%d tokens computed in %d blocks", r.computed, len(r.blocks))
	case r.offered*bs > r.computed:
		return fmt.Errorf("%d blocks offered to the prefix cache with %d tokens computed", r.offered, r.computed)
	case r.state != held && r.computed >= len(r.tokens):
		return fmt.Errorf("%d of %d tokens computed: nothing is left to sample from", r.computed, len(r.tokens))
	case r.tier.look != 0 && (r.state != waiting || r.blocks != nil):
		return fmt.Errorf("waits for the tier in state %d with %d blocks", r.state, len(r.blocks))
	case r.state == loading && m.tier.copies[r.tier.loading] == nil:
		return errors.New("waits for a copy that is not under way")
	case r.state == running && r.blocks == nil, r.state == remote && len(r.blocks) != m.blocksFor(len(r.Prompt)):
		return fmt.Errorf("state %d with %d blocks", r.state, len(r.blocks))
	case len(r.tokens) > m.cfg.Context():
		return fmt.Errorf("%d tokens are beyond the context of %d", len(r.tokens), m.cfg.Context())
	}
	return nil
}
