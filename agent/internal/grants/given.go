package grants

import (
	"fmt"

	"github.com/kvferry/kvferry/agent"
)

// AddAs names a grant by an id that the caller chose. It is refused if it is in use.
func (t *Table) AddAs(id agent.GrantID, g *Grant) error {
	if id == (agent.GrantID{}) {
		return fmt.Errorf("grant for %s: the zero id names no grant", g.peer)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.mu.grants); n >= t.limit {
		return &agent.LimitError{What: "live grants", Got: n + 1, Limit: t.limit}
	}
	if _, taken := t.mu.grants[id]; taken {
		return fmt.Errorf("grant for %s: its id is in use", g.peer)
	}
	t.mu.grants[id] = g
	return nil
}
