package core

// maxResets bounds the resets that wait: somebody waits for each, and one does for all.
const maxResets = 16

// resetCache takes a ResetCache.
func (m *Machine) resetCache(e ResetCache) {
	switch {
	case m.remote+m.held == 0:
		m.forget(e.Ticket)
	case !e.Wait:
		m.do(CacheReset{Ticket: e.Ticket, Err: m.cacheBusy()})
	case len(m.resets) >= maxResets:
		m.do(CacheReset{Ticket: e.Ticket, Err: &CacheBusyError{Waiting: len(m.resets)}})
	default:
		m.resets = append(m.resets, e.Ticket)
	}
}

func (m *Machine) giveUpReset(ticket uint64) {
	for i, t := range m.resets {
		if t == ticket {
			m.resets = append(m.resets[:i], m.resets[i+1:]...)
			m.do(CacheReset{Ticket: ticket, Err: m.cacheBusy()})
			return
		}
	}
}

func (m *Machine) cacheBusy() error { return &CacheBusyError{Receiving: m.remote, Held: m.held} }

// resetWaiting carries out the resets that have waited long enough.
func (m *Machine) resetWaiting() {
	if len(m.resets) == 0 || m.remote+m.held > 0 {
		return
	}
	for _, t := range m.resets {
		m.forget(t)
	}
	m.resets = nil
}

// forget empties the prefix cache. Requests that have KV go on with it, and what they compute behind
// it is as old as it is: they offer nothing to the cache as long as they keep their blocks.
func (m *Machine) forget(ticket uint64) {
	n := m.pool.Forget()
	for _, r := range m.requests {
		r.stale = r.blocks != nil
	}
	m.stats.CacheResets++
	if m.cfg.Tier {
		m.do(TierReset{})
	}
	m.do(CacheReset{Ticket: ticket, Blocks: n})
}
