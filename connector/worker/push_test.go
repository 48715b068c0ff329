package worker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

var (
	legP = leg{id: "cmpl-r1-0-aaaaaaaa", transfer: "xfer-1", tokens: 10, digest: connector.Digest{1}, blocks: []kv.BlockID{5, 2, 9}}
	legD = leg{id: "cmpl-r1-0-dddddddd", transfer: "xfer-1", tokens: 10, digest: connector.Digest{1}, blocks: []kv.BlockID{3, 7, 1}}
)

const (
	kvOfP  = 0x11111111
	canary = 0xcccccccc
)

// A pair in which D registers first, P finishes first, or both at once; with and without prefix hit.
func TestPushBeforeAndAfterFinish(t *testing.T) {
	for _, c := range []struct {
		name     string
		first    string
		computed int
		tp       int
	}{
		{"D first", "D", 0, 1},
		{"P first", "P", 0, 1},
		{"D first, prefix hit", "D", 4, 1},
		{"P first, prefix hit", "P", 8, 1},
		{"D first, TP 2", "D", 0, 2},
		{"P first, TP 2", "P", 4, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cl := newCluster(t, local.Config{Latency: time.Millisecond})
				defer cl.close()
				p := cl.engine("P", options{tp: c.tp, role: connector.Producer})
				d := cl.engine("D", options{tp: c.tp, role: connector.Consumer})
				p.fill(legP.blocks, 0, kvOfP)
				d.fill([]kv.BlockID{0, 2, 4, 5, 6, 8, 9}, 0, canary)
				hit := c.computed / testBlockSize
				d.fill(legD.blocks[:hit], 0, kvOfP)
				if c.first == "D" {
					d.decodeLeg(p, legD, c.computed)
					time.Sleep(time.Second)
					p.prefillLeg(legP, connector.FinishLength)
				} else {
					p.prefillLeg(legP, connector.FinishLength)
					time.Sleep(time.Second)
					d.decodeLeg(p, legD, c.computed)
				}
				o := d.outcome(legD.id, time.Minute)
				if o.Kind != connector.Received {
					t.Fatalf("D: %+v %v", o, o.Err)
				}
				if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
					t.Error(err)
				}
				if err := d.holds([]kv.BlockID{0, 2, 4, 5, 6, 8, 9}, 0, canary); err != nil {
					t.Error(err)
				}
				want := int64((3 - hit) * testLayers * testBlockLen * c.tp)
				if o.Transfer.Bytes != want || o.Transfer.Blocks != 3-hit || o.Transfer.Transport != local.Transport {
					t.Errorf("facts %+v, want %d bytes", o.Transfer, want)
				}
				if o := p.outcome(legP.id, time.Minute); o.Kind != connector.Released || o.Err != nil {
					t.Errorf("P: %+v", o)
				}
				p.idle()
				d.idle()
			})
		})
	}
}
