package session

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry/wire"
)

// What a process says of itself is one word to each peer, whichever of its ranks says it, and no peer hears what
// another does: nobody can pass for a rank of the same process.
func TestInstanceIsTold(t *testing.T) {
	told := func(rank, peer string) string {
		local := testConnect(rank)
		local.Extension.Instance = "secret"
		h, err := New(Config{Local: local, Revocable: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range h.Step(time.Unix(1000, 0), Begin{Req: "r", Source: PeerID(peer), SourceID: "q"}) {
			if s, ok := a.(Send); ok {
				return s.Msg.(*wire.P2PConnect).Extension.Instance
			}
		}
		t.Fatal("no connect")
		return ""
	}
	a := told("x:1", "a:1")
	if b := told("x:2", "a:1"); a != b {
		t.Errorf("two ranks tell one peer %s and %s", a, b)
	}
	if b := told("x:1", "b:1"); a == b || a == "secret" {
		t.Errorf("two peers are told %s", a)
	}
}
