package worker

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// claim is one D request that reads a hold's blocks, or is about to. Its grant ends with it, at the
// latest with the hold.
type claim struct {
	serial uint64
	hold   *hold
	key    claimKey
	via    agent.PeerID       // the connection by which it was last sent
	addr   connector.PeerAddr // of D
	seq    uint64             // of its last message
	grant  agent.GrantID      // zero before it is given
	read   bool               // its READ is over
	ended  bool               // D does not want it any more
	recall *letter            // D is asked for its word that it does not read any more
}

// claimKey names a claim: D's agent, D's number, and what only D and we know of it, so that nobody else can
// speak of it.
type claimKey struct {
	from   agent.Name
	number kv.Generation
	token  wire.Token
}

// loan is what a hold lends in pull.
//
// The hold ends when as many of D's requests are done with it as D says it has, by the notification
// of a READ, by the same alone, or by a cancel of a claim. Before that only its lease ends it.
type loan struct {
	claims  []*claim
	readers int               // D's requests, as far as D has told
	done    int               // of them that have ended
	sent    bool              // one of them has read
	lost    map[claimKey]bool // claims whose connection was lost, and which may have read before; at most wire.MaxReaders
	reason  string
}

// lender is P's part of a machine in pull.
type lender struct {
	claims map[uint64]*claim // by serial, of live holds
	byKey  map[claimKey]*claim
}

func (l *lender) init() {
	l.claims = make(map[uint64]*claim)
	l.byKey = make(map[claimKey]*claim)
}

// onClaim gives a D the permission to read a hold's blocks, or says why not. A copy is answered as the
// first was.
func (m *machine) onClaim(sender agent.PeerID, c *wire.Claim) {
	from := sender.Name
	if x := m.lender.byKey[claimKey{from, c.Generation, c.Token}]; x != nil {
		if x.hold.id == c.ID {
			x.seq, x.via = c.Seq, sender
		}
		switch {
		case x.ended:
			m.refuseClaim(from, c, connector.PhaseLease, "this claim has ended")
		case x.grant != (agent.GrantID{}):
			m.answerClaim(x)
		}
		return
	}
	m.stats.ClaimsReceived++
	m.emit(event.ClaimReceived{Request: c.ID, Peer: c.From.Engine, Readers: c.Readers})
	h := m.producer.holds[c.ID]
	if phase, reason := m.unclaimable(h, c); reason != "" {
		m.claimRefused(c.ID, c.From.Engine, phase, reason)
		m.refuseClaim(from, c, phase, reason)
		return
	}
	ranges, err := m.cfg.Layout.Ranges(h.have.Blocks, geometry.Prefill)
	if err != nil { // the hold was checked when it began
		m.claimRefused(c.ID, c.From.Engine, connector.PhaseTransfer, err.Error())
		m.refuseClaim(from, c, connector.PhaseTransfer, err.Error())
		return
	}
	m.extendLease(h)
	x := &claim{serial: m.nextSerial(), hold: h, key: claimKey{from, c.Generation, c.Token}, via: sender, addr: addrOfSender(c.From), seq: c.Seq}
	h.loan.claims = append(h.loan.claims, x)
	h.loan.readers = max(h.loan.readers, c.Readers)
	m.lender.claims[x.serial] = x
	m.lender.byKey[x.key] = x
	m.do(lend{x.serial, from, ranges})
}

// unclaimable says why a claim must not be granted; "" if it may. D's word is compared with the hold in
// everything that decides what D will take its bytes for.
func (m *machine) unclaimable(h *hold, c *wire.Claim) (connector.Phase, string) {
	switch {
	case m.cfg.Mode != kv.Pull:
		return connector.PhaseHandshake, fmt.Sprintf("engine %q has the mode push; start both engines with the same --mode", m.cfg.Engine)
	case h == nil:
		return connector.PhaseLease, fmt.Sprintf("engine %q does not keep request %s: its lease has ended, its KV was taken already, or it never was here",
			m.cfg.Engine, c.ID)
	case h.over != (ending{}):
		return connector.PhaseLease, "its lease has ended"
	case c.Lease != 0 && c.Lease != h.gen:
		return connector.PhaseLease, fmt.Sprintf("lease %d of its hand-off parameters has ended; the request's lease is %d", c.Lease, h.gen)
	case h.earlier && !h.shares(c, m.cfg.Layout):
		return connector.PhaseParams, fmt.Sprintf("the prompt does not begin with the %d tokens of the earlier turn that were asked for", c.Tokens)
	case !h.earlier && connector.Digest(c.Digest) != h.identity.digest:
		return connector.PhaseParams, promptsDiffer
	case !h.earlier && c.Tokens != h.have.NumTokens:
		return connector.PhaseParams, fmt.Sprintf("the decode engine counts %d tokens, ours has %d", c.Tokens, h.have.NumTokens)
	case c.Blocks != wire.BlocksDigest(kv.BlockIDs{h.have.Blocks}):
		return connector.PhaseParams, "remote_block_ids are not the blocks of this request"
	case c.From.TP != m.cfg.TP:
		return connector.PhaseParams, (&geometry.MismatchError{What: "tensor-parallel size", Local: fmt.Sprint(m.cfg.TP), Remote: fmt.Sprint(c.From.TP)}).Error()
	case len(h.loan.claims) >= wire.MaxReaders:
		return connector.PhaseLimit, fmt.Sprintf("%d requests claim it already", wire.MaxReaders)
	}
	return "", ""
}

func (m *machine) claimRefused(id kv.RequestID, to kv.EngineID, phase connector.Phase, reason string) {
	m.stats.ClaimsRefused++
	m.emit(event.ClaimRefused{Request: id, Peer: to, Phase: string(phase), Reason: reason})
}

// onLent has the grant of a claim.
func (m *machine) onLent(in lent) {
	x := m.lender.claims[in.claim]
	if x == nil || x.ended {
		if in.err == nil {
			m.do(revoke{in.grant})
		}
		return
	}
	if in.err != nil {
		m.claimRefused(x.hold.id, x.addr.Engine, connector.PhaseLimit, in.err.Error())
		m.tellClaimant(x, connector.PhaseLimit, in.err.Error())
		m.endClaim(x)
		m.settleLoan(x.hold)
		return
	}
	x.grant = in.grant
	m.emit(event.GrantIssued{Request: x.hold.id, Peer: x.addr.Engine, Blocks: len(x.hold.have.Blocks)})
	m.answerClaim(x)
}

func (m *machine) answerClaim(x *claim) {
	c := &wire.Claimed{Seq: x.seq, RegistrationRef: refOf(x.hold.id, x.key.number, x.key.token), Grant: x.grant}
	m.tell(x.addr, x.key.from, func(r *remote) {
		if !x.ended {
			m.control(r, "permission", c)
		}
	})
}

// refuseClaim answers a claim that is not filed. It is not repeated: D asks again.
func (m *machine) refuseClaim(from agent.Name, c *wire.Claim, phase connector.Phase, reason string) {
	m.failClaim(addrOfSender(c.From), from, c.RegistrationRef, phase, reason)
}

func (m *machine) tellClaimant(x *claim, phase connector.Phase, reason string) {
	m.failClaim(x.addr, x.key.from, refOf(x.hold.id, x.key.number, x.key.token), phase, reason)
}

func (m *machine) failClaim(addr connector.PeerAddr, to agent.Name, ref wire.RegistrationRef, phase connector.Phase, reason string) {
	m.tell(addr, to, func(r *remote) {
		seq := m.letters.next(m.correspondent(r.name()))
		m.control(r, "refusal", &wire.Failed{Seq: seq, Receipt: m.tokens.next(), RegistrationRef: ref, Phase: string(phase), Reason: wire.BoundReason(reason)})
		m.stats.FailuresSent++
	})
}

// onClaimRead counts a D request that has read by its claim.
func (m *machine) onClaimRead(from agent.Name, c *wire.ReadDone) {
	x := m.lender.byKey[claimKey{from, c.Generation, c.Token}]
	if h := m.producer.holds[c.ID]; x == nil && h != nil && h.loan.lost[claimKey{from, c.Generation, c.Token}] {
		delete(h.loan.lost, claimKey{from, c.Generation, c.Token}) // it had read before its connection was lost
		h.loan.sent = true
		h.loan.done++
		m.emit(event.ClaimEnded{Request: c.ID, How: "read"})
		m.settleLoan(h)
		return
	}
	if x == nil || x.hold.id != c.ID || x.ended || x.read || x.grant == (agent.GrantID{}) {
		m.stats.AfterExpiry++
		m.ignore(from, "completion", fmt.Sprintf("request %s is not lent by this claim", c.ID))
		return
	}
	l := &x.hold.loan
	x.read, l.sent = true, true
	l.done++
	m.emit(event.ClaimEnded{Request: c.ID, Peer: x.addr.Engine, How: "read"})
	m.settleLoan(x.hold)
}

// onStockReadDone counts a D request that is done with a hold without a claim: it needs none of it, or its
// engine is a stock one. It says nothing of claims: whoever knows the request's id can send it.
func (m *machine) onStockReadDone(from agent.Name, c wire.Completion) {
	h := m.producer.holds[c.ID]
	if h == nil {
		m.stats.AfterExpiry++
		m.ignore(from, "completion", fmt.Sprintf("request %s is not held", c.ID))
		return
	}
	l := &h.loan
	l.readers = max(l.readers, min(c.N, wire.MaxReaders))
	l.done++
	m.emit(event.ClaimEnded{Request: c.ID, How: "unread"})
	m.settleLoan(h)
}

// onClaimCancelled ends a claim whose D does not read any more. It is acknowledged in any case.
func (m *machine) onClaimCancelled(from agent.Name, c *wire.Cancel) {
	m.ack(from, addrOfSender(c.From), wire.Ack{Seq: c.Seq, Receipt: c.Receipt})
	if !m.correspondent(from).seen.fresh(c.Receipt, maxLetters) {
		return
	}
	m.cancelReceived(c)
	x := m.lender.byKey[claimKey{from, c.Generation, c.Token}]
	if x == nil || x.ended {
		return // it was refused, or has ended with its hold
	}
	x.hold.loan.reason = "the " + x.hold.reader() + " engine gave it up: " + c.Reason
	m.endClaim(x)
	m.emit(event.ClaimEnded{Request: x.hold.id, Peer: x.addr.Engine, How: "cancelled"})
	m.settleLoan(x.hold)
}

// endClaim takes the permission back. The claim stays known until the hold ends, so that copies of its
// messages mean nothing.
func (m *machine) endClaim(x *claim) {
	l := &x.hold.loan
	x.ended = true
	if !x.read {
		l.done++
	}
	m.revokeClaim(x, "given up")
}

func (m *machine) revokeClaim(x *claim, reason string) {
	if x.grant == (agent.GrantID{}) {
		return
	}
	m.do(revoke{x.grant})
	m.emit(event.GrantRevoked{Request: x.hold.id, Reason: reason})
	x.grant = agent.GrantID{}
}

// active tells whether a D may be reading.
func (l *loan) active() bool {
	return slices.ContainsFunc(l.claims, func(x *claim) bool { return !x.ended && !x.read })
}

// settleLoan ends a hold with which all of D's requests are done.
func (m *machine) settleLoan(h *hold) {
	l := &h.loan
	switch {
	case l.active():
	case h.over != (ending{}):
		m.endHold(h, h.over.phase, h.over.reason, h.over.how)
	case l.done < max(l.readers, 1):
	case l.sent:
		m.endHold(h, "", "", "sent")
	case l.reason != "":
		m.endHold(h, connector.PhaseCancel, l.reason, "cancelled")
	default:
		m.endHold(h, "", "", "released")
	}
}

// endLoans ends a hold at its lease's end or when it is given up, also under a READ: the permission goes
// first, so that the READ fails and never brings what comes into the blocks next (H1, H2). An agent that
// cannot take a permission back keeps the blocks until its D's are done, which they are told to be.
func (m *machine) endLoans(h *hold, why ending) {
	if m.irrevocable && h.loan.active() {
		h.over = cmp.Or(h.over, why)
		for _, x := range h.loan.claims {
			if !x.ended && !x.read {
				m.recall(x)
			}
		}
		return
	}
	m.endHold(h, why.phase, why.reason, why.how)
}

// recall asks a D for its word that it does not read any more: its acknowledgement.
func (m *machine) recall(x *claim) {
	m.tell(x.addr, x.key.from, func(r *remote) {
		if x.ended || x.recall != nil {
			return
		}
		x.recall = m.send(r, "recall", 0, func(seq uint64, receipt wire.Token) wire.Notification {
			return &wire.Failed{Seq: seq, Receipt: receipt, RegistrationRef: refOf(x.hold.id, x.key.number, x.key.token), Phase: string(x.hold.over.phase), Reason: x.hold.over.reason}
		})
		if x.recall != nil {
			x.recall.claim = x.serial
		}
	})
}

// endLoan takes back what a hold that ends has lent.
func (m *machine) endLoan(h *hold, phase connector.Phase, reason, how string) {
	for _, x := range h.loan.claims {
		if !x.ended {
			m.revokeClaim(x, how)
			if !x.read {
				m.tellClaimant(x, phase, reason)
			}
			x.ended = true
		}
		m.forgetClaim(x)
	}
	h.loan.claims = nil
}

func (m *machine) forgetClaim(x *claim) {
	delete(m.lender.claims, x.serial)
	delete(m.lender.byKey, x.key)
	if x.recall != nil {
		m.dropLetter(x.recall)
	}
}

// claimsLost takes back what an agent that is gone was lent, by one connection of it or any, and tells
// whether anything was. It does not count as done: the engine may
// come back with a connection and claim again before the lease ends.
func (m *machine) claimsLost(name agent.Name, conn kv.Generation) bool {
	gone := slices.Collect(maps.Values(m.lender.claims))
	gone = slices.DeleteFunc(gone, func(x *claim) bool {
		return x.key.from != name || x.ended || conn != anyConnection && x.via.Gen != conn
	})
	slices.SortFunc(gone, func(a, b *claim) int { return cmp.Compare(a.serial, b.serial) })
	for _, x := range gone {
		h := x.hold
		if h.loan.lost == nil {
			h.loan.lost = make(map[claimKey]bool)
		}
		if x.grant != (agent.GrantID{}) && !x.read && len(h.loan.lost) < wire.MaxReaders {
			h.loan.lost[x.key] = true
		}
		x.ended = true
		m.revokeClaim(x, "the "+h.reader()+" engine is gone")
		m.forgetClaim(x)
		h.loan.claims = slices.DeleteFunc(h.loan.claims, func(y *claim) bool { return y == x })
	}
	for _, x := range gone { // all of them are lost before a hold of several is judged, and ends once
		if h := x.hold; h.over != (ending{}) && m.producer.holds[h.id] == h {
			m.settleLoan(h)
		}
	}
	return len(gone) > 0
}
