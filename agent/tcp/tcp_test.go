package tcp

import (
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent/agenttest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
		return
	}
	goleak.VerifyTestMain(m)
}

func TestConformance(t *testing.T) {
	for name, cfg := range map[string]Config{
		"defaults":     {AbortTimeout: 300 * time.Millisecond},
		"small chunks": {AbortTimeout: 300 * time.Millisecond, ChunkBytes: 16 << 10, Streams: 4},
	} {
		t.Run(name, func(t *testing.T) {
			agenttest.Run(t, func(t testing.TB) agenttest.Net { return newRelays(t, cfg).net() }, agenttest.Options{})
		})
	}
}
