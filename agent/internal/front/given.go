package front

import (
	"fmt"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/grants"
)

// GrantAs is Grant under an id that the caller chose, so that one permission can be given through
// several backends. The id must be unguessable.
func (f *Front) GrantAs(id agent.GrantID, spec agent.GrantSpec) error {
	if f.Closed() {
		return agent.ErrClosed
	}
	g, err := grants.New(spec, f.Limits.GrantRanges)
	if err != nil {
		return err
	}
	if err := f.Grants.AddAs(id, g); err != nil {
		return err
	}
	// As in Grant: the memory is checked after the grant is in the table.
	for i, d := range spec.Ranges {
		if f.Memory.Find(d.Addr, d.Length) == nil {
			f.Grants.Revoke(id)
			return fmt.Errorf("grant for %s: range %d (%d bytes at %#x) does not lie in registered memory",
				spec.Peer, i, d.Length, d.Addr)
		}
	}
	if f.Closed() {
		f.Grants.Revoke(id)
		return agent.ErrClosed
	}
	return nil
}
