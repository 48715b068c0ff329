package agenttest

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// pair is the usual scene: p posts, d grants; each has memory of blocks.
type pair struct {
	p, d           *node
	pm, dm         agent.Memory
	local, remote  agent.ListID
	block          int
	pBlocks, dDesc []kv.Descriptor
}

// pair makes p and d with n blocks of size bytes each, p's filled with a pattern.
func (s *suite) pair(n, size int) *pair {
	s.Helper()
	return s.pairOf(s.add(), s.add(), n, size)
}

func (s *suite) pairOf(p, d *node, n, size int) *pair {
	s.Helper()
	x := &pair{p: p, d: d, block: size}
	x.pm, x.dm = p.alloc(n*size), d.alloc(n*size)
	fill(x.pm.Bytes(), 1)
	x.pBlocks, x.dDesc = blocks(x.pm, size), blocks(x.dm, size)
	x.local = p.list(agent.Local, x.pBlocks...)
	x.admit()
	return x
}

// admit connects p to d and prepares d's list.
func (x *pair) admit() {
	x.p.s.Helper()
	peer := x.p.connect(x.d)
	x.remote = x.p.list(peer.ID, x.dDesc...)
}

// blocks cuts memory into equal descriptors.
func blocks(m agent.Memory, size int) []kv.Descriptor {
	out := make([]kv.Descriptor, len(m.Bytes())/size)
	for i := range out {
		out[i] = kv.Descriptor{Addr: m.Addr() + uint64(i*size), Length: uint64(size)}
	}
	return out
}

// all are the indices of n blocks.
func all(n int) []uint32 {
	idx := make([]uint32, n)
	for i := range idx {
		idx[i] = uint32(i)
	}
	return idx
}

// transfer is a transfer of all blocks under a grant.
func (x *pair) transfer(op agent.Op, g agent.GrantID) agent.Transfer {
	return agent.Transfer{
		Op: op, Local: x.local, LocalIdx: all(len(x.pBlocks)), Remote: x.remote, RemoteIdx: all(len(x.dDesc)),
		Grant: g, Silence: long,
	}
}

// fill writes a pattern that differs at every place and for every seed.
func fill(b []byte, seed uint64) {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b) // never fails
}
