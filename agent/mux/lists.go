package mux

import (
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// localLists are the lists of own memory, each prepared in every backend.
type localLists struct {
	limit int
	mu    struct {
		sync.RWMutex
		last  uint64
		lists map[uint64][]agent.ListID // by backend
	}
}

func (l *localLists) init(limit int) {
	l.limit = limit
	l.mu.lists = map[uint64][]agent.ListID{}
}

// Prepare is Agent.Prepare.
func (m *Mux) Prepare(owner agent.PeerID, descs []kv.Descriptor) (agent.ListID, error) {
	if owner != agent.Local {
		i, id, ok := m.downPeer(owner)
		if !ok {
			i, id = 0, owner // which knows no such peer, and says so
		}
		list, err := m.backends[i].Prepare(id, descs)
		if err != nil {
			return 0, err
		}
		return agent.ListID(m.up(i, uint64(list))), nil
	}
	ids := make([]agent.ListID, len(m.backends))
	for i, b := range m.backends {
		var err error
		if ids[i], err = b.Prepare(agent.Local, descs); err != nil {
			m.release(ids[:i])
			return 0, err
		}
	}
	l := &m.lists
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.mu.lists); n >= l.limit {
		m.release(ids)
		return 0, &agent.LimitError{What: "prepared lists", Got: n + 1, Limit: l.limit}
	}
	l.mu.last++
	l.mu.lists[l.mu.last] = ids
	return agent.ListID(m.up(len(m.backends), l.mu.last)), nil
}

func (m *Mux) release(ids []agent.ListID) {
	for i, id := range ids {
		m.backends[i].Release(id)
	}
}

// local is what backend i calls a list of own memory.
func (m *Mux) local(id agent.ListID, i int) (agent.ListID, bool) {
	class, at := m.down(uint64(id))
	if class != len(m.backends) {
		return 0, false
	}
	m.lists.mu.RLock()
	defer m.lists.mu.RUnlock()
	ids, ok := m.lists.mu.lists[at]
	if !ok {
		return 0, false
	}
	return ids[i], true
}

// Release is Agent.Release.
func (m *Mux) Release(id agent.ListID) {
	i, at := m.down(uint64(id))
	if i < len(m.backends) {
		m.backends[i].Release(agent.ListID(at))
		return
	}
	m.lists.mu.Lock()
	ids := m.lists.mu.lists[at]
	delete(m.lists.mu.lists, at)
	m.lists.mu.Unlock()
	m.release(ids)
}
