package worker

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

func from(name string, msg []byte) notification {
	return notification{agent.Notification{From: agent.PeerID{Name: agent.Name(name), Gen: 1}, Msg: msg}}
}

// registrationOf is a kvferry registration of so many blocks.
func registrationOf(t *testing.T, id string, gen, blocks int) []byte {
	t.Helper()
	msg, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: kv.RequestID(id), DecodeEngineID: "D", DecodeHost: "d", DecodePort: 5600,
		DecodeTPSize: 1, LocalBlockIDs: kv.BlockIDs{make([]kv.BlockID, blocks)},
		Extension: &wire.PushRegExtension{NumTokens: 4, Generation: kv.Generation(gen), Token: tokenOf(kv.Generation(gen))}})
	if err != nil {
		t.Fatal(err)
	}
	return msg
}

func droppedFor(acts []action) (out []string) {
	for _, a := range acts {
		if e, ok := a.(emit); ok {
			if d, ok := e.Event.(event.RegistrationDropped); ok {
				out = append(out, string(d.Request)+" "+d.Reason)
			}
		}
	}
	return out
}

// A sender that goes beyond its share loses its own oldest registration, and is told.
func TestSenderOverflow(t *testing.T) {
	m := newMachine(machineConfig())
	now := time.Unix(1000, 0)
	m.Step(now, from("other", registrationOf(t, "other-0", 1, 1)))
	for i := range maxPerSender {
		m.Step(now, from("d", registrationOf(t, fmt.Sprintf("r%d-0", i), i+1, 1)))
	}
	before := m.notices.count()
	acts := m.Step(now, from("d", registrationOf(t, "last-0", maxPerSender+1, 1)))
	if got := droppedFor(acts); len(got) != 1 || got[0] != "r0-0 overflow: too many registrations wait" {
		t.Errorf("dropped %q", got)
	}
	if len(m.flights) != 1 || m.notices.count() != before+1 {
		t.Error("nothing is done to tell D of its dropped registration")
	}
	if s := m.snapshot(); s.Waiting != maxPerSender+1 {
		t.Errorf("%d wait", s.Waiting)
	}
}

// The same by block ids: a few registrations of very long prompts.
func TestSenderBlockOverflow(t *testing.T) {
	m := newMachine(machineConfig())
	now := time.Unix(1000, 0)
	per := maxSenderBlocks / 8
	for i := range 9 {
		m.Step(now, from("d", registrationOf(t, fmt.Sprintf("r%d-0", i), i+1, per)))
	}
	if s := m.snapshot(); s.Waiting != 8 || s.WaitingBlocks != maxSenderBlocks {
		t.Errorf("%d registrations with %d blocks wait", s.Waiting, s.WaitingBlocks)
	}
}

// All senders together: the oldest of all makes room.
func TestRegistrationOverflow(t *testing.T) {
	m := newMachine(machineConfig())
	now := time.Unix(1000, 0)
	n := 0
	for s := range maxRegistrations/maxPerSender + 1 {
		for i := range maxPerSender {
			m.Step(now, from(fmt.Sprint("d", s), registrationOf(t, fmt.Sprintf("r%d.%d-0", s, i), i+1, 1)))
			n++
		}
	}
	if s := m.snapshot(); s.Waiting != maxRegistrations || s.RegistrationsDropped != uint64(n-maxRegistrations) {
		t.Errorf("%d of %d wait, %d were dropped", s.Waiting, n, s.RegistrationsDropped)
	}
	if len(m.flights) != 1 || m.notices.count() > maxNotices {
		t.Errorf("%d connects, %d notices", len(m.flights), m.notices.count())
	}
}

// Senders without a waiting registration make room for others; a full house of waiting ones refuses.
func TestSendersAreBounded(t *testing.T) {
	m := newMachine(machineConfig())
	now := time.Unix(1000, 0)
	for i := range maxSenders {
		m.Step(now, from(fmt.Sprint("d", i), registrationOf(t, "r-0", 1, 1)))
	}
	if got := droppedFor(m.Step(now, from("late", registrationOf(t, "r-0", 1, 1)))); len(got) != 1 {
		t.Errorf("one too many: dropped %q", got)
	}
	m.Step(now, peerLost{agent.PeerLost{Peer: agent.PeerID{Name: "d7", Gen: 1}, Inbound: true}})
	if got := droppedFor(m.Step(now, from("late", registrationOf(t, "r-0", 1, 1)))); len(got) != 0 {
		t.Errorf("with room: dropped %q", got)
	}
}

// The memory of ended requests forgets its oldest.
func TestNotesAreBounded(t *testing.T) {
	m := newMachine(machineConfig())
	now := time.Unix(1000, 0)
	for i := range maxNotes + 10 {
		m.Step(now, stepMeta{connector.StepMeta{Dropped: []connector.DroppedRequest{{ID: kv.RequestID(fmt.Sprintf("p%d-0", i))}}}})
	}
	if s := m.snapshot(); s.Notes != maxNotes {
		t.Errorf("%d notes", s.Notes)
	}
	if got := droppedFor(m.Step(now, from("d", registrationOf(t, "p9-0", 1, 1)))); len(got) != 0 {
		t.Errorf("a forgotten request is remembered: %q", got)
	}
	if got := droppedFor(m.Step(now, from("d", registrationOf(t, "p10-0", 2, 1)))); len(got) != 1 {
		t.Errorf("a remembered request is forgotten: %q", got)
	}
}

// Receives and holds beyond the bound are reported at once.
func TestReceivesAndHoldsAreBounded(t *testing.T) {
	m := newMachine(machineConfig())
	now := time.Unix(1000, 0)
	var s connector.StepMeta
	for i := range maxReceives {
		s.Registrations = append(s.Registrations, connector.Registration{ID: kv.RequestID(fmt.Sprint(i)), Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Peer: addrOf("Q")})
		s.Finished = append(s.Finished, connector.FinishedBlocks{ID: kv.RequestID(fmt.Sprint(i)), Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Lease: time.Minute})
	}
	m.Step(now, stepMeta{s})
	reports := 0
	for _, a := range m.Step(now, stepMeta{connector.StepMeta{
		Registrations: []connector.Registration{{ID: "more", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Peer: addrOf("Q")}},
		Finished:      []connector.FinishedBlocks{{ID: "more", Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Lease: time.Minute}}}}) {
		switch a := a.(type) {
		case reportReceived:
			if a.Err != nil && a.Err.Phase == connector.PhaseLimit && a.ID == "more" {
				reports++
			}
		case reportSent:
			if a.Err != nil && a.Err.Phase == connector.PhaseLimit && a.ID == "more" {
				reports++
			}
		}
	}
	if reports != 2 {
		t.Errorf("%d of 2 reports", reports)
	}
	if s := m.snapshot(); s.Receiving != maxReceives || s.Held != maxHolds {
		t.Errorf("%d receives, %d holds", s.Receiving, s.Held)
	}
}

// A mailbox that is full leaves out what needs no answer, and nothing else.
func TestInboxOverflow(t *testing.T) {
	w := &Worker{wake: make(chan struct{}, 1)}
	w.mail.waiting = maxInbox
	w.Submit(connector.StepMeta{Queued: []connector.QueuedRequest{{ID: "a"}}, Processing: []kv.RequestID{"a"},
		Dropped: []connector.DroppedRequest{{ID: "b"}}, Withdrawn: []connector.Withdrawal{{ID: "d"}}, Cancels: []kv.RequestID{"c"}})
	in := w.collect()
	if _, ok := in[0].(leftOut); !ok || len(in) != 2 {
		t.Fatalf("%+v", in)
	}
	got := in[1].(stepMeta)
	if len(got.Queued)+len(got.Processing)+len(got.Dropped)+len(got.Withdrawn) != 0 || len(got.Cancels) != 1 {
		t.Errorf("%+v", got)
	}
	// What may have ended unseen is not said to run any more.
	m := newMachine(machineConfig())
	m.Step(time.Unix(1000, 0), stepMeta{connector.StepMeta{Queued: []connector.QueuedRequest{{ID: "a"}}}})
	m.Step(time.Unix(1000, 0), in[0])
	if s := m.snapshot(); s.Prefills != 0 {
		t.Errorf("%d prefills", s.Prefills)
	}
}

// A heartbeat with many ids, or with one that a heartbeat cannot carry, is split or cleaned.
func TestHeartbeatMessages(t *testing.T) {
	if msg := heartbeat([]kv.RequestID{"a", "with,comma", "", "b"}); string(msg) != "HB:a,b" {
		t.Errorf("%q", msg)
	}
	if msg := heartbeat([]kv.RequestID{","}); msg != nil {
		t.Errorf("%q", msg)
	}
	m := newMachine(machineConfig())
	s := &scenario{m: m}
	var ids []kv.RequestID
	for i := range 2*maxHeartbeatIDs + 1 {
		ids = append(ids, kv.RequestID(fmt.Sprint(i)))
	}
	now := time.Unix(1000, 0)
	m.Step(now, stepMeta{connector.StepMeta{HasHeartbeats: true, Heartbeats: []connector.HeartbeatGroup{{Peer: addrOf("Q"), IDs: ids}}}})
	sent := 0
	for _, a := range m.Step(now, connected{addrOf("Q"), s.peerOf("Q")}) {
		if _, ok := a.(notify); ok {
			sent++
		}
	}
	if sent != 3 {
		t.Errorf("%d messages for %d ids", sent, len(ids))
	}
}
