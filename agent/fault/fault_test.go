package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/agenttest"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/kv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// With no rules the wrapper is as good as what it wraps.
func TestConformanceWithoutRules(t *testing.T) {
	factory := func(testing.TB) agenttest.Net {
		f := local.New(local.Config{})
		var names []agent.Name
		others := func(a agent.Agent, do func(a, b agent.Name)) {
			for _, n := range names {
				if n != a.Name() {
					do(a.Name(), n)
				}
			}
		}
		return agenttest.Net{
			New: func(t testing.TB, limits agent.Limits) agent.Agent {
				name := agent.Name(fmt.Sprintf("agent-%d", len(names)))
				names = append(names, name)
				a, err := f.AgentWithLimits(name, limits)
				if err != nil {
					t.Fatal(err)
				}
				return Wrap(a, Options{Limits: limits})
			},
			Stall: func(_ testing.TB, a agent.Agent) func() {
				others(a, f.Partition)
				return func() { others(a, f.Heal) }
			},
			Kill: func(_ testing.TB, a agent.Agent) {
				f.Kill(a.Name())
				others(a, f.Heal)
			},
		}
	}
	agenttest.Run(t, factory, agenttest.Options{Bubble: true})
}

// scene is p, wrapped, with one page to write to d, wrapped too.
type scene struct {
	*testing.T
	p, d   *Agent
	pm, dm agent.Memory
	peer   agent.PeerID
	tr     agent.Transfer
	grant  agent.GrantID
	start  time.Time
}

func run(t *testing.T, test func(*scene)) {
	synctest.Test(t, func(t *testing.T) {
		s := &scene{T: t, start: time.Now()}
		f := local.New(local.Config{})
		wrap := func(name agent.Name) *Agent {
			a, err := f.Agent(name)
			if err != nil {
				t.Fatal(err)
			}
			return Wrap(a, Options{Seed: 1})
		}
		s.p, s.d = wrap("p"), wrap("d")
		defer s.p.Close()
		defer s.d.Close()
		s.pm, _ = s.p.Alloc(4096)
		s.dm, _ = s.d.Alloc(4096)
		s.pm.Bytes()[9] = 9
		s.connect()
		test(s)
	})
}

func (s *scene) connect() {
	s.Helper()
	p, err := s.p.AddPeer(s.Context(), agent.PeerInfo{Offers: s.d.Offers()})
	if err != nil {
		s.Fatal(err)
	}
	s.peer = p.ID
	page := []kv.Descriptor{{Addr: s.dm.Addr(), Length: 4096}}
	local, _ := s.p.Prepare(agent.Local, []kv.Descriptor{{Addr: s.pm.Addr(), Length: 4096}})
	remote, _ := s.p.Prepare(s.peer, page)
	s.grant, _ = s.d.Grant(agent.GrantSpec{Peer: "p", Ranges: page})
	s.tr = agent.Transfer{
		Local: local, Remote: remote, LocalIdx: []uint32{0}, RemoteIdx: []uint32{0},
		Grant: s.grant, Notif: []byte("whole"), Silence: time.Minute,
	}
}

// log is everything an agent tells until nothing is pending any more, with the times.
func (s *scene) log(a *Agent, wait time.Duration) string {
	var lines []string
	deadline := time.After(wait)
	for {
		select {
		case ev := <-a.Events():
			at := time.Since(s.start)
			switch ev := ev.(type) {
			case agent.Result:
				lines = append(lines, fmt.Sprintf("%v result %d %v", at, ev.Transfer, ev.Outcome))
			case agent.Stopped:
				lines = append(lines, fmt.Sprintf("%v stopped %d", at, ev.Transfer))
			case agent.Notification:
				lines = append(lines, fmt.Sprintf("%v notif %s", at, ev.Msg))
			case agent.PeerLost:
				lines = append(lines, fmt.Sprintf("%v lost %s", at, ev.Peer.Name))
			}
		case <-deadline:
			return strings.Join(lines, "; ")
		}
	}
}

func (s *scene) post() {
	s.Helper()
	if _, err := s.p.Post(s.tr); err != nil {
		s.Fatal(err)
	}
}

func (s *scene) say(msgs ...string) {
	s.Helper()
	for _, m := range msgs {
		if err := s.p.Notify(s.peer, []byte(m)); err != nil {
			s.Fatal(err)
		}
		synctest.Wait()
	}
}

func (s *scene) written() bool { return s.dm.Bytes()[9] == 9 }

// Each fault of the table in the package's documentation, with everything both sides are told.
func TestFaults(t *testing.T) {
	boom := errors.New("boom")
	for _, c := range []struct {
		name    string
		at      string // whose rule
		rule    Rule
		do      func(*scene)
		p, d    string
		written bool
	}{
		{"nothing", "p", Rule{Match: Match{On: OnPost, Peer: "x"}},
			(*scene).post, "0s result 1 done; 0s stopped 1", "0s notif whole", true},
		{"post delayed", "p", Rule{Match: Match{On: OnPost}, Do: Delay, Delay: time.Second},
			(*scene).post, "1s result 1 done; 1s stopped 1", "1s notif whole", true},
		{"post dropped", "p", Rule{Match: Match{On: OnPost}, Do: Drop},
			(*scene).post, "1m0s result 1 deadline; 1m0s stopped 1", "", false},
		{"post stalled, cancelled", "p", Rule{Match: Match{On: OnPost}, Do: Stall},
			func(s *scene) { s.post(); time.Sleep(time.Second); s.p.Cancel(1) }, "1s result 1 cancelled; 1s stopped 1", "", false},
		{"post stalled, peer removed", "p", Rule{Match: Match{On: OnPost}, Do: Stall},
			func(s *scene) { s.post(); s.p.RemovePeer(s.peer) }, "0s result 1 peer lost; 0s stopped 1", "0s lost p", false},
		{"second post fails", "p", Rule{Match: Match{On: OnPost}, Do: Fail, After: 1, Times: 1, Err: boom},
			func(s *scene) {
				s.post()
				var pe *agent.PostError
				if _, err := s.p.Post(s.tr); !errors.As(err, &pe) || pe.Reason != "boom" {
					s.Errorf("second post: %v", err)
				}
				synctest.Wait()
				s.post()
			}, "0s result 1 done; 0s stopped 1; 0s result 2 done; 0s stopped 2", "0s notif whole; 0s notif whole", true},
		{"failure reported, written later", "p", Rule{Match: Match{On: OnPost}, Do: WriteLate, Delay: time.Second},
			func(s *scene) {
				s.post()
				time.Sleep(time.Second / 2)
				if s.written() {
					s.Error("written at once")
				}
			}, "0s result 1 failed; 1s stopped 1", "1s notif whole", true},
		{"written later under a grant that is revoked", "p", Rule{Match: Match{On: OnPost}, Do: WriteLate, Delay: time.Second},
			func(s *scene) { s.post(); s.d.Revoke(s.grant) }, "0s result 1 failed; 1s stopped 1", "", false},
		{"cut by post", "p", Rule{Match: Match{On: OnPost}, Do: Cut},
			func(s *scene) {
				if _, err := s.p.Post(s.tr); err == nil {
					s.Error("posted to a peer that is cut")
				}
			}, "0s lost d", "0s lost p", false},
		{"result delayed", "p", Rule{Match: Match{On: OnResult}, Do: Delay, Delay: time.Second},
			(*scene).post, "1s result 1 done; 1s stopped 1", "0s notif whole", true},
		{"result failed falsely", "p", Rule{Match: Match{On: OnResult}, Do: Fail},
			(*scene).post, "0s result 1 failed; 0s stopped 1", "0s notif whole", true},
		{"cut by result", "p", Rule{Match: Match{On: OnResult}, Do: Cut},
			(*scene).post, "0s result 1 peer lost; 0s lost d; 0s stopped 1", "0s notif whole; 0s lost p", true},
		{"stopped delayed", "p", Rule{Match: Match{On: OnStopped}, Do: Delay, Delay: time.Second},
			(*scene).post, "0s result 1 done; 1s stopped 1", "0s notif whole", true},
		{"notify fails once", "p", Rule{Match: Match{On: OnNotify}, Do: Fail, Times: 1},
			func(s *scene) {
				if err := s.p.Notify(s.peer, []byte("a")); !errors.Is(err, ErrInjected) {
					s.Errorf("notify: %v", err)
				}
				s.say("b")
			}, "", "0s notif b", false},
		{"notify dropped by prefix", "p", Rule{Match: Match{On: OnNotify, Prefix: "HB:"}, Do: Drop},
			func(s *scene) { s.say("HB:1", "REG:2", "HB:3") }, "", "0s notif REG:2", false},
		{"notify delayed", "p", Rule{Match: Match{On: OnNotify, Prefix: "a"}, Do: Delay, Delay: time.Second},
			func(s *scene) { s.say("a", "b") }, "", "0s notif b; 1s notif a", false},
		{"notify twice", "p", Rule{Match: Match{On: OnNotify, Prefix: "a"}, Do: Duplicate},
			func(s *scene) { s.say("a", "b") }, "", "0s notif a; 0s notif a; 0s notif b", false},
		{"notify reordered", "p", Rule{Match: Match{On: OnNotify, Prefix: "a"}, Do: Reorder},
			func(s *scene) { s.say("a", "b", "c") }, "", "0s notif b; 0s notif a; 0s notif c", false},
		{"notify reordered, alone", "p", Rule{Match: Match{On: OnNotify}, Do: Reorder, Delay: time.Second},
			func(s *scene) { s.say("a") }, "", "1s notif a", false},
		{"cut by notify", "p", Rule{Match: Match{On: OnNotify}, Do: Cut},
			func(s *scene) {
				if err := s.p.Notify(s.peer, []byte("a")); err == nil {
					s.Error("notified a peer that is cut")
				}
			}, "0s lost d", "0s lost p", false},
		{"notification dropped", "d", Rule{Match: Match{On: OnNotification, Prefix: "whole"}, Do: Drop},
			(*scene).post, "0s result 1 done; 0s stopped 1", "", true},
		{"notification delayed", "d", Rule{Match: Match{On: OnNotification, Prefix: "a"}, Do: Delay, Delay: time.Second},
			func(s *scene) { s.say("a", "b") }, "", "0s notif b; 1s notif a", false},
		{"delayed notification before the loss", "d", Rule{Match: Match{On: OnNotification}, Do: Delay, Delay: time.Second},
			func(s *scene) { s.say("a"); s.p.RemovePeer(s.peer) }, "", "0s notif a; 0s lost p", false},
		{"notification twice", "d", Rule{Match: Match{On: OnNotification}, Do: Duplicate},
			(*scene).post, "0s result 1 done; 0s stopped 1", "0s notif whole; 0s notif whole", true},
		{"notifications reordered", "d", Rule{Match: Match{On: OnNotification, Prefix: "a"}, Do: Reorder},
			func(s *scene) { s.say("a", "b", "c") }, "", "0s notif b; 0s notif a; 0s notif c", false},
		{"cut by notification", "d", Rule{Match: Match{On: OnNotification, Prefix: "b"}, Do: Cut},
			func(s *scene) { s.say("a", "b") }, "0s lost d", "0s notif a; 0s lost p", false},
		{"loss delayed", "d", Rule{Match: Match{On: OnPeerLost}, Do: Delay, Delay: time.Second},
			func(s *scene) { s.p.RemovePeer(s.peer) }, "", "1s lost p", false},
		{"where", "p", Rule{Match: Match{On: OnNotify, Where: func(o Occasion) bool { return len(o.Msg) > 1 }}, Do: Drop},
			func(s *scene) { s.say("aa", "b") }, "", "0s notif b", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			run(t, func(s *scene) {
				at := s.p
				if c.at == "d" {
					at = s.d
				}
				at.Add(c.rule)
				plog, dlog := make(chan string), make(chan string)
				go func() { plog <- s.log(s.p, 2*time.Minute) }()
				go func() { dlog <- s.log(s.d, 2*time.Minute) }()
				c.do(s)
				if p, d := <-plog, <-dlog; p != c.p || d != c.d {
					t.Errorf("p: %s\nwant %s\nd: %s\nwant %s", p, c.p, d, c.d)
				}
				if s.written() != c.written {
					t.Errorf("written: %v", s.written())
				}
			})
		})
	}
}

func TestAddPeerFaults(t *testing.T) {
	run(t, func(s *scene) {
		s.p.Add(
			Rule{Match: Match{On: OnAddPeer}, Do: Fail, Times: 1},
			Rule{Match: Match{On: OnAddPeer}, Do: Delay, Delay: time.Second, Times: 1},
			Rule{Match: Match{On: OnAddPeer}, Do: Stall, Times: 1},
		)
		info := agent.PeerInfo{Offers: s.d.Offers()}
		var pe *agent.PeerError
		if _, err := s.p.AddPeer(s.Context(), info); !errors.As(err, &pe) || !errors.Is(err, ErrInjected) {
			s.Errorf("failed: %v", err)
		}
		before := time.Now()
		if _, err := s.p.AddPeer(s.Context(), info); err != nil || time.Since(before) != time.Second {
			s.Errorf("delayed: %v after %v", err, time.Since(before))
		}
		ctx, cancel := context.WithTimeout(s.Context(), time.Minute)
		defer cancel()
		if _, err := s.p.AddPeer(ctx, info); !errors.Is(err, context.DeadlineExceeded) {
			s.Errorf("stalled: %v", err)
		}
		s.p.Add(Rule{Match: Match{On: OnAddPeer}, Do: Stall})
		go func() {
			time.Sleep(time.Second)
			s.p.Close()
		}()
		if _, err := s.p.AddPeer(s.Context(), info); !errors.Is(err, agent.ErrClosed) {
			s.Errorf("stalled, then closed: %v", err)
		}
	})
}

// Whatever is held back when the agent closes is told before its channel is.
func TestCloseReleases(t *testing.T) {
	run(t, func(s *scene) {
		s.p.Add(
			Rule{Match: Match{On: OnPost}, Do: Stall, Times: 1},
			Rule{Match: Match{On: OnPost}, Do: WriteLate, Delay: time.Hour, Times: 1},
			Rule{Match: Match{On: OnResult}, Do: Delay, Delay: time.Hour, Times: 1},
			Rule{Match: Match{On: OnStopped}, Do: Delay, Delay: time.Hour},
		)
		for range 4 {
			s.post()
			synctest.Wait()
		}
		if err := s.p.Close(); err != nil {
			t.Fatal(err)
		}
		count := map[agent.TransferID]int{}
		for ev := range s.p.Events() {
			switch ev := ev.(type) {
			case agent.Result:
				count[ev.Transfer]++
			case agent.Stopped:
				count[ev.Transfer] += 10
			}
		}
		for id := range agent.TransferID(4) {
			if count[id+1] != 11 {
				t.Errorf("transfer %d: %d", id+1, count[id+1])
			}
		}
	})
}

// The same seed gives the same faults.
func TestChanceIsSeeded(t *testing.T) {
	var logs [2]string
	for i := range logs {
		run(t, func(s *scene) {
			s.p.Add(Rule{Match: Match{On: OnNotify}, Do: Drop, Chance: 0.5})
			for k := range 40 {
				s.say(fmt.Sprint(k))
			}
			s.p.Clear()
			s.say("end")
			logs[i] = s.log(s.d, time.Second)
		})
	}
	if n := strings.Count(logs[0], "notif"); logs[0] != logs[1] || n < 8 || n > 34 {
		t.Errorf("%s\n%s", logs[0], logs[1])
	}
}

func TestAddRefusesNonsense(t *testing.T) {
	run(t, func(s *scene) {
		defer func() {
			if recover() == nil {
				t.Error("a dropped Stopped is accepted")
			}
		}()
		s.p.Add(Rule{Match: Match{On: OnStopped}, Do: Drop})
	})
}

// Memory is what a late write makes of it, not more.
func TestLateWriteWritesWhole(t *testing.T) {
	run(t, func(s *scene) {
		s.p.Add(Rule{Match: Match{On: OnPost}, Do: WriteLate, Delay: time.Second})
		s.post()
		s.tr.LocalIdx[0] = 7 // the caller's slice is its own again
		s.log(s.p, time.Minute)
		if !bytes.Equal(s.pm.Bytes(), s.dm.Bytes()) {
			t.Error("bytes differ")
		}
	})
}
