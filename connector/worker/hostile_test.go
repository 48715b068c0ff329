package worker

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// busy is a machine in the middle of everything: a receive, a hold, a waiting registration, a WRITE.
func busy(t testing.TB) (*machine, time.Time) {
	m, now := newMachine(machineConfig()), time.Unix(1000, 0)
	s := &scenario{m: m}
	m.Step(now, stepMeta{connector.StepMeta{
		Registrations: []connector.Registration{{ID: "d-11111111", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Peer: addrOf("Q")}},
		Queued:        []connector.QueuedRequest{{ID: "q-11111111", TransferID: "x"}},
		Finished: []connector.FinishedBlocks{{ID: "p-11111111", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Lease: 30 * time.Second},
			{ID: "w-11111111", Blocks: kv.BlockIDs{{2}}, NumTokens: 4, Lease: 30 * time.Second}},
	}})
	m.Step(now, connected{addrOf("Q"), s.peerOf("Q")})
	m.Step(now, granted{receive: 1, grant: agent.GrantID{1}})
	for gen, id := range []string{"w-22222222", "q-22222222"} {
		msg, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: kv.RequestID(id), DecodeEngineID: "Q", DecodeHost: "q", DecodePort: 5600,
			DecodeTPSize: 1, LocalBlockIDs: kv.BlockIDs{{5}}, Extension: &wire.PushRegExtension{NumTokens: 4, Generation: kv.Generation(gen + 1), Token: tokenOf(kv.Generation(gen + 1))}})
		if err != nil {
			t.Fatal(err)
		}
		m.Step(now, from("q.0", msg))
		m.Step(now, connected{addrOf("Q"), s.peerOf("Q")})
	}
	m.Step(now, posted{push: 2, transfer: 1})
	if st := m.snapshot(); st.Receiving != 1 || st.Held != 2 || st.InFlight != 1 || st.Waiting != 1 || st.Prefills != 1 {
		t.Fatalf("not busy: %+v", st)
	}
	return m, now
}

// messages are one of each kind that means something to the busy machine.
func messages(t testing.TB) (out [][]byte) {
	ours := refOf("d-11111111", 1, (&tokens{}).next()) // the first that the busy machine makes
	us := wire.Sender{Engine: "Q", Host: "q", Port: 5600, TP: 1}
	for _, n := range []wire.Notification{
		&wire.Beat{Seq: 1, From: us, Names: []kv.RequestID{"x"}, Registrations: []wire.RegistrationRef{testRef("w-22222222", 1)}},
		&wire.States{Answers: []wire.StateAnswer{{RegistrationRef: ours, State: wire.StateRunning}}},
		&wire.Cancel{Seq: 2, From: us, RegistrationRef: testRef("w-22222222", 1), TransferID: "x"},
		&wire.Failed{Seq: 3, RegistrationRef: ours, Phase: "lease", Reason: "over"},
		&wire.Ack{Seq: 1},
	} {
		b, err := wire.AppendControl(nil, n)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	reg, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: "p-22222222", DecodeEngineID: "Q", DecodeHost: "q", DecodePort: 5600,
		DecodeTPSize: 1, LocalBlockIDs: kv.BlockIDs{{5}}, Extension: &wire.PushRegExtension{NumTokens: 4, Generation: 3, Token: tokenOf(3)}})
	if err != nil {
		t.Fatal(err)
	}
	return append(out, reg, []byte("d-11111111:1"), []byte("PUSH_FAIL:d-11111111:1"), []byte("HB:p-11111111"))
}

// A message that is cut off has no effect but its counter.
func TestTruncatedMessages(t *testing.T) {
	for i, msg := range messages(t)[:6] { // the stock texts have shorter ones that are whole
		for cut := range len(msg) {
			m, now := busy(t)
			before := m.snapshot()
			m.Step(now, from("q.0", msg[:cut]))
			before.Ignored++
			if got := m.snapshot(); got != before {
				t.Fatalf("message %d, %d of %d bytes: %+v, want %+v", i, cut, len(msg), got, before)
			}
		}
	}
}

// Whatever a stranger says, nothing of what another has under way ends.
func TestStrangersMessages(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		m, now := busy(t)
		all := messages(t)
		for range rapid.IntRange(1, 10).Draw(r, "messages") {
			m.Step(now, from("stranger.0", rapid.SampledFrom(all).Draw(r, "message")))
		}
		st := m.snapshot()
		// A stranger may take blocks that nobody has asked for by naming them; here it is no engine that
		// can be connected under its name, so that it cannot even do that.
		if st.Receiving != 1 || st.InFlight != 1 || st.Waiting < 1 {
			r.Fatalf("%+v", st)
		}
		for _, u := range m.producer.pushes {
			if u.unwanted != "" {
				r.Fatal("a stranger has cancelled somebody's write")
			}
		}
	})
}

// FuzzNotification feeds the machine arbitrary bytes of a connected peer: no panic, and what it
// decides stays sound (the reports are counted).
func FuzzNotification(f *testing.F) {
	for _, msg := range messages(f) {
		f.Add(msg, uint8(1))
	}
	f.Fuzz(func(t *testing.T, msg []byte, times uint8) {
		m, now := busy(t)
		reports := map[string]int{}
		for range int(times%3) + 1 {
			for _, a := range m.Step(now, from("q.0", msg)) {
				switch a := a.(type) {
				case reportReceived:
					reports[fmt.Sprint("received ", a.ID)]++
				case reportSent:
					reports[fmt.Sprint("sent ", a.ID)]++
				}
			}
		}
		for what, n := range reports {
			if n != 1 {
				t.Errorf("%s is reported %d times", what, n)
			}
		}
		for range 1 << 12 {
			at, ok := m.Deadline()
			if !ok {
				break
			}
			m.Step(at, tick{})
		}
	})
}

// Ten thousand registrations that nobody will ever serve, of a D that goes on living: bounded, and
// gone in the end; D is told of as many as fit.
func TestOrphansOfALivingD(t *testing.T) {
	m, now := newMachine(machineConfig()), time.Unix(1000, 0)
	s := &scenario{m: m}
	for i := range 10000 {
		m.Step(now, from("q.0", func() []byte {
			b, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: kv.RequestID(fmt.Sprintf("r%d-0", i)), DecodeEngineID: "Q", DecodeHost: "q",
				DecodePort: 5600, DecodeTPSize: 1, LocalBlockIDs: kv.BlockIDs{{1}}, Extension: &wire.PushRegExtension{NumTokens: 4, Generation: kv.Generation(i + 1), Token: tokenOf(kv.Generation(i + 1))}})
			if err != nil {
				t.Fatal(err)
			}
			return b
		}()))
		if len(m.flights) > 0 {
			m.Step(now, connected{addrOf("Q"), s.peerOf("Q")})
		}
	}
	st := m.snapshot()
	if st.Waiting != maxPerSender || st.Letters > maxLetters || m.notices.count() != 0 {
		t.Errorf("%d registrations and %d letters of one D wait", st.Waiting, st.Letters)
	}
	for range 1 << 20 {
		at, ok := m.Deadline()
		if !ok {
			break
		}
		now = at
		m.Step(now, tick{})
		if len(m.flights) > 0 {
			m.Step(now, connected{addrOf("Q"), s.peerOf("Q")})
		}
	}
	st = m.snapshot()
	if st.Waiting != 0 || st.WaitingBlocks != 0 || st.Letters != 0 || st.FailuresSent < 10000-maxPerSender || len(m.producer.senders["q.0"].active) != 0 {
		t.Errorf("left: %+v", st)
	}
}
