package engine

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// A hold that nobody will ask for goes back at once, in either mode; a guess, a second release, and a
// request that runs, change nothing. The next hand-off of the same prompt is whole.
func TestRelease(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			x := newPair(t, func(c *Config) { c.Mode, c.Lease = mode, time.Hour })
			p := prompt(100, 1)
			prefill, decode := pullLegs("r", p, 4)
			a := generate(t, x.p, prefill)
			hold := *a.Params
			if s := x.p.Stats(); s.Held != 1 || s.BlocksFree == s.BlocksTotal {
				t.Fatalf("nothing is held: %+v", s)
			}
			release := func(id kv.RequestID, lease kv.Generation, want bool) {
				t.Helper()
				if got, err := x.p.Release(id, lease); got != want || err != nil {
					t.Errorf("release of %s, lease %d: %v %v", id, lease, got, err)
				}
			}
			release(hold.RemoteRequestID, 0, false)
			release(hold.RemoteRequestID, hold.Lease+1, false)
			release("nobody", hold.Lease, false)
			if s := x.p.Stats(); s.Held != 1 {
				t.Fatalf("a guess let it go: %+v", s)
			}
			release(hold.RemoteRequestID, hold.Lease, true)
			settle(t, x.p)
			release(hold.RemoteRequestID, hold.Lease, false)

			late := generate(t, x.d, decode(a))
			var failed *connector.Error
			if !errors.As(late.Err, &failed) {
				t.Fatalf("KV that was let go: %+v", late.Output)
			}
			settle(t, x.d)
			checkAnswer(t, "again", map[kv.TransferMode]func() answer{
				kv.Push: func() answer { _, d := x.handOff(t, "again", p, 4); return d },
				kv.Pull: func() answer { return x.pull(t, "again", p, 4) },
			}[mode](), expect(t, p, 4, model.Sampling{}))
			settle(t, x.p)
			settle(t, x.d)
		})
	}
}

// A request whose client leaves holds nothing afterwards, at whatever moment it left: before it was
// submitted, while it ran, at its end, or with its answer unread. A lease is no part of it.
func TestLeaversHoldNothing(t *testing.T) {
	taken := make(chan struct{}, 1)
	e := newEngine(t, func(c *Config) {
		c.Role, c.Mode, c.Lease = connector.Producer, kv.Pull, time.Hour
		c.Events = event.SinkFunc(func(e event.Event) {
			if _, ok := e.(event.LeaseTaken); ok {
				select {
				case taken <- struct{}{}:
				default:
				}
			}
		})
	})
	leg := func(id kv.RequestID) Request {
		return Request{ID: id, Prompt: prompt(40, 3), MaxTokens: 1, Params: &kv.TransferParams{DoRemoteDecode: true}}
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	if s, err := e.Submit(gone, leg("before")); err == nil {
		read(t, s)
	}
	settle(t, e)

	for range 50 { // at the end, as near as may be
		ctx, leave := context.WithCancel(t.Context())
		s, err := e.Submit(ctx, leg("end"))
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-taken:
		case <-time.After(20 * time.Second):
			t.Fatal("no lease")
		}
		leave()
		s.Discard()
		read(t, s)
		settle(t, e)
	}

	s := submit1(t, e, leg("read"))
	a := read(t, s)
	s.Close()
	if st := e.Stats(); a.Params == nil || st.Held != 1 {
		t.Errorf("an answer that was read and closed is let go: %+v", st)
	}
	s.Discard()
	settle(t, e)
	s.Discard() // nothing is left to let go
}

func TestReleaseOfClosedEngine(t *testing.T) {
	e := newEngine(t, nil)
	closeNow(t, e)
	if ok, err := e.Release("r", 1); ok || !errors.Is(err, errClosing) {
		t.Error(ok, err)
	}
}
