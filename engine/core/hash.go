package core

import (
	"crypto/sha256"
	"encoding/binary"
	"math"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// Hash names the contents of one full block: its tokens and everything before them. Equal hashes
// mean equal KV, so it is a cryptographic one: whoever could find a collision could have another
// client's blocks answered as theirs.
type Hash [sha256.Size]byte

// Keys is what KV depends on besides tokens.
type Keys struct {
	Salt    string // separates clients that must not share blocks
	Adapter string // LoRA adapter or whatever else changes the weights
	// Extras are hashes of what else a prompt holds behind its tokens, images for example, in order.
	// They count from the first block on: a prompt shares nothing with one that has others.
	Extras []string
}

// root is the parent of a first block.
func (k Keys) root(seed string) Hash {
	b := []byte("kvferry prefix root\x00")
	b = binary.LittleEndian.AppendUint64(b, uint64(len(seed)))
	return sha256.Sum256(k.append(append(b, seed...)))
}

func (k Keys) append(b []byte) []byte {
	for _, s := range append([]string{k.Salt, k.Adapter}, k.Extras...) {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
		b = append(b, s...)
	}
	// A length that no text has: tokens may follow.
	return binary.LittleEndian.AppendUint64(b, math.MaxUint64)
}

// chain is the hash of a full block behind parent.
func chain(parent Hash, tokens []kv.Token) Hash {
	b := make([]byte, 0, len(parent)+4*len(tokens))
	b = append(b, parent[:]...)
	return sha256.Sum256(appendTokens(b, tokens))
}

func appendTokens(b []byte, tokens []kv.Token) []byte {
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return b
}

// Digest is the digest of a whole prompt for a hand-off. It does not depend on the block size, so
// that two engines agree on it.
func Digest(prompt []kv.Token, k Keys) connector.Digest {
	return sha256.Sum256(appendTokens(digestHead(k), prompt))
}

func digestHead(k Keys) []byte { return k.append([]byte("kvferry prompt digest\x00")) }
