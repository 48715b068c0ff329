package intake

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/tier/core"
)

// model is the intake as one list of offers in the order of their arrival, searched from the start.
type model struct {
	cfg      Config
	offers   []offer
	underWay map[uint64]string
	turn     []string // peers as they were last served, or first offered
	last     uint64
	stopped  bool
	stats    Stats
}

type offer struct {
	peer string
	key  core.Key
}

func (m *model) count(peer string) int {
	n := 0
	for _, o := range m.offers {
		if o.peer == peer {
			n++
		}
	}
	return n
}

func (m *model) busy(peer string) bool {
	for _, p := range m.underWay {
		if p == peer {
			return true
		}
	}
	return false
}

// join puts a peer at the end of the row, if it has something waiting and is neither busy nor in it.
func (m *model) join(peer string) {
	if m.count(peer) > 0 && !m.busy(peer) && !slices.Contains(m.turn, peer) {
		m.turn = append(m.turn, peer)
	}
}

func (m *model) offer(peer string, keys []core.Key) {
	m.stats.Offered += uint64(len(keys))
	for _, k := range keys {
		switch {
		case m.stopped:
			m.stats.Dropped++
		case slices.Contains(m.offers, offer{peer, k}):
		case m.count(peer) == m.cfg.PeerKeys:
			m.stats.Dropped++
		default:
			m.offers = append(m.offers, offer{peer, k})
		}
	}
	m.join(peer)
}

func (m *model) next(have map[core.Key]bool) (Batch[string], bool) {
	for len(m.turn) > 0 && len(m.underWay) < m.cfg.Batches {
		b := Batch[string]{Peer: m.turn[0]}
		m.turn = m.turn[1:]
		var rest []offer
		for _, o := range m.offers {
			switch {
			case o.peer != b.Peer || len(b.Keys) == m.cfg.BatchKeys:
				rest = append(rest, o)
			case have[o.key]:
				m.stats.Known++
			default:
				b.Keys = append(b.Keys, o.key)
			}
		}
		m.offers = rest
		if len(b.Keys) > 0 {
			m.last++
			b.ID = m.last
			m.underWay[b.ID] = b.Peer
			return b, true
		}
	}
	return Batch[string]{}, false
}

func (m *model) drop(which func(offer) bool) {
	before := len(m.offers)
	m.offers = slices.DeleteFunc(m.offers, which)
	m.stats.Dropped += uint64(before - len(m.offers))
	m.turn = slices.DeleteFunc(m.turn, func(p string) bool { return m.count(p) == 0 })
}

// Whatever is offered, the intake gives out the batches that the model does.
func TestIntakeMatchesModel(t *testing.T) {
	peers := []string{"a", "b", "c", "d"}
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Batches: rapid.IntRange(1, 3).Draw(t, "batches"), BatchKeys: rapid.IntRange(1, 3).Draw(t, "batch keys"),
			PeerKeys: rapid.IntRange(1, 6).Draw(t, "peer keys")}
		q := New[string](cfg)
		m := &model{cfg: cfg, underWay: map[uint64]string{}}
		key := rapid.Map(rapid.IntRange(0, 9), func(n int) core.Key { return core.Key(fmt.Sprint(n)) })
		peer := rapid.SampledFrom(peers)
		t.Repeat(map[string]func(*rapid.T){
			"offer": func(t *rapid.T) {
				p, keys := peer.Draw(t, "peer"), rapid.SliceOfN(key, 0, 5).Draw(t, "keys")
				q.Offer(p, keys)
				m.offer(p, keys)
			},
			"next": func(t *rapid.T) {
				have := map[core.Key]bool{}
				for _, k := range rapid.SliceOfN(key, 0, 4).Draw(t, "have") {
					have[k] = true
				}
				want, wantOK := m.next(have)
				got, ok := q.Next(func(k core.Key) bool { return have[k] })
				if d := cmp.Diff(want, got); d != "" || ok != wantOK {
					t.Fatal(ok, wantOK, d)
				}
			},
			"ended": func(t *rapid.T) {
				id := rapid.Uint64Range(0, m.last+1).Draw(t, "id")
				q.Ended(id)
				if p, ok := m.underWay[id]; ok {
					delete(m.underWay, id)
					m.join(p)
				}
			},
			"gone": func(t *rapid.T) {
				p := peer.Draw(t, "peer")
				q.Gone(p)
				m.drop(func(o offer) bool { return o.peer == p })
			},
			"stop": func(t *rapid.T) {
				if rapid.IntRange(0, 19).Draw(t, "rarely") == 0 {
					q.Stop()
					m.stopped = true
					m.drop(func(offer) bool { return true })
				}
			},
			"": func(t *rapid.T) {
				want := m.stats
				want.Waiting, want.Batches = len(m.offers), len(m.underWay)
				if d := cmp.Diff(want, q.Stats()); d != "" {
					t.Fatal(d)
				}
				if n := len(q.peers); n > len(peers) || n > want.Waiting+want.Batches {
					t.Fatalf("%d peers are remembered", n)
				}
			},
		})
	})
}

// One that offers much does not keep another waiting.
func TestIntakeTakesTurns(t *testing.T) {
	q := New[string](Config{Batches: 1, BatchKeys: 2})
	var many []core.Key
	for i := range 100 {
		many = append(many, core.Key(fmt.Sprint("m", i)))
	}
	q.Offer("greedy", many)
	q.Offer("modest", []core.Key{"x"})
	var order []string
	for range 3 {
		b, ok := q.Next(func(core.Key) bool { return false })
		if !ok {
			t.Fatal("nothing")
		}
		order = append(order, b.Peer)
		q.Ended(b.ID)
	}
	if d := cmp.Diff([]string{"greedy", "modest", "greedy"}, order); d != "" {
		t.Error(d)
	}
	if err := (Config{Batches: -1}).Validate(); err == nil {
		t.Error("a negative bound is taken")
	}
}
