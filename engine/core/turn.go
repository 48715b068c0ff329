package core

import (
	"crypto/sha256"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// keep tells the connector what an ended decode request has for the next turn of its conversation.
func (m *Machine) keep(r *request, p *kv.TransferParams) {
	whole, prefixes := digests(r.tokens[:p.RemoteNumTokens], r.Keys, m.cfg.BlockSize)
	m.conn.Kept(r.ID, whole, prefixes)
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
