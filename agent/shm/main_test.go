package shm

import (
	"os"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/agenttest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("KVFERRY_SHM_CHILD"); role != "" {
		os.Exit(child(role))
	}
	goleak.VerifyTestMain(m)
}

// stall holds up one agent's sockets while it is on.
type stall struct {
	mu struct {
		sync.Mutex
		on chan struct{} // nil: off
	}
}

func (s *stall) hold(done <-chan struct{}) {
	for {
		s.mu.Lock()
		on := s.mu.on
		s.mu.Unlock()
		if on == nil {
			return
		}
		select {
		case <-on:
		case <-done:
			return
		}
	}
}

func (s *stall) begin() (resume func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	on := make(chan struct{})
	s.mu.on = on
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.on = nil
		close(on)
	})
}

// crash ends an agent's sockets as the death of its process would.
func (a *Agent) crash() {
	_ = a.listener.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.mu.peers {
		_ = c.sock.Close()
	}
	for _, c := range a.mu.inbound {
		_ = c.sock.Close()
	}
}

func newAgent(t testing.TB, cfg Config) *Agent {
	t.Helper()
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestConformance(t *testing.T) {
	agenttest.Run(t, func(testing.TB) agenttest.Net {
		stalls := map[agent.Name]*stall{}
		return agenttest.Net{
			New: func(t testing.TB, limits agent.Limits) agent.Agent {
				s := &stall{}
				a := newAgent(t, Config{Limits: limits, hold: s.hold})
				stalls[a.Name()] = s
				return a
			},
			Stall: func(_ testing.TB, a agent.Agent) func() { return stalls[a.Name()].begin() },
			Kill:  func(_ testing.TB, a agent.Agent) { a.(*Agent).crash() },
		}
	}, agenttest.Options{})
}
