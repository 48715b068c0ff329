package tcp

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// scene is a poster and an owner of memory, 1,024 blocks of 64 KiB each, in one process over
// loopback, and a random permutation of the blocks.
type scene struct {
	p, d     *Agent
	pm, dm   agent.Memory
	transfer agent.Transfer
	perm     []int
}

const (
	benchBlocks = 1024
	benchBlock  = 64 << 10
)

func newScene(b *testing.B, streams int) *scene {
	s := &scene{perm: rand.Perm(benchBlocks)}
	must := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	var err error
	s.p, err = New(Config{Streams: streams})
	must(err)
	s.d, err = New(Config{})
	must(err)
	b.Cleanup(func() { s.p.Close(); s.d.Close() })
	s.pm, err = s.p.Alloc(benchBlocks * benchBlock)
	must(err)
	s.dm, err = s.d.Alloc(benchBlocks * benchBlock)
	must(err)
	peer, err := s.p.AddPeer(b.Context(), agent.PeerInfo{Offers: s.d.Offers()})
	must(err)
	descs := func(m agent.Memory) []kv.Descriptor {
		out := make([]kv.Descriptor, benchBlocks)
		for i := range out {
			out[i] = kv.Descriptor{Addr: m.Addr() + uint64(i*benchBlock), Length: benchBlock}
		}
		return out
	}
	s.transfer = agent.Transfer{Silence: time.Minute}
	s.transfer.Local, err = s.p.Prepare(agent.Local, descs(s.pm))
	must(err)
	s.transfer.Remote, err = s.p.Prepare(peer.ID, descs(s.dm))
	must(err)
	for i, k := range s.perm {
		s.transfer.LocalIdx = append(s.transfer.LocalIdx, uint32(i))
		s.transfer.RemoteIdx = append(s.transfer.RemoteIdx, uint32(k))
	}
	s.transfer.Grant, err = s.d.Grant(agent.GrantSpec{Peer: s.p.Name(), Ranges: descs(s.dm)})
	must(err)
	b.SetBytes(benchBlocks * benchBlock)
	return s
}

func benchmarkOp(b *testing.B, op agent.Op, streams int) {
	s := newScene(b, streams)
	s.transfer.Op = op
	if op == agent.Read {
		g, err := s.d.Grant(agent.GrantSpec{Peer: s.p.Name(), Access: agent.AccessRead, Ranges: []kv.Descriptor{
			{Addr: s.dm.Addr(), Length: benchBlocks * benchBlock},
		}})
		if err != nil {
			b.Fatal(err)
		}
		s.transfer.Grant = g
	}
	for b.Loop() {
		if _, err := s.p.Post(s.transfer); err != nil {
			b.Fatal(err)
		}
		if r := (<-s.p.Events()).(agent.Result); r.Outcome != agent.OutcomeDone {
			b.Fatal(r.Err)
		}
		<-s.p.Events()
	}
}

func BenchmarkWrite1Stream(b *testing.B)  { benchmarkOp(b, agent.Write, 1) }
func BenchmarkWrite2Streams(b *testing.B) { benchmarkOp(b, agent.Write, 2) }
func BenchmarkWrite4Streams(b *testing.B) { benchmarkOp(b, agent.Write, 4) }
func BenchmarkRead2Streams(b *testing.B)  { benchmarkOp(b, agent.Read, 2) }

// BenchmarkMemcpy copies the same permutation: what the others are measured against.
func BenchmarkMemcpy(b *testing.B) {
	s := newScene(b, 1)
	from, to := s.pm.Bytes(), s.dm.Bytes()
	for b.Loop() {
		for i, k := range s.perm {
			copy(to[k*benchBlock:(k+1)*benchBlock], from[i*benchBlock:(i+1)*benchBlock])
		}
	}
}

// BenchmarkSmallWrite is one block with a notification: the time of one way and back.
func BenchmarkSmallWrite(b *testing.B) {
	s := newScene(b, 2)
	b.SetBytes(benchBlock)
	s.transfer.LocalIdx, s.transfer.RemoteIdx = s.transfer.LocalIdx[:1], s.transfer.RemoteIdx[:1]
	s.transfer.Notif = []byte("done")
	go func() {
		for range s.d.Events() {
		}
	}()
	for b.Loop() {
		if _, err := s.p.Post(s.transfer); err != nil {
			b.Fatal(err)
		}
		if r := (<-s.p.Events()).(agent.Result); r.Outcome != agent.OutcomeDone {
			b.Fatal(r.Err)
		}
		<-s.p.Events()
	}
}
