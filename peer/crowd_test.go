package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// A hundred peers of which thirty are dead or mute, the bad ones first in the queue. Every healthy one
// connects before the first dead one times out, all waiters end, and nothing is left behind: with
// slots for nearly all, and with so few that the dead ones fill them.
func TestCrowd(t *testing.T) {
	for _, slots := range []int{0, 4} {
		t.Run(fmt.Sprint("slots ", slots), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { crowd(t, slots) })
		})
	}
}

func crowd(t *testing.T, slots int) {
	b := newBed(t, func(c *Config, a *fakeAgent) {
		c.MaxParallel = slots
		a.onAdd = func(context.Context, agent.Name, agent.PeerID) error { time.Sleep(time.Millisecond); return nil }
	})
	defer b.table.Close()
	end := make(chan struct{})
	defer close(end)
	start := time.Now()
	var dead, healthy []<-chan result
	for i := range 100 {
		engine := kv.EngineID(fmt.Sprint("E", i))
		addr := fmt.Sprintf("e%d:5600", i)
		switch {
		case i < 10:
			b.set(addr, mute(end))
		case i < 20:
			b.set(addr, blackHole)
		case i < 25: // nobody there
			b.set(addr, func(context.Context) (net.Conn, error) {
				time.Sleep(time.Millisecond)
				return nil, errors.New("connection refused")
			})
		case i < 30: // answers ZMTP, but knows no rank that it is asked for
			defer b.serve(t, addr, engine, "i", 0).Close()
			b.distant(addr)
		default:
			defer b.serve(t, addr, engine, "i", 2).Close()
		}
		for range 3 {
			ch := b.ask(target(engine, addr, 0, 1))
			if i < 30 {
				dead = append(dead, ch)
			} else {
				healthy = append(healthy, ch)
			}
		}
	}
	for _, ch := range healthy {
		if r := <-ch; r.err != nil {
			t.Fatal(r.err)
		}
	}
	if took := time.Since(start); took >= DefaultQueryTimeout {
		t.Errorf("healthy peers waited %v: for dead ones", took)
	}
	for _, ch := range dead {
		r := <-ch
		var e *HandshakeError
		if !errors.As(r.err, &e) || e.Waiters != 3 {
			t.Errorf("got %v, %v", r.c, r.err)
		}
	}
	if took := time.Since(start); took > DefaultHandshakeTimeout {
		t.Errorf("the last ended after %v", took)
	}
	synctest.Wait()
	b.wantSizes(t, 70, 140)
	for i := range 100 {
		if c := b.table.Lookup(kv.EngineID(fmt.Sprint("E", i))); c != nil {
			b.table.Lost(c.Ranks[1].Agent.ID, errors.New("gone"))
		}
	}
	b.wantSizes(t, 0, 0)
}

// Peers come and go for long; nothing grows.
func TestNothingGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		for i := range 500 {
			engine := kv.EngineID(fmt.Sprint("E", i))
			l := b.serve(t, addrP, engine, "i", 1)
			b.connect(t, target(engine, addrP))
			l.Close()
			time.Sleep(DefaultTTL / 4)
			<-b.ask(target(engine+"x", "nowhere:5600"))
		}
		if n := len(b.agent.names()); n > 5 {
			t.Errorf("%d peers are kept", n)
		}
	})
}

// What is beyond the bound of handshakes in flight fails at once and disturbs nobody.
func TestTooManyHandshakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		defer b.serve(t, addrP, "P", "i1", 1).Close()
		c := b.connect(t, target("P", addrP))
		var all []<-chan result
		for i := range maxFlights {
			addr := fmt.Sprintf("e%d:5600", i)
			b.set(addr, blackHole)
			all = append(all, b.ask(target(kv.EngineID(fmt.Sprint("E", i)), addr)))
		}
		b.refused(t, target("beyond", "beyond:5600"), PhaseTarget)
		if b.table.Ensure(target("P", addrP), nil) != c {
			t.Error("a connected peer is not found")
		}
		for _, ch := range all {
			if r := <-ch; r.err == nil {
				t.Error("connected")
			}
		}
		b.wantSizes(t, 1, 1)
	})
}
