package scheduler

import (
	"fmt"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// finishProducer ends P's side: blocks of a finished prompt go under a lease, anything else is
// dropped. The blocks are cut to the prompt's tokens, so that what P generated beyond them is
// never paired with D's blocks (nixl-connector.md, H4).
func (h *Half) finishProducer(now time.Time, q *request, reason connector.FinishReason, blocks kv.BlockIDs, computed int) (bool, *kv.TransferParams) {
	if reason != connector.FinishLength && reason != connector.FinishStop {
		h.drop(q, fmt.Sprintf("the prefill ended as %q", reason))
		return false, nil
	}
	tokens := min(computed, q.prompt)
	var mine []kv.BlockID
	if len(blocks) == 1 {
		mine = append(mine, blocks[0][:min(len(blocks[0]), ceilDiv(max(tokens, 0), h.cfg.BlockSize))]...)
	}
	if len(mine) == 0 {
		why := "the prefill left no blocks"
		if len(blocks) > 1 {
			why = fmt.Sprintf("the prefill left blocks of %d KV-cache groups; only one group is supported", len(blocks))
		}
		p := h.response(q, nil, 0)
		h.drop(q, why)
		return false, p
	}
	tokens = min(tokens, len(mine)*h.cfg.BlockSize)
	held := kv.BlockIDs{mine}
	h.hold(now, q, held, tokens, h.cfg.Lease)
	return true, h.response(q, held.Clone(), tokens)
}

// hold stages the blocks for the workers, whose lease begins on delivery. The lease's generation is
// beyond those of an earlier life of this engine, as long as its clock does not go back.
func (h *Half) hold(now time.Time, q *request, blocks kv.BlockIDs, tokens int, lease time.Duration) {
	h.leases = max(h.leases+1, kv.Generation(max(now.UnixMicro(), 0)))
	q.lease = h.leases
	q.state = finished
	q.blocks = blocks.Len()
	q.ranks = newRankSet(h.cfg.TP * h.cfg.PP)
	q.keep = connector.FinishedBlocks{
		ID:         q.id,
		TransferID: q.transfer,
		Blocks:     blocks,
		NumTokens:  tokens,
		Lease:      lease,
		Digest:     q.digest,
		Generation: q.lease,
	}
	h.finishing = append(h.finishing, q)
	h.stats.Held++
}

// drop tells the workers that nobody will get this request's KV. In pull nobody can have asked for it
// yet: its answer tells the router.
func (h *Half) drop(q *request, why string) {
	if h.cfg.Mode == kv.Push {
		h.dropped = append(h.dropped, connector.DroppedRequest{ID: q.id, TransferID: q.transfer, Reason: why})
	}
	h.stats.Dropped++
	h.forget(q)
}

// response is what the prefill leg answers: where the KV is, as a decode leg needs it.
func (h *Half) response(q *request, blocks kv.BlockIDs, tokens int) *kv.TransferParams {
	if blocks == nil {
		blocks = kv.BlockIDs{}
	}
	return &kv.TransferParams{
		DoRemotePrefill: true,
		RemoteBlockIDs:  blocks,
		RemoteEngineID:  h.cfg.Engine,
		RemoteRequestID: q.id,
		RemoteHost:      h.cfg.Host,
		RemotePort:      h.cfg.Port,
		TPSize:          h.cfg.TP,
		DCPSize:         1,
		PPSize:          h.cfg.PP,
		RemoteNumTokens: tokens,
		Mode:            h.cfg.Mode,
		Lease:           q.lease,
	}
}

// Release gives a hold up for which nobody will ask: the workers end it as soon as nothing reads its
// blocks, and Released follows as for any other. It is about the hold of exactly this lease, which is
// never 0. Of everything else it is a counted no-op and answers false: an id that is unknown or over, a
// request that is not finished (waiting, being computed, or one of D's), another lease, a hold that was
// given up already.
func (h *Half) Release(id kv.RequestID, lease kv.Generation) bool {
	q := h.requests[id]
	if q == nil || q.state != finished && q.state != held || q.lease != lease || q.released {
		h.stats.StrayReleases++
		return false
	}
	q.released = true
	h.releasing = append(h.releasing, q)
	h.stats.GivenUp++
	return true
}

// sent takes one rank's report about held blocks.
func (h *Half) sent(rank int, r connector.SentReport) (connector.Outcome, bool) {
	q := h.requests[r.ID]
	if q == nil || q.state != held {
		h.stats.UnknownReports++
		return connector.Outcome{}, false
	}
	if !q.ranks.add(rank) {
		h.stats.DuplicateReports++
		return connector.Outcome{}, false
	}
	if r.Err != nil && q.err == nil {
		err := *r.Err
		q.err = &err
	}
	if !q.ranks.full() {
		return connector.Outcome{}, false
	}
	return h.end(q), true
}
