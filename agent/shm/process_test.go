package shm

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// collector reads one agent's events.
type collector struct {
	t  testing.TB
	ch <-chan agent.Event
}

// next is the next event of a type; others before it are dropped.
func next[E agent.Event](c collector) E {
	c.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case ev, open := <-c.ch:
			if e, ok := ev.(E); ok {
				return e
			}
			if !open {
				c.t.Fatalf("the events ended before a %T", *new(E))
			}
		case <-timeout:
			c.t.Fatalf("no %T", *new(E))
		}
	}
}

func signal(t testing.TB, p *process, s syscall.Signal) {
	t.Helper()
	must(t, p.cmd.Process.Signal(s))
}

// A writer in another process is stopped in the middle of its writes: Revoke returns all the same,
// and from then on not one byte changes, also when it goes on.
func TestRevokeWhileTheWriterIsStopped(t *testing.T) {
	d := newAgent(t, Config{})
	defer d.Close()
	dm, err := d.Alloc(childBytes)
	must(t, err)
	p := startChild(t)
	p.do(request{Do: "add", Offers: d.Offers()})
	p.do(request{Do: "fill", Fill: 7})
	whole := []kv.Descriptor{{Addr: dm.Addr(), Length: childBytes}}
	for round := range 6 {
		clear(dm.Bytes())
		g, err := d.Grant(agent.GrantSpec{Peer: p.name, Ranges: whole})
		must(t, err)
		p.do(request{Do: "post", Ranges: whole, Grant: g, Times: 20})
		for i := 0; dm.Bytes()[round*childBytes/8] == 0 && i < 1e8; i++ {
			runtime.Gosched() // until a certain place is written
		}
		signal(t, p, syscall.SIGSTOP)
		d.Revoke(g)
		before := bytes.Clone(dm.Bytes())
		signal(t, p, syscall.SIGCONT)
		p.until("end of the transfers", func(evs []seen) bool { return count(evs, "stopped") == 20*(round+1) })
		if !bytes.Equal(before, dm.Bytes()) {
			t.Fatalf("round %d: memory changed after Revoke", round)
		}
	}
}

// The receiver in another process is stopped at some moment of a WRITE, the writer's bound of
// silence passes, and it uses its memory for something else. Whatever the receiver makes of it
// when it goes on: what it takes for done is whole.
func TestReceiverStoppedInTheMiddle(t *testing.T) {
	p := newAgent(t, Config{})
	defer p.Close()
	pm, err := p.Alloc(childBytes)
	must(t, err)
	d := startChild(t)
	peer, err := p.AddPeer(t.Context(), d.info)
	must(t, err)
	g := d.do(request{Do: "grant", Peer: p.Name()}).Grant
	local, err := p.Prepare(agent.Local, []kv.Descriptor{{Addr: pm.Addr(), Length: childBytes}})
	must(t, err)
	remote, err := p.Prepare(peer.ID, []kv.Descriptor{{Addr: d.addr, Length: childBytes}})
	must(t, err)
	fillBytes(pm.Bytes(), 1)
	right := crc32.ChecksumIEEE(pm.Bytes())
	evs := collector{t, p.Events()}
	var done int
	for round := range 12 {
		fillBytes(pm.Bytes(), 1)
		d.do(request{Do: "fill", Fill: 99})
		_, err := p.Post(agent.Transfer{
			Local: local, LocalIdx: []uint32{0}, Remote: remote, RemoteIdx: []uint32{0}, Grant: g,
			Notif: fmt.Appendf(nil, "round %d", round), Silence: 50 * time.Millisecond,
		})
		must(t, err)
		for range round * 40 {
			runtime.Gosched() // another moment in every round
		}
		signal(t, d, syscall.SIGSTOP)
		r := next[agent.Result](evs)
		next[agent.Stopped](evs)
		if r.Outcome != agent.OutcomeDone && r.Outcome != agent.OutcomeDeadline {
			t.Fatalf("round %d: ended as %v: %v", round, r.Outcome, r.Err)
		}
		if r.Outcome == agent.OutcomeDone {
			done++
		}
		fillBytes(pm.Bytes(), 2) // reused: Stopped has come
		signal(t, d, syscall.SIGCONT)
		// What it says now comes behind all that it has made of the round.
		must(t, p.Notify(peer.ID, fmt.Appendf(nil, "end %d", round)))
		got := d.until("end of the round", func(evs []seen) bool {
			return len(evs) > 0 && string(evs[len(evs)-1].Msg) == fmt.Sprintf("end %d", round)
		})
		for _, e := range got {
			if strings.HasPrefix(string(e.Msg), "round") && e.Sum != right && strings.HasSuffix(string(e.Msg), fmt.Sprint(" ", round)) {
				t.Fatalf("round %d: notified with memory that is not whole", round)
			}
		}
	}
	t.Logf("%d of 12 were done before the stop", done)
}

// A peer that is killed in the middle of everything is lost at once; its mappings and descriptors
// go away, and everybody else is served.
func TestKilledPeer(t *testing.T) {
	d := newAgent(t, Config{})
	defer d.Close()
	dm, err := d.Alloc(childBytes)
	must(t, err)
	whole := []kv.Descriptor{{Addr: dm.Addr(), Length: childBytes}}
	evs := collector{t, d.Events()}
	local, err := d.Prepare(agent.Local, whole)
	must(t, err)
	maps, fds := mapsOf(t), fdsOf(t)
	for range 3 {
		p := startChild(t)
		p.do(request{Do: "add", Offers: d.Offers()})
		peer, err := d.AddPeer(t.Context(), p.info)
		must(t, err)
		remote, err := d.Prepare(peer.ID, []kv.Descriptor{{Addr: p.addr, Length: childBytes}})
		must(t, err)
		rg := p.do(request{Do: "grant", Peer: d.Name(), Access: agent.AccessRead}).Grant
		g, err := d.Grant(agent.GrantSpec{Peer: p.name, Ranges: whole})
		must(t, err)
		p.do(request{Do: "post", Ranges: whole, Grant: g, Notif: []byte("first")})
		if n := next[agent.Notification](evs); string(n.Msg) != "first" {
			t.Fatalf("notified of %q", n.Msg)
		}
		p.do(request{Do: "post", Ranges: whole, Grant: g, Times: 30})
		for range 4 {
			_, err = d.Post(agent.Transfer{
				Op: agent.Read, Local: local, LocalIdx: []uint32{0}, Remote: remote, RemoteIdx: []uint32{0},
				Grant: rg, Silence: time.Minute,
			})
			must(t, err)
		}
		p.kill()
		for lost, stopped := 0, 0; lost < 2 || stopped < 4; {
			select {
			case ev := <-d.Events():
				switch ev := ev.(type) {
				case agent.PeerLost:
					lost++
					if ev.Peer.Name != p.name {
						t.Errorf("lost %v", ev.Peer)
					}
				case agent.Stopped:
					stopped++
				}
			case <-time.After(patience):
				t.Fatalf("%d losses and %d stops of a killed peer", lost, stopped)
			}
		}
		d.Revoke(g)
	}
	settled(t, "mappings", func() bool { return mapsOf(t) == maps })
	settled(t, "descriptors", func() bool { return fdsOf(t) == fds })
}

// settled waits for something that other goroutines are about to finish.
func settled(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s do not come back to what they were: %d mappings, %d descriptors", what, mapsOf(t), fdsOf(t))
		}
	}
}

// mapsOf counts this process's mappings of memory files.
func mapsOf(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	return bytes.Count(b, []byte("memfd:kvferry"))
}

// fdsOf counts this process's descriptors.
func fdsOf(t testing.TB) int {
	t.Helper()
	ents, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(ents)
}
