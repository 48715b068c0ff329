package grants

import (
	"crypto/rand"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// A grant under a given id is like any other, and an id names one grant at a time.
func TestGivenID(t *testing.T) {
	table := NewTable(2, rand.Reader)
	grant := func() *Grant {
		g, err := New(agent.GrantSpec{Peer: "p", Ranges: []kv.Descriptor{{Addr: 4096, Length: 10}}}, 1)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	if table.AddAs(agent.GrantID{}, grant()) == nil {
		t.Error("the zero id was accepted")
	}
	id := agent.GrantID{1}
	if err := table.AddAs(id, grant()); err != nil {
		t.Fatal(err)
	}
	if table.AddAs(id, grant()) == nil {
		t.Error("an id in use was accepted")
	}
	if g, err := table.Find(id, "p", agent.AccessWrite); err != nil || !g.Covers(4096, 10) {
		t.Errorf("found %v, %v", g, err)
	}
	if err := table.AddAs(agent.GrantID{2}, grant()); err != nil {
		t.Fatal(err)
	}
	var le *agent.LimitError
	if err := table.AddAs(agent.GrantID{3}, grant()); !errors.As(err, &le) {
		t.Errorf("a third grant of two: %v", err)
	}
	g, _ := table.Find(id, "p", agent.AccessWrite)
	table.Revoke(id)
	if g.Enter() {
		t.Error("a revoked grant can be entered")
	}
	if err := table.AddAs(id, grant()); err != nil {
		t.Errorf("an id that is free again: %v", err)
	}
}
