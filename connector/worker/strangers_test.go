package worker

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Agent names and engine addresses are public: whoever reaches an agent may say any of them. These tests
// are of strangers that do.

// rig carries a machine's actions out in the way that a test wants: do answers an action, or not.
type rig struct {
	m   *machine
	now time.Time
	do  func(action) input
}

func newRig(cfg Config, do func(action) input) *rig {
	return &rig{m: newMachine(cfg), now: time.Unix(1000, 0), do: do}
}

func (r *rig) step(in input) {
	for queue := []input{in}; len(queue) > 0; queue = queue[1:] {
		for _, a := range slices.Clone(r.m.Step(r.now, queue[0])) {
			if next := r.do(a); next != nil {
				queue = append(queue, next)
			}
		}
	}
}

// pass lets time pass from deadline to deadline.
func (r *rig) pass(d time.Duration) {
	end := r.now.Add(d)
	for at, ok := r.m.Deadline(); ok && !at.After(end); at, ok = r.m.Deadline() {
		r.now = at
		r.step(tick{})
	}
	r.now = end
}

func controlOf(t testing.TB, n wire.Notification) []byte {
	t.Helper()
	msg, err := wire.AppendControl(nil, n)
	if err != nil {
		t.Fatal(err)
	}
	return msg
}

func beatOf(t testing.TB, engine, host string, seq uint64) []byte {
	return controlOf(t, &wire.Beat{Seq: seq, From: wire.Sender{Engine: kv.EngineID(engine), Host: host, Port: 5600, TP: 1},
		Registrations: []wire.RegistrationRef{refOf("a-0", 1)}})
}

// Strangers whose engines never answer a handshake exhaust their own share: a D that is connected is
// answered as before, and one that is not has its turn.
func TestStrangersDoNotMuteP(t *testing.T) {
	states := map[kv.EngineID]int{}
	reachable := map[kv.EngineID]bool{"Q": true}
	r := newRig(machineConfig(), nil)
	r.do = func(a action) input {
		switch a := a.(type) {
		case connect:
			if reachable[a.addr.Engine] {
				return connected{a.addr, (&scenario{}).peerOf(string(a.addr.Engine))}
			}
		case notify:
			states[a.engine]++
		}
		return nil
	}
	r.step(from("q.0", beatOf(t, "Q", "q", 1)))
	for i := range maxNotices {
		r.step(from("evil", beatOf(t, "X", "mute", uint64(i+1))))
	}
	if n := r.m.notices.count(); n > maxNoticesPerAgent {
		t.Errorf("a stranger has %d notices", n)
	}
	for i := range 2 * maxNotices { // and many of them, each with little
		r.step(from(fmt.Sprint("evil", i%64), beatOf(t, "X", "mute", uint64(i+1))))
	}
	if n := r.m.notices.count(); n > maxNotices {
		t.Errorf("%d notices", n)
	}
	r.step(from("q.0", beatOf(t, "Q", "q", 2)))
	if states["Q"] != 2 {
		t.Errorf("a connected D was answered %d of 2 times", states["Q"])
	}
	r.step(from("r.0", beatOf(t, "R", "r", 1))) // the handshake with R takes its time
	r.step(connected{addrOf("R"), (&scenario{}).peerOf("R")})
	if states["R"] != 1 {
		t.Errorf("a D that connects later was answered %d times", states["R"])
	}
	for addr := range r.m.flights {
		r.step(connectFailed{addr, errors.New("no answer")})
	}
	if n := r.m.notices.count(); n != 0 {
		t.Errorf("%d notices are left", n)
	}
}

// A completion that comes with no WRITE is no success, and ends nothing, where the agent tells what
// arrives; P's own ends the receive. A receive that asked for no bytes needs none.
func TestBareCompletion(t *testing.T) {
	for _, tells := range []bool{true, false} {
		for _, start := range []int{0, 4} {
			var got []*connector.Error
			r := receiving(t, start, &got)
			r.m.tellsArrivals = tells
			bare := completionOf(t, r.m)
			r.step(bare)
			if want := !tells || start == 4; (len(got) == 1) != want {
				t.Errorf("arrivals are told: %v, %d tokens asked for: a bare completion ends it: %v", tells, 4-start, len(got) == 1)
			}
			if len(got) > 0 {
				continue
			}
			if r.m.stats.Ignored != 1 {
				t.Errorf("%d are counted", r.m.stats.Ignored)
			}
			bare.Arrival = &agent.Arrival{Bytes: 64}
			r.step(bare)
			if len(got) != 1 || got[0] != nil {
				t.Errorf("P's own: %v", got)
			}
		}
	}
}

// receiving is a D that has registered one request with q.0; ends takes the reports of it.
func receiving(t *testing.T, start int, ends *[]*connector.Error) *rig {
	r := newRig(machineConfig(), func(a action) input {
		switch a := a.(type) {
		case connect:
			return connected{a.addr, (&scenario{}).peerOf(string(a.addr.Engine))}
		case grant:
			return granted{a.receive, agent.GrantID{1}, nil}
		case reportReceived:
			*ends = append(*ends, a.Err)
		}
		return nil
	})
	r.step(stepMeta{connector.StepMeta{Registrations: []connector.Registration{{ID: "d-11111111", Blocks: kv.BlockIDs{{1}}, StartToken: start,
		NumTokens: 4, Peer: addrOf("Q")}}}})
	if len(r.m.consumer.byWireID) != 1 {
		t.Fatal("not registered")
	}
	return r
}

// completionOf is the completion of the one receive, with no WRITE.
func completionOf(t *testing.T, m *machine) notification {
	for id := range m.consumer.byWireID {
		msg, err := wire.AppendCompletion(nil, wire.Completion{ID: id, N: 1})
		if err != nil {
			t.Fatal(err)
		}
		return from("q.0", msg)
	}
	t.Fatal("nothing is received")
	return notification{}
}
