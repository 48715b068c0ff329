package core

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/kv"
)

// first is a tier that has the first of the keys.
type first map[Key]struct{}

func (f first) Probe(_ int, _ kv.RequestID, k Key) Verdict {
	if _, ok := f[k]; ok {
		return Hit
	}
	return Miss
}

// BenchmarkServe tells how long the calls take, in which the owner's lock is held, of a lookup of 128 Ki keys,
// served at once and in portions: all are in memory; all come from another tier; memory is full of all but those
// that come first, which are in another tier.
func BenchmarkServe(b *testing.B) {
	const n, few = 128 << 10, 1024
	keys := make([]Key, n)
	for i := range keys {
		keys[i] = Key(fmt.Sprintf("%036d", i))
	}
	for name, behind := range map[string]int{"memory": 0, "tier": n, "full": few} {
		for _, portion := range []int{n, 1024} {
			b.Run(fmt.Sprintf("%s/portion=%d", name, portion), func(b *testing.B) {
				there := first{}
				for _, k := range keys[:behind] {
					there[k] = struct{}{}
				}
				var took []time.Duration
				for b.Loop() {
					b.StopTimer()
					m := filled(b, n, keys[behind:])
					b.StartTimer()
					for at := 0; at < n; at += portion {
						begin := time.Now()
						m.Serve(0, keys[at:at+portion], n, there)
						took = append(took, time.Since(begin))
						m.Actions()
					}
				}
				slices.Sort(took)
				ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
				b.ReportMetric(ms(took[len(took)/2]), "median-ms")
				b.ReportMetric(ms(took[len(took)-1]), "longest-ms")
			})
		}
	}
}

// filled makes a full tier: keys are used last, others before.
func filled(b *testing.B, slots int, keys []Key) *Machine {
	b.Helper()
	m, err := New(Config{Slots: slots, Tiers: 2, PeerPins: slots})
	if err != nil {
		b.Fatal(err)
	}
	m.Begin("r", RequestSpec{NoStore: []bool{true, true}})
	var others []Key
	for i := range slots - len(keys) {
		others = append(others, Key(fmt.Sprintf("other%031d", i)))
	}
	for _, ks := range [][]Key{others, keys} {
		res, ok := m.Reserve("r", ks)
		if !ok {
			b.Fatal("no room")
		}
		m.Commit(res.ID, true)
	}
	m.Touch(others) // what is kept is looked at first
	return m
}
