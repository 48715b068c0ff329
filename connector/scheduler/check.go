package scheduler

import (
	"fmt"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// check is what a request's parameters must satisfy before anything is kept for it. The parser of
// the JSON form refuses wrong types; this refuses what cannot work with this engine.
func (h *Half) check(r connector.Request) error {
	p := r.Params
	bad := func(format string, args ...any) error {
		return &connector.Error{
			Request: r.ID, Peer: p.RemoteEngineID, Phase: connector.PhaseParams,
			Reason: fmt.Sprintf(format, args...),
		}
	}
	switch {
	case r.ID == "":
		return bad("the request has no id")
	case r.PromptTokens < 1:
		return bad("the prompt has %d tokens", r.PromptTokens)
	case p.DoRemoteDecode && p.DoRemotePrefill:
		return bad("do_remote_decode and do_remote_prefill are both true; one leg is prefill or decode, not both")
	case p.DoRemoteDecode && h.cfg.Role == connector.Consumer:
		return bad("do_remote_decode is true, but engine %q only decodes; send the prefill leg to a prefill engine", h.cfg.Engine)
	case p.DoRemotePrefill && h.cfg.Role == connector.Producer:
		return bad("do_remote_prefill is true, but engine %q only prefills; send the decode leg to a decode engine", h.cfg.Engine)
	}
	if p.DoRemotePrefill || h.readsBack(&p) {
		leg := wire.DecodeLeg
		if p.DoRemoteDecode {
			leg = wire.PrefillLeg
		}
		if p.Mode != "" && p.Mode != h.cfg.Mode {
			return bad("transfer_mode is %q, the mode of engine %q, but engine %q has the mode %q; start both with the same --mode",
				p.Mode, p.RemoteEngineID, h.cfg.Engine, h.cfg.Mode)
		}
		if err := wire.CheckLeg(&p, h.cfg.Mode, leg); err != nil {
			return err
		}
		switch {
		case h.cfg.Mode == kv.Pull && len(p.RemoteBlockIDs) != 1:
			return bad("remote_block_ids has %d lists; one per KV-cache group is needed, and engine %q has one group", len(p.RemoteBlockIDs), h.cfg.Engine)
		case p.Readers < 0 || p.Readers > wire.MaxReaders:
			return bad("%d answers to one prompt are to have its KV; at most %d can", p.Readers, wire.MaxReaders)
		case p.RemoteEngineID == h.cfg.Engine:
			return bad("remote_engine_id is this engine's own id %q", h.cfg.Engine)
		case p.RemotePort < 1 || p.RemotePort > 65535:
			return bad("remote_port is %d, want 1 to 65535", p.RemotePort)
		case max(p.TPSize, 1) != h.cfg.TP:
			return bad("tp_size is %d and engine %q has %d; unequal tensor-parallel sizes are not supported", max(p.TPSize, 1), h.cfg.Engine, h.cfg.TP)
		case max(p.PPSize, 1) != h.cfg.PP:
			return bad("pp_size is %d and engine %q has %d; unequal pipeline sizes are not supported", p.PPSize, h.cfg.Engine, h.cfg.PP)
		}
	}
	if old := h.requests[r.ID]; old != nil {
		if old.state == finished || old.state == held || old.aborted {
			return bad("an earlier request of the same id still holds blocks for its transfer; use another id or try again later")
		}
		return bad("a request of the same id is running")
	}
	if len(h.requests) >= maxRequests {
		return &connector.Error{
			Request: r.ID, Peer: p.RemoteEngineID, Phase: connector.PhaseLimit,
			Reason: fmt.Sprintf("engine %q has %d hand-offs already; try again later", h.cfg.Engine, maxRequests),
		}
	}
	return nil
}
