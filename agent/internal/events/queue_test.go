package events

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func limits(transfers, notifs int) agent.Limits {
	return agent.Limits{Transfers: transfers, PeerNotifications: notifs, PeerNotificationBytes: 100}.WithDefaults()
}

// The queue against a plain list: everything comes out once and in order, Reserve succeeds exactly
// while fewer than the limit of slots are unread or reserved, a share overflows exactly at its
// bound, and Close leaves all Results and Stoppeds to be read.
func TestQueueAgainstList(t *testing.T) {
	rapid.Check(t, queueAgainstList)
}

func queueAgainstList(t *rapid.T) {
	const transfers, share = 3, 4
	q := New(limits(transfers, share))
	q.patience = time.Microsecond // nobody reads while it closes
	peers := []*Peer{q.NewPeer(agent.PeerID{Name: "a", Gen: 1}, false), q.NewPeer(agent.PeerID{Name: "b", Gen: 2}, true)}
	var pending []agent.Event // unread, in order
	var reserved, started []agent.TransferID
	next := agent.TransferID(0)
	count := func(match func(agent.Event) bool) (n int) {
		for _, ev := range pending {
			if match(ev) {
				n++
			}
		}
		return n
	}
	isOwed := func(ev agent.Event) bool {
		switch ev.(type) {
		case agent.Result, agent.Stopped:
			return true
		}
		return false
	}
	lost := map[*Peer]bool{}
	read := func(t *rapid.T) {
		if len(pending) == 0 {
			t.Skip()
		}
		got := <-q.Events()
		if fmt.Sprint(got) != fmt.Sprint(pending[0]) {
			t.Fatalf("read %v, want %v", got, pending[0])
		}
		pending = pending[1:]
		for pumping := true; pumping; runtime.Gosched() { // until the pump has done what it can
			q.mu.Lock()
			pumping = q.mu.pump != nil && len(q.out) < cap(q.out)
			q.mu.Unlock()
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"reserve": func(t *rapid.T) {
			free := 2*transfers - (2*len(reserved) + len(started) + count(isOwed))
			// The pump holds one event that counts as read, for which the channel has room to spare.
			held := free == 1 && len(pending) > cap(q.out)
			if got := q.Reserve(); got != (free >= 2) && !(got && held) {
				t.Fatalf("reserve = %v with %d reserved, %d half, unread %v", got, len(reserved), len(started), pending)
			} else if got {
				next++
				reserved = append(reserved, next)
			}
		},
		"unreserve": func(t *rapid.T) {
			if len(reserved) == 0 {
				t.Skip()
			}
			q.Unreserve()
			reserved = reserved[1:]
		},
		"result": func(t *rapid.T) {
			if len(reserved) == 0 {
				t.Skip()
			}
			ev := agent.Result{Transfer: reserved[0]}
			q.Result(ev)
			pending, started, reserved = append(pending, ev), append(started, reserved[0]), reserved[1:]
		},
		"stopped": func(t *rapid.T) {
			if len(started) == 0 {
				t.Skip()
			}
			ev := agent.Stopped{Transfer: started[0]}
			q.Stopped(ev)
			pending, started = append(pending, ev), started[1:]
		},
		"notify": func(t *rapid.T) {
			p := rapid.SampledFrom(peers).Draw(t, "peer")
			msg := make([]byte, rapid.IntRange(1, 60).Draw(t, "size"))
			over := func(unread []agent.Event) bool {
				n, bytes := 0, 0
				for _, ev := range unread {
					if m, ok := ev.(agent.Notification); ok && m.From == p.id {
						n, bytes = n+1, bytes+len(m.Msg)
					}
				}
				return !lost[p] && (n >= share || bytes+len(msg) > 100)
			}
			err := p.Notify(msg, nil)
			held := len(pending) > cap(q.out) && !over(pending[1:]) // as above
			if over(pending) != errors.Is(err, ErrOverflow) && !(err == nil && held) {
				t.Fatalf("notify with unread %v: %v", pending, err)
			}
			if err == nil && !lost[p] {
				pending = append(pending, agent.Notification{From: p.id, Msg: msg})
			}
		},
		"lost": func(t *rapid.T) {
			p := rapid.SampledFrom(peers).Draw(t, "peer")
			p.Lost(nil)
			if !lost[p] {
				pending = append(pending, agent.PeerLost{Peer: p.id, Inbound: p.inbound})
			}
			lost[p] = true
		},
		"read": read,
	})
	for range reserved {
		q.Unreserve()
	}
	q.Close()
	if n := min(len(pending), cap(q.out)); slices.ContainsFunc(pending[n:], isOwed) {
		pending = slices.DeleteFunc(pending, func(ev agent.Event) bool { return !isOwed(ev) })
	} else {
		pending = pending[:n]
	}
	for len(pending) > 0 {
		read(t)
	}
	if ev, open := <-q.Events(); open {
		t.Fatalf("after the end: %v", ev)
	}
}

// Nobody reads: what is owed takes the place of notifications. All of these fit into the channel without it.
func TestCloseMakesRoomForWhatIsOwed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(limits(1, 8))
		p := q.NewPeer(agent.PeerID{Name: "p", Gen: 1}, false)
		q.Reserve()
		for range 8 {
			if err := p.Notify([]byte{1}, nil); err != nil {
				t.Fatal(err)
			}
		}
		q.Result(agent.Result{Transfer: 1})
		q.Stopped(agent.Stopped{Transfer: 1})
		q.Close()
		var got []agent.Event
		for ev := range q.Events() {
			got = append(got, ev)
		}
		if want := []agent.Event{agent.Result{Transfer: 1}, agent.Stopped{Transfer: 1}}; !reflect.DeepEqual(got, want) {
			t.Errorf("%v", got)
		}
	})
}

// A slow reader gets everything that is owed in order, and no notification behind one that is missing.
func TestCloseUnderASlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(limits(2, 8))
		p := q.NewPeer(agent.PeerID{Name: "p", Gen: 1}, false)
		for range 2 {
			q.Reserve()
		}
		for i := range 7 {
			if err := p.Notify([]byte{byte(i)}, nil); err != nil {
				t.Fatal(err)
			}
		}
		for id := range agent.TransferID(2) {
			q.Result(agent.Result{Transfer: id})
			q.Stopped(agent.Stopped{Transfer: id})
		}
		p.Lost(nil)
		var got []string
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ev := range q.Events() {
				time.Sleep(agent.FlushTimeout / 2)
				switch ev := ev.(type) {
				case agent.Notification:
					got = append(got, fmt.Sprint("n", ev.Msg[0]))
				case agent.Result:
					got = append(got, fmt.Sprint("r", ev.Transfer))
				case agent.Stopped:
					got = append(got, fmt.Sprint("s", ev.Transfer))
				}
			}
		}()
		q.Close()
		<-done
		all := []string{"n0", "n1", "n2", "n3", "n4", "n5", "n6", "r0", "s0", "r1", "s1"}
		n := slices.Index(got, "r0") // as many of the first as there was room for
		if n < 5 || !slices.Equal(got[:n], all[:n]) || !slices.Equal(got[n:], all[7:]) {
			t.Errorf("%v", got)
		}
	})
}

// Producers, a reader and Close at once: every transfer's events are read once and in order.
func TestConcurrentClose(t *testing.T) {
	for range 50 {
		q := New(limits(4, 8))
		var wg sync.WaitGroup
		var posted sync.Map
		for w := range 4 {
			p := q.NewPeer(agent.PeerID{Name: agent.Name(fmt.Sprint(w)), Gen: 1}, false)
			wg.Go(func() {
				for i := range 50 {
					_ = p.Notify([]byte{1}, nil)
					if !q.Reserve() {
						continue
					}
					id := agent.TransferID(w*1000 + i + 1)
					posted.Store(id, 0)
					q.Result(agent.Result{Transfer: id})
					q.Stopped(agent.Stopped{Transfer: id})
				}
				p.Lost(nil)
			})
		}
		read := make(chan error)
		go func() {
			seen := map[agent.TransferID]int{}
			for ev := range q.Events() {
				switch ev := ev.(type) {
				case agent.Result:
					if seen[ev.Transfer] != 0 {
						read <- fmt.Errorf("result of %d after %d events", ev.Transfer, seen[ev.Transfer])
						return
					}
					seen[ev.Transfer]++
				case agent.Stopped:
					if seen[ev.Transfer] != 1 {
						read <- fmt.Errorf("stopped of %d after %d events", ev.Transfer, seen[ev.Transfer])
						return
					}
					seen[ev.Transfer]++
				}
			}
			var err error
			posted.Range(func(id, _ any) bool {
				if seen[id.(agent.TransferID)] != 2 {
					err = fmt.Errorf("transfer %v had %d events", id, seen[id.(agent.TransferID)])
				}
				return err == nil
			})
			read <- err
		}()
		wg.Wait()
		q.Close()
		if err := <-read; err != nil {
			t.Fatal(err)
		}
	}
}

// Peers that come, fill their share and go again while nobody reads are noticed.
func TestCongestedByOrphans(t *testing.T) {
	q := New(limits(1, 4))
	defer q.Close()
	n := 0
	for !q.Congested() {
		n++
		if n > 1000 {
			t.Fatal("never congested")
		}
		p := q.NewPeer(agent.PeerID{Name: "x", Gen: 1}, true)
		for p.Notify([]byte{1}, nil) == nil {
		}
		p.Lost(nil)
	}
	for range n * 5 {
		<-q.Events()
	}
	if q.Congested() {
		t.Error("congested when all is read")
	}
}
