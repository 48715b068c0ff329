//go:build soak

package p2p

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/mux"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
)

// A source process that is stopped with a fetch under way is found by its missing sign of life, before the
// fetch's own deadline.
func TestStoppedSource(t *testing.T) {
	a := startChild(t, "-")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	name := agent.Name(ln.Addr().String())
	s, err := shm.New(shm.Config{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	c, err := tcp.New(tcp.Config{Name: name, Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	ag, err := mux.New(mux.Config{Backends: []mux.Backend{{Agent: s}, {Agent: c}}})
	if err != nil {
		t.Fatal(err)
	}
	b := nodeOn(t, ln, ag, func(c *Config) { c.Fingerprint = "" })
	b.begin(tier.Request{ID: "r", Source: (&node{name: a.name}).source("q")})
	b.m.Lookup("r", keys(0, 8))
	select {
	case <-b.changed: // answered; the next lookup fetches
	case <-time.After(patience):
		t.Fatal("no answer")
	}
	if err := a.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for _, v := range b.lookup("r", keys(0, 8)) {
		if v != core.Miss {
			t.Errorf("%v from a process that stands still", v)
		}
	}
	t.Logf("found after %v", time.Since(begin))
	b.noted("session_ended", "no sign of life")
	b.m.Finish("r")
	b.quiet()
}
