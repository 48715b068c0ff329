package zmtp

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// within bounds a test's wait for something that must come; its length decides nothing but how a hang looks.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// echo answers each message with itself until the router is closed.
func echo(r *Router) error {
	for {
		m, err := r.Recv(context.Background())
		if err != nil {
			return err
		}
		_ = r.Send(m.Peer, m.Frames...) // a peer that is gone needs no echo
	}
}
