package worker

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
)

// hold is one finished request of P whose blocks are kept under a lease. It ends exactly once, by
// endHold, and never while a transfer of it may move bytes.
type hold struct {
	id       kv.RequestID
	identity identity
	have     geometry.Have
	gen      kv.Generation // of the lease

	earlier  bool               // kept by D for the next turn of a conversation
	prefixes []connector.Digest // then, of its first block, its first two blocks and so on

	lease deadline.Item[any]
	taken bool   // nothing was wrong with it
	over  ending // while its blocks may be read, whose end ends the hold

	push *push // nil: no registration yet
	loan loan  // in pull

	match []*node[matchKey, hold] // filed for registrations; empty while it has a push
	names []*node[leaseKey, hold] // filed for heartbeats
}

// leaseKind says how a heartbeat may name a request.
type leaseKind uint8

const (
	leaseID       leaseKind = iota // P's own id
	leaseTransfer                  // the transfer id
	leaseBase                      // the base id, which D's own id shares
	leaseClient                    // the X-Request-Id, which a stock D behind a concurrent router names
)

type leaseKey struct {
	kind leaseKind
	id   string
}

// startHold takes the lease and looks for a registration.
func (m *machine) startHold(now time.Time, f connector.FinishedBlocks) {
	if m.producer.holds[f.ID] != nil {
		m.ignore("", "finished request of our ledger", fmt.Sprintf("request %s is held already", f.ID))
		return
	}
	h := &hold{id: f.ID, identity: identity{transfer: f.TransferID, id: f.ID, digest: f.Digest, hasDigest: true}}
	h.lease.Value = h
	m.producer.holds[f.ID] = h
	h.gen, h.earlier, h.prefixes = f.Generation, f.Earlier, f.Prefixes
	m.producer.newestLease = max(m.producer.newestLease, f.Generation)
	cancelled := m.producer.endPrefill(f.ID)
	switch {
	case cancelled != "":
		m.endHold(h, connector.PhaseCancel, cancelled, "cancelled")
		return
	case len(m.producer.holds) > maxHolds:
		m.endHold(h, connector.PhaseLimit, fmt.Sprintf("this rank holds %d requests already", maxHolds), "failed")
		return
	case len(f.Blocks) != 1:
		m.endHold(h, connector.PhaseTransfer, fmt.Sprintf("blocks of %d KV-cache groups; one is supported", len(f.Blocks)), "failed")
		return
	}
	h.have = geometry.Have{Blocks: f.Blocks[0], NumTokens: f.NumTokens}
	if _, err := m.cfg.Layout.Kernel(h.have.Blocks, geometry.Prefill); err != nil {
		m.endHold(h, connector.PhaseTransfer, err.Error(), "failed")
		return
	}
	h.taken = true
	m.timers.Set(&h.lease, now.Add(f.Lease))
	m.emit(event.LeaseTaken{Request: h.id, Until: f.Lease, Blocks: len(h.have.Blocks)})
	m.stats.LeasesTaken++
	for _, key := range leaseKeys(h) {
		h.names = append(h.names, m.producer.leases.add(key, h))
	}
	if m.cfg.Mode == kv.Push {
		m.offer(now, h)
	}
}

// leaseKeys are the names by which a heartbeat may extend the lease.
func leaseKeys(h *hold) []leaseKey {
	keys := []leaseKey{{leaseID, string(h.id)}, {leaseBase, string(h.id.Base())}}
	if h.identity.transfer != "" {
		keys = append(keys, leaseKey{leaseTransfer, string(h.identity.transfer)})
	}
	if id := clientID(h.id.Base()); id != "" {
		keys = append(keys, leaseKey{leaseClient, id})
	}
	return keys
}

// clientID is the X-Request-Id inside a base id: `cmpl-R-0`, `chatcmpl-R`, and with n > 1
// `1_cmpl-R-0` (nixl-connector.md, section 14); empty when there is none.
func clientID(base kv.BaseRequestID) string {
	s := string(base)
	if i := strings.IndexByte(s, '_'); i > 0 && digits(s[:i]) {
		s = s[i+1:]
	}
	if rest, ok := strings.CutPrefix(s, "chatcmpl-"); ok {
		return rest
	}
	rest, ok := strings.CutPrefix(s, "cmpl-")
	if !ok {
		return ""
	}
	if i := strings.LastIndexByte(rest, '-'); i > 0 && digits(rest[i+1:]) {
		return rest[:i]
	}
	return rest
}

func digits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

const leaseOver = "its lease ended before a decode engine had taken the KV"

// ending is why a hold ends before its blocks were delivered. The zero value is none.
type ending struct {
	phase  connector.Phase
	reason string
	how    string // of event.LeaseEnded
}

// expiry is the end of a hold's lease.
func (h *hold) expiry() ending {
	if h.earlier {
		return ending{connector.PhaseLease, "it was kept for the next turn of its conversation, which did not begin in time", "expired"}
	}
	return ending{connector.PhaseLease, leaseOver, "expired"}
}

// leaseExpired ends a hold, or leaves that to the transfer that reads its blocks.
func (m *machine) leaseExpired(now time.Time, h *hold) {
	m.stats.LeasesExpired++
	switch u := h.push; {
	case m.cfg.Mode == kv.Pull:
		m.endLoans(h, h.expiry())
	case u != nil && (u.state == writing || u.state == posting):
		h.over = cmp.Or(h.over, h.expiry())
	default:
		m.endUnread(now, h, h.expiry())
	}
}

// endHold gives the blocks back. A phase says that they were not delivered.
func (m *machine) endHold(h *hold, phase connector.Phase, reason, how string) {
	var err *connector.Error
	if phase != "" {
		err = &connector.Error{Request: h.id, Phase: phase, Reason: reason}
		if h.push != nil {
			err.Peer = h.push.reg.key.engine
		}
	}
	m.timers.Remove(&h.lease)
	m.endLoan(h, phase, reason, how)
	m.unfile(h)
	m.producer.leases.remove(h.names)
	h.names = nil
	delete(m.producer.holds, h.id)
	if h.taken {
		m.emit(event.LeaseEnded{Request: h.id, Reason: how})
	} else {
		m.emit(event.LeaseRefused{Request: h.id, Phase: string(phase), Reason: reason})
	}
	m.do(reportSent{connector.SentReport{ID: h.id, Err: err}})
}

// unfile takes the hold out of the matching table.
func (m *machine) unfile(h *hold) {
	m.producer.blocks.remove(h.match)
	h.match = nil
}
