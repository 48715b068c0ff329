package p2p

import (
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// The benchmarks of this file measure two things in turn in one run and report their ratio, which survives
// a machine that others use too.

// BenchmarkPullRatios is the time from the first lookup to the last of 1,000 blocks of 4 KiB, checked:
//
//   - cold_over_warm: the first pull of a node that the source does not know, over the next one;
//   - busy_over_idle: a source that computes on all cores and hammers its book, over the same at rest. Both
//     are warm. It computes as an engine of this project does: on locked threads of a lower priority, with
//     more Ps than cores;
//   - noise: one half of the pulls at rest over the other half.
func BenchmarkPullRatios(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2*runtime.NumCPU() + 2))
	src := benchNode(b)
	all := keys(0, 1000)
	src.benchHave(b, all)
	var cold, warm, idle, busy, halves []time.Duration
	ids := 0
	for b.Loop() {
		dst := newBenchNode(b)
		cold = append(cold, dst.pull(b, src, &ids, all))
		warm = append(warm, dst.pull(b, src, &ids, all))
		for range 5 {
			idle = append(idle, dst.pull(b, src, &ids, all))
		}
		stop := src.hammer(all, true)
		time.Sleep(5 * time.Millisecond) // the threads are up
		for range 5 {
			busy = append(busy, dst.pull(b, src, &ids, all))
		}
		stop()
		for range 5 {
			halves = append(halves, dst.pull(b, src, &ids, all))
		}
		dst.close()
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ratio(median(cold), median(warm)), "cold_over_warm")
	b.ReportMetric(ratio(median(busy), median(append(slices.Clone(idle), halves...))), "busy_over_idle")
	b.ReportMetric(ratio(median(halves), median(idle)), "noise")
	b.ReportMetric(median(idle).Seconds()*1e3, "idle_p50_ms")
}

// BenchmarkAdmission is the time from a dial to both sides' open session, connections included, with a peer of
// 19,599 blocks, and the ratio to one with 16: what admission costs for a block. It bounds
// each side's own work from above.
func BenchmarkAdmission(b *testing.B) {
	var large, small []time.Duration
	for b.Loop() {
		small = append(small, greet(b, 16))
		large = append(large, greet(b, 19599))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ratio(median(large), median(small)), "large_over_small")
	b.ReportMetric(median(large).Seconds()*1e6, "large_p50_µs")
	b.ReportMetric(slices.Min(large).Seconds()*1e6, "large_min_µs")
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// pull fetches all once, and forgets it.
func (n *bench) pull(b *testing.B, src *bench, ids *int, all []core.Key) time.Duration {
	*ids++
	id := kv.RequestID(fmt.Sprint("r", *ids))
	if err := n.m.Begin(tier.Request{ID: id, Source: src.from(string(id))}); err != nil {
		b.Fatal(err)
	}
	begun := time.Now()
	for {
		pending := false
		for _, v := range n.m.Lookup(id, all) {
			if v == core.Miss {
				b.Fatalf("a miss: %+v", n.m.Stats())
			}
			pending = pending || v == core.Pending
		}
		if !pending {
			break
		}
		<-n.changed
	}
	took := time.Since(begun)
	n.m.Finish(id)
	n.m.Reset()
	return took
}

// greet is one handshake between two new nodes.
func greet(b *testing.B, blocks int) time.Duration {
	var opened atomic.Int32
	both := make(chan struct{})
	node := func() (*Tier, *tier.Manager, agent.Agent) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		ag, err := benchFabric.Agent(agent.Name(fmt.Sprint("bench", benchNames.Add(1))))
		if err != nil {
			b.Fatal(err)
		}
		const length = 64 // a block's length costs nothing here
		mem, err := ag.Alloc(blocks * length)
		if err != nil {
			b.Fatal(err)
		}
		t, err := New(Config{Listener: ln, Name: ln.Addr().String(), Agent: ag, Base: mem.Addr(), Blocks: blocks, BlockLen: length,
			HashSeed: StockHashSeed, Instance: ln.Addr().String(), OnNote: func(n session.Note) {
				if n.What == "session_open" && opened.Add(1) == 2 {
					close(both)
				}
			}})
		if err != nil {
			b.Fatal(err)
		}
		m, err := tier.New(tier.Config{Memory: mem.Bytes(), BlockLen: length, Secondaries: []tier.Secondary{t}})
		if err != nil {
			b.Fatal(err)
		}
		return t, m, ag
	}
	src, srcM, srcAgent := node()
	_, dstM, dstAgent := node()
	runtime.GC() // of what start-up left, which is not admission
	begun := time.Now()
	host, port, _ := net.SplitHostPort(src.cfg.Name)
	p, _ := net.LookupPort("tcp", port)
	if err := dstM.Begin(tier.Request{ID: "r", Source: &tier.Source{Host: host, Port: p, KVRequestID: "q"}}); err != nil {
		b.Fatal(err)
	}
	<-both
	took := time.Since(begun)
	_, _ = srcM.Close(), dstM.Close()
	_, _ = srcAgent.Close(), dstAgent.Close()
	return took
}
