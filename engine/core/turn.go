package core

import (
	"crypto/sha256"
	"slices"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// turnReserve: while fewer than one of so many blocks are free, the oldest turns are let go. What a prefix
// cache has in free blocks makes way at once; kept ones make way only when the workers say so.
const turnReserve = 8

// turnBook is the ended decode requests whose blocks are kept for the next turns of their conversations.
// Nobody waits for them: whoever needs the blocks has them.
type turnBook struct {
	kept []*request // the oldest first
	over bool       // there will be no next turns
}

func (b *turnBook) forget(r *request) {
	if r.turn != 0 {
		b.kept = slices.DeleteFunc(b.kept, func(x *request) bool { return x == r })
	}
}

// keep tells the connector what an ended decode request has for the next turn of its conversation.
func (m *Machine) keep(r *request, p *kv.TransferParams) {
	whole, prefixes := digests(r.tokens[:p.RemoteNumTokens], r.Keys, m.cfg.BlockSize)
	m.conn.Kept(r.ID, whole, prefixes)
	r.turn = p.Lease
	m.turns.kept = append(m.turns.kept, r)
	m.stats.TurnsKept++
}

// reclaim lets turns go, the oldest first, that stand in the way: of requests that starve or soon will, of a
// cache reset that waits, of the engine's end. The prefill engine of a turn that is let go computes.
func (m *Machine) reclaim() {
	need := m.cfg.NumBlocks/turnReserve - m.pool.Free()
	if m.starved {
		need = max(need, m.lacking())
	}
	for _, r := range m.turns.kept {
		if need <= 0 && len(m.resets) == 0 && !m.turns.over {
			return
		}
		if !r.letGo {
			r.letGo = true
			m.conn.Release(r.ID, r.turn)
			m.stats.TurnsReclaimed++
		}
		need -= len(r.blocks)
	}
}

// digests are the Digest of tokens and those of its first full block, its first two and so on.
func digests(tokens []kv.Token, k Keys, blockSize int) (whole connector.Digest, prefixes []connector.Digest) {
	h := sha256.New()
	h.Write(digestHead(k))
	for len(tokens) >= blockSize {
		h.Write(appendTokens(nil, tokens[:blockSize]))
		prefixes = append(prefixes, connector.Digest(h.Sum(nil)))
		tokens = tokens[blockSize:]
	}
	h.Write(appendTokens(nil, tokens))
	return connector.Digest(h.Sum(nil)), prefixes
}
