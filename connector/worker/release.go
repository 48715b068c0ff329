package worker

import (
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// givenUp is how a hold ends that this engine was told to let go: its answer reached nobody who would
// ask for the KV, or the router has no decode engine for it.
var givenUp = ending{connector.PhaseCancel, "nobody is to take the KV any more: the prefill engine was told to let it go", "released"}

// releaseHold ends a hold that nobody will ask for. Blocks that nothing reads come back at once. A WRITE
// that may be reading them is told to end and its D is told why; a READ fails, since its permission goes
// first. What has ended meanwhile, or is another hold of the same id, is left alone. A registration that
// comes later is answered as one of an ended lease is.
func (m *machine) releaseHold(now time.Time, r connector.Release) {
	h := m.producer.holds[r.ID]
	if h == nil || h.gen != r.Lease {
		m.stats.StrayReleases++
		return
	}
	m.stats.HoldsGivenUp++
	if m.cfg.Mode == kv.Pull {
		m.endLoans(h, givenUp)
		return
	}
	if u := h.push; u != nil && (u.state == writing || u.state == posting) {
		m.stopPush(u, givenUp.reason)
		return
	}
	m.endUnread(now, h, givenUp)
}

// endUnread ends a hold of push whose blocks no transfer reads, and tells the D whose registration it
// has; one that registers later is told then.
func (m *machine) endUnread(now time.Time, h *hold, why ending) {
	u := h.push
	if u == nil {
		m.remember(now, h.identity, why.phase, why.reason)
		m.endHold(h, why.phase, why.reason, why.how)
		return
	}
	m.endHold(h, why.phase, why.reason, why.how)
	m.endPush(u)
	m.dropRegistration(u.reg, why.reason)
	m.sendFailure(u.reg, why.phase, why.reason)
}
