package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// loadFailed ends a receive that did not bring its KV. Nobody writes the blocks any more; none of
// them was offered to the prefix cache. Under kv.RecomputeOnLoadFailure the request goes back to where
// its arrival places it, as one whose prompt is computed here: External is asked once only.
func (m *Machine) loadFailed(now time.Time, r *request, err *connector.Error) {
	m.stats.ReceiveFailed++
	switch {
	case r.lost != nil:
		err, r.lost = r.lost, nil
	case err == nil:
		err = &connector.Error{Request: r.ID, Peer: r.Params.RemoteEngineID, Phase: connector.PhaseTransfer,
			Reason: "the connector gave the blocks back without a reason"}
	}
	if m.policy(r) != kv.RecomputeOnLoadFailure {
		m.finish(now, r, connector.FinishError, err)
		return
	}
	m.strip(r)
	r.loadErr, r.usage.Recomputed = err, r.external
	r.counted, r.usage.Cached = false, 0
	m.stats.Recomputed++
	m.enqueue(r)
	m.tierLook(now, r)
}

// policy is what becomes of a request whose KV does not come. A prefill leg computes: that is what it is for.
func (m *Machine) policy(r *request) kv.LoadFailurePolicy {
	if r.Params.DoRemoteDecode {
		return kv.RecomputeOnLoadFailure
	}
	if p := r.Params.LoadFailurePolicy; p != "" {
		return p
	}
	return m.cfg.LoadFailure
}

// parking is the clock of an engine in which nothing goes on: no step, no news of a peer, and the
// blocks that somebody needs belong to receives. Peers that say every few seconds that they live
// could keep it so for ever, if what they wait for are blocks that this engine's other requests hold
// with them.
type parking struct {
	on    bool
	since time.Time
}

// watchParking runs the clock after every event; progress tells that the event ended a receive or a
// hold. It reports whether blocks were given back.
func (m *Machine) watchParking(now time.Time, progress bool) bool {
	switch {
	case m.cfg.ParkTimeout == 0, m.inFlight, !m.starved, len(m.parked()) == 0:
		m.parking = parking{}
	case !m.parking.on || progress:
		m.parking = parking{on: true, since: now}
	case !now.Before(m.parking.since.Add(m.cfg.ParkTimeout)):
		m.parking.since = now
		return m.unpark(now)
	}
	return false
}

// parked is the receives that can be given up, by arrival: none while the workers have yet to say
// that one given up earlier is over. What a prefill leg reads back comes or fails by itself within
// seconds: its peer needs no blocks for it.
func (m *Machine) parked() []*request {
	if m.remote == 0 {
		return nil
	}
	var rs []*request
	for _, r := range m.requests {
		switch {
		case r.state != remote || r.Params.DoRemoteDecode:
		case r.lost != nil:
			return nil
		default:
			rs = append(rs, r)
		}
	}
	slices.SortFunc(rs, byArrival)
	return rs
}

// lacking is how many blocks the first request that starves lacks at most.
func (m *Machine) lacking() int {
	if i := slices.IndexFunc(m.waiting, func(r *request) bool { return r.starved }); i >= 0 && !m.stalled {
		return m.blocksFor(len(m.waiting[i].tokens)) - m.pool.Free()
	}
	return 1 - m.pool.Free()
}

// unpark gives receives up, the latest first, until the first request that starves has what it
// needs. It reports whether blocks came back at once; mostly they come when the workers say so.
func (m *Machine) unpark(now time.Time) (freed bool) {
	need := m.lacking()
	for _, r := range slices.Backward(m.parked()) {
		need -= len(r.blocks)
		err := &connector.Error{Request: r.ID, Peer: r.Params.RemoteEngineID, Phase: connector.PhaseLimit, Reason: fmt.Sprintf(
			"its KV did not come within %v while another request needed the %d blocks that it held; give the engine more KV blocks, or fewer requests at a time",
			m.cfg.ParkTimeout, len(r.blocks))}
		m.stats.Unparked++
		r.left, r.lost = true, err
		if hold, _ := m.conn.Finished(now, r.ID, connector.FinishAbort, kv.BlockIDs{slices.Clone(r.blocks)}, r.computed); !hold {
			m.loadFailed(now, r, nil)
			freed = true
		}
		if need <= 0 {
			break
		}
	}
	return freed
}
