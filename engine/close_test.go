package engine

import (
	"context"
	"testing"
)

// closeNow ends an engine without waiting for its requests.
func closeNow(t testing.TB, e *Engine) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := e.Close(ctx); err != nil {
		t.Error(err)
	}
}
