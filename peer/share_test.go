package peer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// A stranger makes up thousands of engines that never answer, all the time. An honest peer that wants an
// answer is connected as fast as without it, and so is what our own work needs; the stranger pays for its own.
func TestStrangersHandshakes(t *testing.T) {
	for name, by := range map[string]func(i int) (agent.Name, string){
		"one name, one host":    func(int) (agent.Name, string) { return "evil", "mute" },
		"one name, many hosts":  func(i int) (agent.Name, string) { return "evil", fmt.Sprint("mute", i) },
		"many names, one host":  func(i int) (agent.Name, string) { return agent.Name(fmt.Sprint("evil", i)), "mute" },
		"our clients, one host": func(int) (agent.Name, string) { return "", "mute" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, nil)
				defer b.table.Close()
				var bad []<-chan result
				flood := func(from, to int) {
					for i := from; i < to; i++ {
						who, host := by(i)
						addr := host + ":5600"
						b.set(addr, blackHole)
						x := target(kv.EngineID(fmt.Sprint("X", i)), addr)
						x.By = who
						bad = append(bad, b.ask(x))
					}
				}
				flood(0, 2000)
				time.Sleep(2 * slotPatience)
				for i := range 20 {
					flood(2000+100*i, 2000+100*(i+1))
					addr := fmt.Sprintf("good%d:5600", i)
					l := b.serve(t, addr, kv.EngineID(fmt.Sprint("E", i)), "i", 1)
					x := target(kv.EngineID(fmt.Sprint("E", i)), addr)
					if i%2 == 0 {
						x.By = agent.Name(fmt.Sprint("honest", i))
					}
					began := time.Now()
					if r := <-b.ask(x); r.err != nil {
						t.Fatalf("honest peer %d: %v", i, r.err)
					}
					// A stranger of many names has one connection for each, so that the names are honest peers' equals:
					// those ahead in the queue have their time, and no more.
					most := time.Duration(0)
					if name == "many names, one host" && x.By != "" {
						most = maxAsked / (DefaultMaxParallel / 2) * slotPatience
					}
					if took := time.Since(began); took > most {
						t.Errorf("honest peer %d waited %v", i, took)
					}
					l.Close()
					time.Sleep(slotPatience)
				}
				time.Sleep(DefaultHandshakeTimeout)
				evicted := 0
				for _, ch := range bad {
					r := <-ch
					var e *HandshakeError
					if !errors.As(r.err, &e) {
						t.Fatalf("%v, %v", r.c, r.err)
					}
					if errors.Is(r.err, errEvicted) {
						evicted++
					}
				}
				t.Logf("%d of %d made room", evicted, len(bad))
				b.wantSizes(t, 20, 20)
				b.wantNoShares(t)
			})
		})
	}
}

func (b *bed) wantNoShares(t *testing.T) {
	t.Helper()
	b.table.mu.Lock()
	defer b.table.mu.Unlock()
	s, l := &b.table.mu.shares, &b.table.mu.slots
	if len(s.flights)+len(s.of)+s.asked+len(b.table.mu.flights) != 0 || len(l.active)+l.total+l.asked+len(l.waiting) != 0 {
		t.Errorf("left: %d in flight, %v, %d asked; slots %v, %d, %d, %d wait", len(s.flights), s.of, s.asked, l.active, l.total, l.asked, len(l.waiting))
	}
}

// A handshake that a stranger began is accounted to our own work as soon as that needs it, and is not ended
// for others of the stranger's kind.
func TestOwnWorkJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.table.Close()
		x := target("P", addrP)
		x.By = "evil"
		b.set(addrP, blackHole)
		first, second := b.ask(x), b.ask(target("P", addrP))
		for i := range 3 * maxAsked {
			y := target(kv.EngineID(fmt.Sprint("X", i)), "mute:5600")
			y.By = "evil"
			b.set("mute:5600", blackHole)
			b.ask(y)
		}
		synctest.Wait()
		began := time.Now()
		for _, ch := range []<-chan result{first, second} {
			if r := <-ch; errors.Is(r.err, errEvicted) {
				t.Error("it made room for strangers")
			}
		}
		if took := time.Since(began); took != DefaultQueryTimeout {
			t.Errorf("ended after %v", took)
		}
	})
}

// Places and slots against plain counts: bounds hold, and nobody who may have a slot waits.
func TestShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := rapid.IntRange(1, 6).Draw(t, "slots")
		l, s := newSlots(all), newShares()
		var waits []*slotWait
		var flights []*flight
		tenants := []tenant{{by: "a"}, {by: "b"}, {host: "x"}, {host: "y"}, {host: "z"}}
		now := time.Unix(1000, 0)
		for serial := range rapid.IntRange(0, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "ms")) * time.Millisecond)
			who := rapid.SampledFrom(tenants).Draw(t, "who")
			if len(waits) > 0 && rapid.Bool().Draw(t, "done") {
				i := rapid.IntRange(0, len(waits)-1).Draw(t, "which")
				l.done(waits[i])
				waits = append(waits[:i], waits[i+1:]...)
				s.remove(flights[i])
				flights = append(flights[:i], flights[i+1:]...)
			} else {
				waits = append(waits, l.wait(who))
				f := &flight{who: who, serial: uint64(serial), began: now}
				flights = append(flights, f)
				s.add(f)
			}
			active, asked, total := map[tenant]int{}, 0, 0
			has := func(w *slotWait) bool {
				select {
				case <-w.ready:
					return true
				default:
					return false
				}
			}
			count := map[tenant]int{}
			for i, w := range waits {
				count[flights[i].who]++
				if has(w) {
					active[w.who]++
					if total++; w.who.by != "" {
						asked++
					}
				}
			}
			half := max(all/2, 1)
			if total > all || asked > half {
				t.Fatalf("%d of %d slots are taken, %d by strangers", total, all, asked)
			}
			share := func(who tenant) int {
				if who.by != "" {
					return max(half/2, 1)
				}
				return half
			}
			for who, n := range active {
				if n > share(who) {
					t.Fatalf("%v has %d of %d slots", who, n, all)
				}
			}
			for _, w := range waits {
				if !has(w) && total < all && active[w.who] < share(w.who) && (w.who.by == "" || asked < half) {
					t.Fatalf("%v waits, with %v", w.who, active)
				}
			}
			v := s.victim(who, now)
			most := 0
			for x, n := range count {
				if (x.by != "") == (who.by != "") {
					most = max(most, n)
				}
			}
			switch {
			case v == nil && most >= count[who]+2:
				t.Fatalf("%v has no room: %v", who, count)
			case v == nil:
			case (v.who.by != "") != (who.by != "") || count[v.who] != most:
				t.Fatalf("%v makes room for %v: %v", v.who, who, count)
			case most < count[who]+2 && now.Sub(v.began) < slotPatience:
				t.Fatalf("one of equals is ended after %v", now.Sub(v.began))
			}
		}
	})
}

// An agent that is being added when its handshake makes room leaves nothing behind.
func TestEvictedWhileAdmitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, func(c *Config, a *fakeAgent) {
			a.onAdd = func(ctx context.Context, name agent.Name, _ agent.PeerID) error {
				if !strings.HasPrefix(string(name), "E/") {
					return nil
				}
				<-ctx.Done()
				return context.Cause(ctx)
			}
		})
		defer b.table.Close()
		defer b.serve(t, addrP, "E", "i", 1).Close()
		x := target("E", addrP)
		x.By = "evil"
		ch := b.ask(x)
		synctest.Wait()
		b.set("mute:5600", blackHole)
		for i := range maxAsked + 10 {
			y := target(kv.EngineID(fmt.Sprint("X", i)), "mute:5600")
			y.By = "evil"
			time.Sleep(2 * time.Millisecond)
			b.ask(y)
		}
		if r := <-ch; !errors.Is(r.err, errEvicted) {
			t.Errorf("got %v, %v", r.c, r.err)
		}
		time.Sleep(DefaultHandshakeTimeout)
		b.wantSizes(t, 0, 0)
		b.wantNoShares(t)
	})
}
