package p2p

import (
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// check ends a load whose blocks have all arrived, on a goroutine of its own: reading them takes as long as a
// copy, and the loop waits for nobody. Nothing can write them any more. A block that is not what its
// source has is not whole: it becomes a miss.
func (t *Tier) check(a session.LoadEnded) {
	t.running.Go(func() {
		t.checking <- struct{}{}
		defer func() { <-t.checking }()
		good, sums := make([]bool, len(a.Slots)), make([]core.Sum, len(a.Slots))
		damaged := 0
		for i, s := range a.Slots {
			sums[i] = core.SumOf(t.host.Block(s))
			good[i] = a.Sums == nil || sums[i].CRC == a.Sums[i]
			if !good[i] {
				damaged++
			}
		}
		if damaged > 0 {
			t.post(session.Damaged{Peer: a.Peer, Job: a.Job, Blocks: damaged})
		}
		t.host.LoadSummed(a.Job, good, sums, a.Stopped)
	})
}
