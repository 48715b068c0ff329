package scheduler

import (
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// readsBack tells whether a prefill leg names what a decode engine kept of an earlier turn. An engine that
// does not read it, because it is not Bidirectional or needs too little of it, has it given back. Its
// own blocks no engine reads: its prefix cache has them.
func (h *Half) readsBack(p *kv.TransferParams) bool {
	return h.cfg.Mode == kv.Pull && p.DoRemoteDecode && p.RemoteBlockIDs.Len() > 0 && p.RemoteEngineID != h.cfg.Engine
}

// peerRole is what a request's peer is to it.
func (q *request) peerRole() string {
	if q.prefill {
		return "decode"
	}
	return "prefill"
}

// goesOn is what becomes of a request that a peer has nothing to do with any more: P computes the rest
// of the prompt, whether its read went well or not; D goes on or computes, and keeps its blocks for
// the next turn. Of everything else the ledger has nothing more to say.
func (h *Half) goesOn(q *request) {
	next := processing
	switch {
	case q.prefill:
	case h.cfg.Bidirectional && q.readers == 1:
		next = decoding
	default:
		h.forget(q)
		return
	}
	h.watchdogs.Remove(&q.watchdog)
	h.heartbeats.remove(q)
	q.state = next
	q.peer, q.remote, q.lease, q.from, q.earlier = connector.PeerAddr{}, "", 0, nil, nil
	q.blocks, q.err, q.facts, q.ranks = 0, nil, connector.TransferFacts{}, rankSet{}
}

// finishTurn ends a request of D: what it has computed is kept for the next turn of the conversation,
// as a prefill leg needs it. Of several answers to one prompt none is kept, since nobody knows with
// which of them the conversation goes on.
func (h *Half) finishTurn(now time.Time, q *request, reason connector.FinishReason, blocks kv.BlockIDs, computed int) (bool, *kv.TransferParams) {
	if reason != connector.FinishLength && reason != connector.FinishStop || len(blocks) != 1 || computed < 1 {
		h.forget(q)
		return false, nil
	}
	mine := append([]kv.BlockID(nil), blocks[0][:min(len(blocks[0]), ceilDiv(computed, h.cfg.BlockSize))]...)
	tokens := min(computed, len(mine)*h.cfg.BlockSize)
	if tokens == 0 {
		h.forget(q)
		return false, nil
	}
	q.digest = connector.Digest{} // until Kept
	h.hold(now, q, kv.BlockIDs{mine}, tokens, h.cfg.DecoderBlocksTTL)
	q.keep.Earlier = true
	p := h.response(q, kv.BlockIDs{mine}.Clone(), tokens)
	p.DoRemotePrefill, p.DoRemoteDecode = false, true
	expiry := h.cfg.Clock(now) + h.cfg.DecoderBlocksTTL.Seconds()
	p.RemoteBlocksExpiry = &expiry
	return true, p
}

// Kept tells what the blocks hold that Finished has asked for with parameters of a prefill leg: the
// digest of their tokens, and of the first block's, the first two blocks' and so on. It follows Finished
// before the next Metadata. Blocks of which nothing is told are lent to nobody who could ask.
func (h *Half) Kept(id kv.RequestID, digest connector.Digest, prefixes []connector.Digest) {
	if q := h.requests[id]; q != nil && q.state == finished && q.keep.Earlier {
		q.digest, q.keep.Digest, q.keep.Prefixes = digest, digest, prefixes
	}
}
