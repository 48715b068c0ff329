package p2p

import (
	"net"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/tier"
)

// grantBook is an agent that keeps account of its grants.
type grantBook struct {
	agent.Agent
	mu struct {
		sync.Mutex
		live  map[agent.GrantID]bool
		given int
	}
}

func (g *grantBook) Grant(s agent.GrantSpec) (agent.GrantID, error) {
	id, err := g.Agent.Grant(s)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil {
		g.mu.live[id] = true
		g.mu.given++
	}
	return id, err
}

func (g *grantBook) Revoke(id agent.GrantID) {
	g.Agent.Revoke(id)
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.mu.live, id)
}

func (g *grantBook) count() (given, live int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.given, len(g.mu.live)
}

// Before blocks are the engine's to read, or their slots another's, nobody may write them any more: the grant of a
// fetch is revoked before its end is told, however it ends.
func TestGrantEndsBeforeTheLoad(t *testing.T) {
	fabric := local.New(local.Config{})
	a := newNode(t, fabric, nil)
	a.have(keys(0, 8))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	inner, err := fabric.Agent(agent.Name(ln.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	book := &grantBook{Agent: inner}
	book.mu.live = map[agent.GrantID]bool{}
	b := nodeOn(t, ln, book, nil)
	b.begin(tier.Request{ID: "whole", Source: a.source("q")})
	b.expect("whole", keys(0, 4), "++++")
	if given, live := book.count(); given != 1 || live != 0 {
		t.Errorf("the blocks have come: %d grants were given, %d live", given, live)
	}
	b.m.Finish("whole")
	b.begin(tier.Request{ID: "late", Source: &tier.Source{Host: a.source("").Host, Port: a.source("").Port, KVRequestID: "pd", Everything: true}})
	b.startLoad("late", keys(10, 12)) // the source computes them never
	b.m.Finish("late")
	b.quiet()
	if given, live := book.count(); given != 2 || live != 0 {
		t.Errorf("the fetch was given up: %d grants were given, %d live", given, live)
	}
}
