package worker

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
)

// A completion without a WRITE, over a real agent: D waits for P's own, and has its KV then.
func TestBareCompletionOverAnAgent(t *testing.T) {
	said := false
	x := &tamper{mangle: func(e agent.Event) []agent.Event {
		n, ok := e.(agent.Notification)
		if !ok || said {
			return []agent.Event{e}
		}
		said = true
		return []agent.Event{e, agent.Notification{From: n.From, Msg: fmt.Appendf(nil, "%s:1", legD.id)}}
	}}
	bubble(t, millisecond, options{}, options{wrap: wrapped(x)}, func(t *testing.T, p, d *engine) {
		p.arrive(legP, true)
		d.decodeLeg(p, legD, 0)
		time.Sleep(10 * time.Second)
		if o := d.outcomes(legD.id); len(o) != 0 || d.ranks[0].worker.Stats().Ignored != 1 {
			t.Fatalf("a completion of nothing: %+v, ignored %d", o, d.ranks[0].worker.Stats().Ignored)
		}
		p.finish(legP)
		if o := d.outcome(legD.id, time.Second); o.Kind != connector.Received {
			t.Errorf("D: %+v", o)
		}
		if err := d.holds(legD.blocks, 0, kvOfP); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
		p.idle()
		d.idle()
	})
}
