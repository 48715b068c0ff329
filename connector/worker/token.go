package worker

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// secret is what a machine makes its tokens from. The driver draws it once, at random; with an equal secret
// and equal inputs a machine does the same again.
type secret [32]byte

func drawSecret() (s secret) {
	rand.Read(s[:]) // never fails: the runtime ends the process if the system has no randomness
	return s
}

// tokens makes the tokens of registrations, claims and letters, each once. Who has seen some of them
// cannot tell another.
type tokens struct {
	secret secret
	made   uint64
}

func (t *tokens) next() (out wire.Token) {
	t.made++
	h := hmac.New(sha256.New, t.secret[:])
	h.Write(binary.BigEndian.AppendUint64(nil, t.made))
	copy(out[:], h.Sum(nil))
	return out
}

// same compares without telling by its time how much of a guess is right.
func same(a, b wire.Token) bool { return hmac.Equal(a[:], b[:]) }

// refOf names a registration or claim.
func refOf(id kv.RequestID, gen kv.Generation, token wire.Token) wire.RegistrationRef {
	return wire.RegistrationRef{ID: id, Generation: gen, Token: token}
}

// forged counts a message whose token is not the one that its subject was given with. Its sender says
// somebody else's name, and it has no other effect.
func (m *machine) forged(from agent.Name, what string, id kv.RequestID) {
	m.stats.Forged++
	m.ignore(from, what, fmt.Sprintf("its token is not that of request %s: somebody else says this agent's name", id))
}

// recent remembers the last values, as many as is said. The zero value is ready.
type recent[T comparable] struct {
	set  map[T]struct{}
	ring []T
	next int
}

// fresh reports whether v is not remembered, and remembers it.
func (r *recent[T]) fresh(v T, bound int) bool {
	if _, seen := r.set[v]; seen {
		return false
	}
	if r.set == nil {
		r.set = make(map[T]struct{})
	}
	r.set[v] = struct{}{}
	if len(r.ring) < bound {
		r.ring = append(r.ring, v)
		return true
	}
	delete(r.set, r.ring[r.next])
	r.ring[r.next] = v
	r.next = (r.next + 1) % bound
	return true
}

// has reports whether v is remembered.
func (r *recent[T]) has(v T) bool {
	_, seen := r.set[v]
	return seen
}
