package front

import (
	"crypto/rand"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// However a plan is cut, the pieces are the pairs' bytes in order, each once, within the bounds.
func TestCutAgainstPairs(t *testing.T) {
	f := New(agent.Limits{}, rand.Reader)
	defer f.FinishClose()
	m, err := f.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		const descs = 20
		local, remote := make([]kv.Descriptor, descs), make([]kv.Descriptor, descs)
		uniform := rapid.Bool().Draw(t, "uniform")
		at := uint64(0)
		for i := range local {
			n := uint64(7)
			if !uniform {
				n = rapid.Uint64Range(1, 50).Draw(t, "len")
			}
			gap := uint64(rapid.IntRange(0, 1).Draw(t, "gap"))
			local[i] = kv.Descriptor{Addr: m.Addr() + at, Length: n}
			remote[i] = kv.Descriptor{Addr: 1<<30 + at + gap, Length: n}
			at += n + gap
		}
		l, r := insert(t, f, agent.Local, local), insert(t, f, agent.PeerID{Name: "p", Gen: 1}, remote)
		idx := rapid.SliceOfN(rapid.Uint32Range(0, descs-1), 1, 30).Draw(t, "idx")
		p, err := f.Check(agent.Transfer{Local: l, Remote: r, LocalIdx: idx, RemoteIdx: idx, Silence: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Release()
		type pair struct{ l, r uint64 }
		var want, got []pair
		for _, i := range idx {
			for b := range local[i].Length {
				want = append(want, pair{local[i].Addr + b, remote[i].Addr + b})
			}
		}
		maxBytes, maxPieces := rapid.IntRange(1, 200).Draw(t, "bytes"), rapid.IntRange(1, 5).Draw(t, "pieces")
		c := p.Cut(maxBytes, maxPieces)
		chunks := 0
		for buf := c.Next(nil); len(buf) > 0; buf = c.Next(buf) {
			sum := 0
			for _, piece := range buf {
				sum += piece.N
				for b := range uint64(piece.N) {
					got = append(got, pair{piece.Local + b, piece.Remote + b})
				}
			}
			if sum > maxBytes || len(buf) > maxPieces {
				t.Fatalf("chunk of %d bytes in %d pieces", sum, len(buf))
			}
			chunks++
		}
		if len(got) != len(want) || p.Bytes != int64(len(want)) || p.Chunks(maxBytes, maxPieces) != chunks {
			t.Fatalf("%d bytes cut in %d chunks, %d wanted", len(got), chunks, len(want))
		}
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("byte %d goes %v, want %v", i, got[i], want[i])
			}
		}
	})
}

func insert(t *rapid.T, f *Front, owner agent.PeerID, descs []kv.Descriptor) agent.ListID {
	l, err := f.BuildList(owner, descs)
	if err != nil {
		t.Fatal(err)
	}
	id, err := f.Lists.Insert(l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Lists.Remove(id) })
	return id
}
