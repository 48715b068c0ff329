package worker

import (
	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
)

// An agent that cannot revoke cannot keep a peer from writing. A receive that fails while P may have
// its registration is then kept in quarantine: the ledger, and so whoever would use the blocks next,
// hears of its end only when P cannot write any more. That is when
//
//   - P acknowledged the cancel, which it does after its transfer has stopped; or
//   - every completion came, so that nothing is left to write; or
//   - P could not post the WRITE (PUSH_FAIL of a peer without control messages); or
//   - the connection by which P writes is gone.

// quarantine keeps an ended receive. The one error is reported at its end.
func (m *machine) quarantine(r *receive, err *connector.Error) {
	r.quarantined = err
	blocks := r.reg.Blocks.Len()
	m.consumer.quarantined++
	m.consumer.quarantinedBlocks += blocks
	m.stats.Quarantines++
	m.emit(event.BlocksQuarantined{Request: r.reg.ID, Peer: r.reg.Peer.Engine, Blocks: blocks, Reason: err.Reason})
}

func (m *machine) endQuarantine(r *receive, why string) {
	err := r.quarantined
	blocks := r.reg.Blocks.Len()
	m.consumer.quarantined--
	m.consumer.quarantinedBlocks -= blocks
	m.emit(event.QuarantineEnded{Request: r.reg.ID, Peer: r.reg.Peer.Engine, Blocks: blocks, Reason: why})
	if x := m.letters.byName[r.remote.name()]; x != nil {
		for _, l := range x.lettersInOrder() {
			if l.receive == r.serial {
				m.dropLetter(l)
			}
		}
	}
	m.forgetReceive(r)
	m.reportFailed(r, err)
}

// quarantineFull tells whether so many blocks are in quarantine that no more are risked.
func (m *machine) quarantineFull() bool {
	return m.irrevocable && m.consumer.quarantinedBlocks >= m.cfg.QuarantineBlocks
}

// quarantinesLost ends the quarantines of an agent whose connection is gone: the last that is known to be
// its own; or ours to it, unless somebody has reached us under its name, by whose connection it may
// write.
func (m *machine) quarantinesLost(l agent.PeerLost) {
	p := m.consumer.pulses[l.Peer.Name]
	if p == nil {
		return
	}
	gone := false
	if l.Inbound {
		own, known := p.via[l.Peer]
		if !known {
			return
		}
		delete(p.via, l.Peer)
		gone = own && !p.writes() || p.outLost && len(p.via) == 0
	} else {
		p.outLost = true
		gone = len(p.via) == 0
	}
	if !gone {
		return
	}
	for _, r := range p.inOrder() {
		if r.quarantined != nil {
			m.endQuarantine(r, "the prefill engine's connection is gone")
		}
	}
}

// writes tells whether a connection is left that is known to be the agent's own.
func (p *pulse) writes() bool {
	for _, own := range p.via {
		if own {
			return true
		}
	}
	return false
}
