package p2p

import (
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
)

// BenchmarkPull is lookup to last block of 1,000 blocks of 4 KiB, on a warm session, from a source
// whose cores are idle or all busy and whose book another goroutine hammers.
//
// A process whose goroutines compute on every P answers the network only every ten milliseconds, when
// Go's monitor thread polls it. Two things together make the busy source as fast as the idle one:
// more Ps than cores (run with -cpu), so that a woken goroutine finds one, and computing threads of a
// lower priority than the rest ("nice").
func BenchmarkPull(b *testing.B) {
	for _, source := range []string{"idle", "busy", "nice"} {
		b.Run("source="+source, func(b *testing.B) {
			src, dst := benchNode(b), benchNode(b)
			all := keys(0, 1000)
			src.benchHave(b, all)
			if source != "idle" {
				defer src.hammer(all, source == "nice")()
			}
			b.ResetTimer()
			for i := range b.N {
				id := kv.RequestID(fmt.Sprint("r", i))
				if err := dst.m.Begin(tier.Request{ID: id, Source: src.from(string(id))}); err != nil {
					b.Fatal(err)
				}
				for {
					got := dst.m.Lookup(id, all)
					pending := false
					for _, v := range got {
						if v == core.Miss {
							b.Fatalf("a miss: %+v", dst.m.Stats())
						}
						pending = pending || v == core.Pending
					}
					if !pending {
						break
					}
					<-dst.changed
				}
				dst.m.Finish(id)
				dst.m.Reset()
			}
		})
	}
}

type bench struct {
	m       *tier.Manager
	agent   agent.Agent
	addr    *net.TCPAddr
	changed chan struct{}
}

const benchSlots = 4096

var benchNames atomic.Uint64

var benchFabric = local.New(local.Config{})

func benchNode(b *testing.B) *bench {
	b.Helper()
	n := newBenchNode(b)
	b.Cleanup(n.close)
	return n
}

func (n *bench) close() {
	_ = n.m.Close()
	_ = n.agent.Close()
}

func newBenchNode(b *testing.B) *bench {
	b.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	ag, err := benchFabric.Agent(agent.Name(fmt.Sprint("bench", benchNames.Add(1))))
	if err != nil {
		b.Fatal(err)
	}
	mem, err := ag.Alloc(benchSlots * testBlockLen)
	if err != nil {
		b.Fatal(err)
	}
	for b := mem.Bytes(); len(b) > 0; b = b[min(len(b), 4096):] {
		b[0] = 0 // the pages are there before anything is measured
	}
	t, err := New(Config{Listener: ln, Name: ln.Addr().String(), Agent: ag, Base: mem.Addr(), Blocks: benchSlots, BlockLen: testBlockLen,
		HashSeed: StockHashSeed, Instance: ln.Addr().String()})
	if err != nil {
		b.Fatal(err)
	}
	n := &bench{agent: ag, addr: ln.Addr().(*net.TCPAddr), changed: make(chan struct{}, 1)}
	n.m, err = tier.New(tier.Config{Memory: mem.Bytes(), BlockLen: testBlockLen, Secondaries: []tier.Secondary{t}, OnChange: func() { notify(n.changed) }})
	if err != nil {
		b.Fatal(err)
	}
	return n
}

func (n *bench) from(id string) *tier.Source {
	return &tier.Source{Host: n.addr.IP.String(), Port: n.addr.Port, KVRequestID: id}
}

func (n *bench) benchHave(b *testing.B, ks []core.Key) {
	b.Helper()
	if err := n.m.Begin(tier.Request{ID: "have"}); err != nil {
		b.Fatal(err)
	}
	res, ok := n.m.Reserve("have", ks)
	if !ok {
		b.Fatal("no room")
	}
	n.m.Commit(res.ID, true)
}

// hammer computes on every core, and uses the book as an engine's steps do: a goroutine takes and gives back
// blocks, and lets others be evicted. The result ends it.
func (n *bench) hammer(ks []core.Key, nice bool) (stop func()) {
	var end atomic.Bool
	var running sync.WaitGroup
	for range runtime.NumCPU() {
		running.Go(func() {
			if nice {
				runtime.LockOSThread() // which ends with the goroutine
				_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 15)
			}
			x := 1.0
			for !end.Load() {
				for range 1 << 14 { // stands for a forward pass
					x = x*1.0000001 + 1
				}
			}
			if x == 0 {
				panic("it does not compute")
			}
		})
	}
	running.Go(func() {
		_ = n.m.Begin(tier.Request{ID: "step"})
		for step := 0; !end.Load(); step++ {
			if id, _, ok := n.m.Use(ks); ok {
				n.m.EndUse(id)
			}
			if res, ok := n.m.Reserve("step", keys(1<<20+step, 1<<20+step+8)); ok {
				n.m.Commit(res.ID, true)
			}
			time.Sleep(500 * time.Microsecond)
		}
		n.m.Finish("step")
	})
	return func() {
		end.Store(true)
		running.Wait()
	}
}
