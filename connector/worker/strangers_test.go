package worker

import (
	"errors"
	"fmt"
	"slices"
	"strings"
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
		Registrations: []wire.RegistrationRef{testRef("a-0", 1)}})
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
	return receivingAs(t, machineConfig(), start, ends)
}

func receivingAs(t *testing.T, cfg Config, start int, ends *[]*connector.Error) *rig {
	r := newRig(cfg, func(a action) input {
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

func (r *rig) lose(name string, gen int, inbound bool) {
	r.step(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: agent.Name(name), Gen: kv.Generation(gen)}, Inbound: inbound, Err: errors.New("reset")}})
}

// by is a message that comes by another connection.
func by(gen int, n notification) notification {
	n.From.Gen = kv.Generation(gen)
	return n
}

// A stranger who connects to D with P's name and leaves ends nothing; P's own connection, which what it
// says of our request has proved, does.
func TestStrangerSaysPsName(t *testing.T) {
	var got []*connector.Error
	r := receiving(t, 0, &got)
	r.lose("q.0", 77, true)
	r.step(by(78, from("q.0", beatOf(t, "Q", "q", 1))))
	r.step(by(78, from("q.0", controlOf(t, &wire.States{Answers: []wire.StateAnswer{{RegistrationRef: testRef("d-00000000", 1), State: wire.StateQueued}}}))))
	r.step(by(78, from("q.0", controlOf(t, &wire.Ack{Seq: 99}))))
	r.lose("q.0", 78, true)
	if len(got) != 0 {
		t.Fatalf("a stranger ended it: %v", got)
	}
	r.step(by(7, from("q.0", controlOf(t, &wire.States{Answers: []wire.StateAnswer{{RegistrationRef: r.m.ourRef("d-11111111", 1), State: wire.StateQueued}}}))))
	r.lose("q.0", 79, true)
	if len(got) != 0 {
		t.Fatalf("a stranger ended it beside P: %v", got)
	}
	r.lose("q.0", 7, true)
	if len(got) != 1 || got[0] == nil {
		t.Errorf("P's own connection is gone: %v", got)
	}
}

// What a stranger says under P's name is no sign that P lives.
func TestStrangerIsNoSignOfLife(t *testing.T) {
	var got []*connector.Error
	r := receiving(t, 0, &got)
	for range 60 {
		r.step(by(78, from("q.0", beatOf(t, "Q", "q", 1))))
		r.step(by(78, from("q.0", controlOf(t, &wire.Ack{Seq: 99}))))
		r.pass(time.Second)
	}
	if len(got) != 1 || got[0] == nil || got[0].Phase != connector.PhaseWait {
		t.Errorf("P has said nothing: %v", got)
	}
}

// A stranger who connects to P with D's name and leaves takes none of D's registrations along: not those
// that wait, nor those whose handshake runs.
func TestStrangerSaysDsName(t *testing.T) {
	r := newRig(machineConfig(), func(action) input { return nil })
	r.step(from("d", registrationOf(t, "waits-0", 1, 1)))
	r.step(from("d", registrationOf(t, "paired-0", 2, 1)))
	r.step(stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: "paired-0", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Lease: 30 * time.Second}}}})
	want := func(waiting, pushes int, when string) {
		t.Helper()
		if w, p := r.m.producer.order.Len(), len(r.m.producer.pushes); w != waiting || p != pushes {
			t.Errorf("%s: %d wait, %d are paired; want %d and %d", when, w, p, waiting, pushes)
		}
	}
	r.lose("d", 77, true)
	want(1, 1, "a stranger has left")
	r.step(by(78, from("d", registrationOf(t, "strange-0", 3, 1))))
	want(2, 1, "a stranger has registered")
	r.lose("d", 78, true)
	want(1, 1, "it has left")
	r.step(by(2, from("d", beatOf(t, "D", "d", 1)))) // names none of them
	r.lose("d", 2, true)
	want(1, 1, "another has left")
	r.lose("d", 1, true)
	want(0, 0, "D has left")
}

// The same in pull: claims are lost with the connection by which they came.
func TestStrangerSaysReadersName(t *testing.T) {
	cfg := machineConfig()
	cfg.Mode = kv.Pull
	r := newRig(cfg, func(a action) input {
		if a, ok := a.(lend); ok {
			return lent{a.claim, agent.GrantID{1}, nil}
		}
		return nil
	})
	blocks := kv.BlockIDs{{1}}
	r.step(stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: "p-0", Blocks: blocks, NumTokens: 4, Lease: 30 * time.Second, Generation: 1}}}})
	r.step(from("q.0", controlOf(t, &wire.Claim{Seq: 1, From: wire.Sender{Engine: "Q", Host: "q", Port: 5600, TP: 1}, RegistrationRef: testRef("p-0", 1), Lease: 1,
		Tokens: 4, Readers: 1, Blocks: wire.BlocksDigest(blocks)})))
	if len(r.m.lender.claims) != 1 {
		t.Fatal("not claimed")
	}
	r.lose("q.0", 77, true)
	if len(r.m.lender.claims) != 1 {
		t.Error("a stranger's end is taken for D's")
	}
	r.lose("q.0", 1, true)
	if len(r.m.lender.claims) != 0 {
		t.Error("D's claim outlives its connection")
	}
}

// Connections under one name are told apart up to a bound, and P's own is among them.
func TestConnectionsAreBounded(t *testing.T) {
	var got []*connector.Error
	r := receiving(t, 0, &got)
	for gen := range 2 * maxConnections {
		r.step(by(100+gen, from("q.0", beatOf(t, "Q", "q", 1))))
	}
	r.step(by(7, from("q.0", controlOf(t, &wire.States{Answers: []wire.StateAnswer{{RegistrationRef: r.m.ourRef("d-11111111", 1), State: wire.StateQueued}}}))))
	if p := r.m.consumer.pulses["q.0"]; len(p.via) != maxConnections || !p.via[agent.PeerID{Name: "q.0", Gen: 7}] {
		t.Errorf("%d connections", len(p.via))
	}
}

// Correspondents are bounded also when all have letters.
func TestCorrespondentsAreBounded(t *testing.T) {
	m := newMachine(machineConfig())
	m.now = time.Unix(1000, 0)
	letter := func(name string) {
		r := &remote{engine: "Q", addr: addrOf("Q"), agent: agent.Peer{ID: agent.PeerID{Name: agent.Name(name), Gen: 1}}, control: true}
		m.send(r, "failure", 0, func(seq uint64, receipt wire.Token) wire.Notification {
			return &wire.Failed{Seq: seq, Receipt: receipt, RegistrationRef: testRef("a-0", 1)}
		})
	}
	for i := range maxSenders + 10 {
		letter(fmt.Sprint("d", i))
	}
	if n := len(m.letters.byName); n != maxSenders || m.stats.LettersLost != 10 || m.timers.Len() != maxSenders {
		t.Errorf("%d correspondents, %d letters lost, %d timers", n, m.stats.LettersLost, m.timers.Len())
	}
	// Letters for which blocks wait stay: the next is sent once, and not kept.
	for _, x := range m.letters.byName {
		for _, l := range x.letters {
			l.receive = 1
		}
	}
	letter("late")
	if n := len(m.letters.byName); n != maxSenders || m.letters.byName["late"] != nil || m.timers.Len() != maxSenders {
		t.Errorf("%d correspondents, %d timers", n, m.timers.Len())
	}
}

// The message of a silent P names a time that people read.
func TestSilenceIsRounded(t *testing.T) {
	cfg := machineConfig()
	cfg.Lease, cfg.SilentBeats = time.Second, 3
	var got []*connector.Error
	r := receivingAs(t, cfg, 0, &got)
	r.step(from("q.0", statesOf(t, r.m, 1)))
	r.pass(time.Minute)
	if len(got) != 1 || got[0] == nil || !strings.Contains(got[0].Reason, "for 500ms (3 heartbeats)") {
		t.Errorf("after a silence of %v: %v", r.m.silenceBound(), got)
	}
}

// What a stranger makes P connect to is asked for in its own name, and what nobody waits for any more is not
// kept, so that thousands of made-up engines take neither places in the peer table from others nor room here.
func TestConnectsOfStrangers(t *testing.T) {
	by := map[agent.Name]int{}
	var own []connector.PeerAddr
	r := newRig(machineConfig(), nil)
	r.do = func(a action) input {
		if a, ok := a.(connect); ok {
			if by[a.by]++; a.by == "" {
				own = append(own, a.addr)
			}
		}
		return nil
	}
	for i := range 20000 {
		r.step(from(fmt.Sprint("evil", i%16), beatOf(t, fmt.Sprint("X", i), "mute", uint64(i+1))))
	}
	if by[""] != 0 {
		t.Errorf("%d of them are asked for as our own work", by[""])
	}
	if n := len(r.m.flights); n > maxNotices {
		t.Errorf("%d connects are waited for", n)
	}
	r.step(from("honest", beatOf(t, "R", "r", 1)))
	if by["honest"] != 1 {
		t.Error("an honest peer's answer has no turn")
	}
	// Our own work needs it now: the peer table is told.
	r.step(stepMeta{connector.StepMeta{Registrations: []connector.Registration{{ID: "d-11111111", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Peer: addrOf("R")}}}})
	if len(own) != 1 || own[0] != addrOf("R") {
		t.Errorf("our own work asks for %v", own)
	}
	r.step(connected{addrOf("R"), (&scenario{}).peerOf("R")})
	r.step(connected{addrOf("R"), (&scenario{}).peerOf("R")}) // the second answer finds nobody
	if rec := r.m.consumer.byID["d-11111111"]; rec == nil || rec.remote == nil {
		t.Error("not connected")
	}
	for i := range 20000 {
		r.step(connectFailed{connector.PeerAddr{Engine: kv.EngineID(fmt.Sprint("X", i)), Host: "mute", Port: 5600, TP: 1, PP: 1}, errors.New("no answer")})
	}
	if len(r.m.flights) != 0 || r.m.notices.count() != 0 {
		t.Errorf("%d connects, %d notices are left", len(r.m.flights), r.m.notices.count())
	}
}
