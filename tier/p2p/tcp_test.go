package p2p

import (
	"net"
	"testing"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/tier"
)

// The same over real connections for the bytes too.
func TestPullOverTCP(t *testing.T) {
	make := func(name string) *node {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ag, err := tcp.New(tcp.Config{Name: agent.Name(name), Listen: "127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		return nodeOn(t, ln, ag, nil)
	}
	a, b := make("a"), make("b")
	pull(a, b, "cold", 0)
	pull(a, b, "warm", 10)
	pull(b, a, "back", 20)
	src := a.source("pd")
	src.Everything = true
	b.begin(tier.Request{ID: "d", Source: src})
	b.m.Lookup("d", keys(30, 33))
	a.begin(tier.Request{ID: "p", Decoder: &tier.Decoder{KVRequestID: "pd"}})
	a.compute("p", keys(30, 33))
	a.m.Finish("p")
	b.expect("d", keys(30, 33), "+++")
	b.m.Finish("d")
	a.quiet()
	b.quiet()
}
