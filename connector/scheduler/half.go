package scheduler

import (
	"fmt"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// state is where one request of the ledger stands.
type state uint8

const (
	// Of D, and of P while it reads back what D kept of an earlier turn:
	waiting    state = iota // arrived, not yet allocated; D's heartbeats run
	staged                  // registration or read waits for the next Metadata
	shipped                 // the workers have it; the watchdog runs
	cancelling              // given up; waits until every rank has reported
	failing                 // failed before any rank knew of it; Expire tells

	arrived    // P: not yet allocated
	processing // P: being computed
	decoding   // D, bidirectional: it has its KV, or computes it here; its blocks are to be kept
	finished   // P, or D for the next turn: held; the blocks wait for the next Metadata
	held       // the workers keep the blocks; waits until every rank has reported
	gone       // no longer in the ledger; queues may still name it
)

// request is one hand-off of this engine. The Half owns it.
type request struct {
	id       kv.RequestID
	transfer kv.TransferID
	peer     connector.PeerAddr // D: the prefill engine
	remote   kv.RequestID       // D: the id by which the router names the request at P
	prompt   int                // tokens
	tokens   int                // D: of them, whose KV P keeps; all in push
	readers  int                // D: requests here that take the same KV
	from     kv.BlockIDs        // pull: the peer's blocks, until staged for the workers
	prefill  bool               // P
	earlier  *earlier           // P: what it may read back
	digest   connector.Digest
	state    state

	registration connector.Registration   // D, staged: to write or to read
	keep         connector.FinishedBlocks // P, finished
	watchdog     deadline.Item[*request]
	blocks       int              // D: registered; P: held
	err          *connector.Error // why it will not arrive, or was not delivered
	aborted      bool             // D: the engine is done with it and waits for its blocks
	released     bool             // P: nobody will ask for its hold; the workers are told once
	lease        kv.Generation    // D: of P's hold, if its parameters tell; P: of its own
	ranks        rankSet          // reported
	facts        connector.TransferFacts
}

// earlier is what D kept of an earlier turn, as a prefill leg names it.
type earlier struct {
	digest connector.Digest // of the tokens that the prompt shares
	expiry *float64         // on the clock of D's side channel
}

// Half is the ledger. One goroutine, the engine's loop, owns it and calls its methods; none blocks.
type Half struct {
	cfg      Config
	requests map[kv.RequestID]*request

	// What the next Metadata carries, in the order in which it came about. Requests that have moved
	// on since then are left out there, so that an id that is used again is not taken for an old one.
	registrations []*request
	queued        []*request
	processing    []*request
	finishing     []*request
	releasing     []*request
	cancels       []*request
	dropped       []connector.DroppedRequest
	withdrawn     []connector.Withdrawal
	heartbeats    heartbeats
	leases        kv.Generation // the last one given

	watchdogs deadline.Queue[*request]
	failures  []*request // state failing, until Expire
	failedAt  time.Time  // of the first of them

	stats Stats
}

// New makes an empty ledger, or says which field of cfg is wrong.
func New(cfg Config) (*Half, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Half{cfg: cfg, requests: make(map[kv.RequestID]*request)}, nil
}

// Arrived tells of a new request. One without hand-off flags is none of the Half's business. An
// error means that nothing was kept. *wire.ParamError (a key is missing) and *connector.Error with
// PhaseParams are the client's fault; with PhaseLimit the engine has no room.
func (h *Half) Arrived(now time.Time, r connector.Request) error {
	if !r.Params.DoRemoteDecode && !r.Params.DoRemotePrefill {
		return nil
	}
	if err := h.check(r); err != nil {
		h.stats.Refused++
		return err
	}
	if p := r.Params; p.DoRemoteDecode && p.RemoteEngineID == h.cfg.Engine && p.Lease != 0 {
		h.Release(p.RemoteRequestID, p.Lease) // our own turn: the prefix cache has it
	}
	q := &request{
		id:       r.ID,
		transfer: r.Params.TransferID,
		prompt:   r.PromptTokens,
		digest:   r.Digest,
		state:    arrived,
	}
	q.watchdog.Value = q
	q.prefill = r.Params.DoRemoteDecode
	if back := h.readsBack(&r.Params); r.Params.DoRemotePrefill || back {
		q.state = waiting
		q.remote = r.Params.RemoteRequestID
		q.peer = connector.PeerAddr{
			Engine: r.Params.RemoteEngineID,
			Host:   r.Params.RemoteHost,
			Port:   r.Params.RemotePort,
			TP:     r.Params.TPSize,
			PP:     max(r.Params.PPSize, 1),
		}
		q.peer.TP = max(q.peer.TP, 1)
		q.lease = r.Params.Lease
		q.tokens, q.readers = q.prompt, max(r.Params.Readers, 1)
		switch {
		case back:
			q.from = r.Params.RemoteBlockIDs
			q.tokens = connector.EarlierTokens(&r.Params, q.prompt, h.cfg.BlockSize)
			q.earlier = &earlier{r.Earlier, r.Params.RemoteBlocksExpiry}
		case h.cfg.Mode == kv.Pull:
			q.from = r.Params.RemoteBlockIDs
			if n := r.Params.RemoteNumTokens; n > 0 {
				q.tokens = min(n, q.prompt)
			}
		}
		if !back { // what D keeps for the next turn is not kept longer by signs of life
			h.heartbeats.add(q)
		}
	} else if h.cfg.Mode == kv.Push { // nobody asks for it before it has ended otherwise
		h.queued = append(h.queued, q)
	}
	h.requests[r.ID] = q
	return nil
}

// External is the number of prompt tokens beyond the computed ones that come from a peer: all of
// them, or in pull as many as the parameters tell of, for a leg whose parameters have not been used, 0
// otherwise. It is 0 below the recompute threshold: then the peer has nothing to do but to give its
// blocks back. In pull it is 0, too, if only the last token is left, which is computed here anyway.
func (h *Half) External(id kv.RequestID, computed int) int {
	q := h.requests[id]
	if q == nil || q.state != waiting || q.earlier != nil && !h.cfg.Bidirectional {
		return 0
	}
	if h.cfg.Mode == kv.Pull && computed > 0 && computed >= q.prompt-1 {
		return 0
	}
	if n := q.tokens - computed; n > 0 && n >= h.cfg.RecomputeThreshold {
		return n
	}
	return 0
}

// Allocated tells that blocks, the request's whole block table, were allocated, that its first
// computed tokens are in the cache and that the next external ones come from a peer. It uses the
// parameters up. A request that cannot be registered with these blocks fails at once: the outcome
// comes from Expire, which is due now.
func (h *Half) Allocated(now time.Time, id kv.RequestID, blocks kv.BlockIDs, computed, external int) {
	q := h.requests[id]
	if q == nil {
		return
	}
	switch q.state {
	case arrived:
		q.state = processing
		if h.cfg.Mode == kv.Push {
			h.processing = append(h.processing, q)
		}
	case waiting:
		if external <= 0 {
			h.withdraw(q, "its decode request needs no KV from a peer")
			h.goesOn(q)
			return
		}
		h.stage(now, q, blocks, computed)
	}
}

// Finished tells that the request leaves the engine. hold asks the engine to keep its blocks until
// an outcome Released or ReceiveFailed for id; params, when not nil, belongs in the response.
func (h *Half) Finished(now time.Time, id kv.RequestID, reason connector.FinishReason, blocks kv.BlockIDs, computedTokens int) (hold bool, params *kv.TransferParams) {
	q := h.requests[id]
	if q == nil {
		return false, nil
	}
	switch q.state {
	case finished, held:
		return true, nil // already finished; the lease goes on
	case arrived, processing:
		return h.finishProducer(now, q, reason, blocks, computedTokens)
	case decoding:
		return h.finishTurn(now, q, reason, blocks, computedTokens)
	case shipped:
		h.cancel(q, q.fail(connector.PhaseCancel, "the request was aborted while it waited for KV"))
		q.aborted = true
		return true, nil
	case cancelling:
		q.aborted = true
		return true, nil
	default: // waiting, staged, failing: no rank knows of it
		h.withdraw(q, fmt.Sprintf("its decode request ended as %q before it asked for KV", reason))
		h.forget(q)
		return false, nil
	}
}

// Metadata takes what the workers are to do; false when there is nothing.
func (h *Half) Metadata(now time.Time) (connector.StepMeta, bool) {
	m := connector.StepMeta{Dropped: h.dropped, Withdrawn: h.withdrawn}
	for _, q := range h.registrations {
		if q.state != staged {
			continue
		}
		if h.cfg.Mode == kv.Pull {
			r := connector.Read{Registration: q.registration, Remote: q.remote, RemoteBlocks: q.from, Readers: q.readers}
			if q.earlier != nil {
				r.Earlier, r.Expiry = true, q.earlier.expiry
			}
			m.Reads = append(m.Reads, r)
		} else {
			m.Registrations = append(m.Registrations, q.registration)
		}
		q.registration, q.from = connector.Registration{}, nil
		q.state = shipped
	}
	for _, q := range h.queued {
		if q.state == arrived || q.state == processing || q.state == finished {
			m.Queued = append(m.Queued, connector.QueuedRequest{ID: q.id, TransferID: q.transfer, Digest: q.digest})
		}
	}
	for _, q := range h.processing {
		if q.state == processing || q.state == finished {
			m.Processing = append(m.Processing, q.id)
		}
	}
	for _, q := range h.finishing {
		m.Finished = append(m.Finished, q.keep)
		q.keep = connector.FinishedBlocks{}
		q.state = held
	}
	for _, q := range h.releasing {
		if q.state == held {
			m.Released = append(m.Released, connector.Release{ID: q.id, Lease: q.lease})
		}
	}
	for _, q := range h.cancels {
		if q.state == cancelling {
			m.Cancels = append(m.Cancels, q.id)
		}
	}
	h.registrations, h.queued, h.processing, h.finishing, h.releasing, h.cancels = nil, nil, nil, nil, nil, nil
	h.dropped, h.withdrawn = nil, nil
	if h.heartbeats.changed {
		m.Heartbeats, m.HasHeartbeats = h.heartbeats.groups(), true
	}
	any := len(m.Registrations) > 0 || len(m.Reads) > 0 || len(m.Queued) > 0 || len(m.Processing) > 0 || len(m.Finished) > 0 || len(m.Released) > 0 ||
		len(m.Dropped) > 0 || len(m.Cancels) > 0 || len(m.Withdrawn) > 0 || m.HasHeartbeats
	return m, any
}

// Deadline is the next moment at which Expire has something to do; false when there is none.
func (h *Half) Deadline() (time.Time, bool) {
	if len(h.failures) > 0 {
		return h.failedAt, true
	}
	return h.watchdogs.Next()
}

// Expire ends what has waited too long. A registration that no rank knows of fails here; one that
// the workers have is cancelled, and fails when every rank has reported.
func (h *Half) Expire(now time.Time) []connector.Outcome {
	var out []connector.Outcome
	for _, q := range h.failures {
		if q.state != failing {
			continue // aborted meanwhile
		}
		h.withdraw(q, q.err.Reason)
		out = append(out, h.end(q))
	}
	h.failures = nil
	for {
		q, ok := h.watchdogs.PopDue(now)
		if !ok {
			return out
		}
		h.stats.Expired++
		err := q.fail(connector.PhaseWait, "its "+q.peerRole()+" engine showed no progress for "+h.cfg.RegistrationTimeout.String()+
			"; it may be overloaded or gone: look at its log and queue")
		h.registrationDropped(q, "expired")
		h.cfg.Events.Emit(event.ReceiveTimedOut{Request: q.id, Peer: q.peer.Engine, After: h.cfg.RegistrationTimeout})
		if q.state == staged {
			q.err = err
			h.withdraw(q, err.Reason)
			out = append(out, h.end(q))
			continue
		}
		h.cancel(q, err)
	}
}

// forget takes a request out of the ledger without an outcome.
func (h *Half) forget(q *request) {
	h.watchdogs.Remove(&q.watchdog)
	h.heartbeats.remove(q)
	if h.requests[q.id] == q {
		delete(h.requests, q.id)
	}
	q.state = gone
}

// end gives a receive or a hold its one outcome. What was held or aborted leaves the ledger.
func (h *Half) end(q *request) connector.Outcome {
	o := connector.Outcome{ID: q.id, Err: q.err}
	switch {
	case q.state == held || q.aborted:
		o.Kind = connector.Released
		h.stats.Released++
		h.forget(q)
	case q.err != nil:
		o.Kind = connector.ReceiveFailed
		h.stats.Failed++
		h.goesOn(q)
	default:
		o.Kind = connector.Received
		o.Transfer = q.facts
		h.stats.Received++
		h.goesOn(q)
	}
	return o
}

// fail makes the error of a request that will not be handed over.
func (q *request) fail(phase connector.Phase, reason string) *connector.Error {
	return &connector.Error{Request: q.id, Peer: q.peer.Engine, Phase: phase, Reason: reason}
}
