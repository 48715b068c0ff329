package scheduler

import (
	"fmt"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// stage makes the registration, or in pull the read, for the blocks that D lacks: from the one that
// holds the first token not computed to the one that holds the last token of which P has the KV.
func (h *Half) stage(now time.Time, q *request, blocks kv.BlockIDs, computed int) {
	first, end := computed/h.cfg.BlockSize, ceilDiv(q.tokens, h.cfg.BlockSize)
	var problem string
	switch {
	case len(blocks) != 1:
		problem = fmt.Sprintf("it has blocks of %d KV-cache groups; only one group is supported", len(blocks))
	case computed < 0 || computed >= q.tokens:
		problem = fmt.Sprintf("%d tokens are said to be computed of a prompt of %d", computed, q.tokens)
	case len(blocks[0]) < end:
		problem = fmt.Sprintf("%d blocks were allocated; its %d prompt tokens need %d", len(blocks[0]), q.tokens, end)
	}
	if problem != "" {
		q.err = q.fail(connector.PhaseRegistration, problem)
		q.state = failing
		h.heartbeats.remove(q)
		if len(h.failures) == 0 {
			h.failedAt = now
		}
		h.failures = append(h.failures, q)
		return
	}
	digest := q.digest
	if q.earlier != nil {
		digest = q.earlier.digest
	}
	mine := append([]kv.BlockID(nil), blocks[0][first:end]...)
	q.blocks = len(mine)
	q.registration = connector.Registration{
		ID:         q.id,
		TransferID: q.transfer,
		Blocks:     kv.BlockIDs{mine},
		StartToken: first * h.cfg.BlockSize,
		NumTokens:  q.tokens,
		Digest:     digest,
		Peer:       q.peer,
		Lease:      q.lease,
	}
	q.state = staged
	q.ranks = newRankSet(h.cfg.TP * h.cfg.PP)
	h.registrations = append(h.registrations, q)
	h.watchdogs.Set(&q.watchdog, now.Add(h.cfg.RegistrationTimeout))
	h.stats.Registered++
}

// cancel gives up a request that the workers have: they are told once, and its end waits for all
// of them. The first reason stays.
func (h *Half) cancel(q *request, err *connector.Error) {
	if q.err == nil {
		q.err = err
	}
	if q.state != shipped {
		return
	}
	q.state = cancelling
	h.watchdogs.Remove(&q.watchdog)
	h.heartbeats.remove(q)
	h.cancels = append(h.cancels, q)
	h.stats.Cancelled++
}

// withdraw has P told of a request that no rank will register or read.
func (h *Half) withdraw(q *request, why string) {
	h.withdrawn = append(h.withdrawn, connector.Withdrawal{
		ID: q.id, TransferID: q.transfer, Remote: q.remote, Digest: q.digest, Peer: q.peer, Readers: q.readers, Reason: why,
	})
	h.stats.Withdrawn++
}

// progress re-arms the watchdog of a request that its prefill engine works on: the bound counts
// silence, not time.
func (h *Half) progress(now time.Time, id kv.RequestID) {
	if q := h.requests[id]; q != nil && q.state == shipped {
		h.watchdogs.Set(&q.watchdog, now.Add(h.cfg.RegistrationTimeout))
	}
}

// received takes one rank's report about a receive.
func (h *Half) received(rank int, r connector.ReceiveReport) (connector.Outcome, bool) {
	q := h.requests[r.ID]
	if q == nil || q.state != shipped && q.state != cancelling {
		h.stats.UnknownReports++
		return connector.Outcome{}, false
	}
	if !q.ranks.add(rank) {
		h.stats.DuplicateReports++
		return connector.Outcome{}, false
	}
	if r.Err != nil {
		err := *r.Err
		h.cancel(q, &err)
	} else {
		q.facts = slower(q.facts, r.Transfer)
	}
	if !q.ranks.full() {
		return connector.Outcome{}, false
	}
	return h.end(q), true
}

// slower adds a rank's facts to those of the ranks before it: bytes are summed, times are those of
// the slowest rank, which names the transport.
func slower(a, b connector.TransferFacts) connector.TransferFacts {
	bytes := a.Bytes + b.Bytes
	out := a
	if out.Transport == "" || b.Waited > a.Waited {
		out = b
	}
	out.Bytes = bytes
	out.Took = max(a.Took, b.Took)
	out.Blocks = max(a.Blocks, b.Blocks)
	return out
}

func (h *Half) registrationDropped(q *request, reason string) {
	h.cfg.Events.Emit(event.RegistrationDropped{Request: q.id, Peer: q.peer.Engine, Reason: reason})
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
