package worker

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// tokenOf is the token that the D's of these tests give their registration or claim of a generation.
func tokenOf(gen kv.Generation) (t wire.Token) {
	binary.BigEndian.PutUint64(t[:], uint64(gen))
	return t
}

// testRef names what a D of these tests has made.
func testRef(id kv.RequestID, gen kv.Generation) wire.RegistrationRef {
	return refOf(id, gen, tokenOf(gen))
}

// ourRef names what the machine has made, as its peer does; a guess if there is no such thing.
func (m *machine) ourRef(id kv.RequestID, gen kv.Generation) wire.RegistrationRef {
	if r := m.consumer.byWireID[id]; r != nil && r.gen == gen {
		return refOf(id, gen, r.token)
	}
	if f := m.fetcher.byNumber[gen]; f != nil && f.want.Remote == id {
		return refOf(id, gen, f.token)
	}
	return testRef(id, gen)
}

// ackOf is a peer's acknowledgement of a letter; a guess if there is no such letter.
func (m *machine) ackOf(from agent.Name, seq uint64) *wire.Ack {
	a := &wire.Ack{Seq: seq}
	if x := m.letters.byName[from]; x != nil && x.letters[seq] != nil {
		a.Receipt = x.letters[seq].receipt
	}
	return a
}

// A machine's tokens depend on its secret and on nothing else, and none comes twice.
func TestTokens(t *testing.T) {
	a, again, b := tokens{secret: secret{1}}, tokens{secret: secret{1}}, tokens{secret: secret{2}}
	seen := map[wire.Token]bool{}
	for range 100 {
		x := a.next()
		if x != again.next() {
			t.Fatal("one secret, two sequences")
		}
		for _, x := range []wire.Token{x, b.next()} {
			if seen[x] || x == (wire.Token{}) {
				t.Fatalf("%x comes twice", x)
			}
			seen[x] = true
		}
	}
	if x, y := drawSecret(), drawSecret(); x == y || x == (secret{}) {
		t.Error("a driver's secret is no secret")
	}
}

// A stranger who knows D's agent name and guesses the number of its cancel does not end a quarantine, which would
// let P write into blocks of somebody else; P's own acknowledgement does.
func TestForgedAcknowledgement(t *testing.T) {
	var got []*connector.Error
	r := receiving(t, 0, &got)
	r.m.irrevocable = true
	r.step(stepMeta{connector.StepMeta{Cancels: []kv.RequestID{"d-11111111"}}})
	if n := r.m.consumer.quarantined; n != 1 || len(got) != 0 {
		t.Fatalf("%d in quarantine, %d reported", n, len(got))
	}
	for seq := range uint64(5) {
		for guess := range 200 {
			r.step(by(guess+1, from("q.0", controlOf(t, &wire.Ack{Seq: seq + 1, Receipt: tokenOf(kv.Generation(guess))}))))
		}
	}
	r.step(from("q.0", []byte("PUSH_FAIL:d-11111111:1")))
	if n := r.m.consumer.quarantined; n != 1 || len(got) != 0 || r.m.stats.Forged != 200 || r.m.stats.Ignored != 201 {
		t.Fatalf("%d in quarantine, %d reported; %+v", n, len(got), r.m.stats)
	}
	r.step(from("q.0", controlOf(t, r.m.ackOf("q.0", 1))))
	if n := r.m.consumer.quarantined; n != 0 || len(got) != 1 {
		t.Errorf("P has acknowledged: %d in quarantine, %d reported", n, len(got))
	}
}

// The numbers of a stranger's registrations and cancels under D's name spoil none of D's own.
func TestForgedNumbers(t *testing.T) {
	r := newRig(machineConfig(), func(a action) input {
		if a, ok := a.(connect); ok {
			return connected{a.addr, (&scenario{}).peerOf(string(a.addr.Engine))}
		}
		return nil
	})
	const late = 1 << 40
	r.step(by(78, from("d", registrationOf(t, "strange-0", late, 1))))
	r.step(by(78, from("d", controlOf(t, &wire.Cancel{Seq: late, Receipt: tokenOf(late), From: wire.Sender{Engine: "D", Host: "d", Port: 5600, TP: 1},
		RegistrationRef: testRef("strange-0", late)}))))
	r.step(from("d", registrationOf(t, "a-0", 1, 1)))
	r.step(from("d", registrationOf(t, "b-0", 2, 1)))
	if n := r.m.producer.order.Len(); n != 2 {
		t.Fatalf("%d of D's registrations wait", n)
	}
	cancel := func(gen kv.Generation, id kv.RequestID) {
		r.step(from("d", controlOf(t, &wire.Cancel{Seq: uint64(gen), Receipt: tokenOf(100 + gen), From: wire.Sender{Engine: "D", Host: "d", Port: 5600, TP: 1},
			RegistrationRef: testRef(id, gen)})))
	}
	cancel(1, "a-0")
	if n := r.m.producer.order.Len(); n != 1 {
		t.Errorf("D has cancelled one of two: %d wait", n)
	}
	cancel(3, "c-0") // comes before what it cancels, by another connection
	r.step(by(2, from("d", registrationOf(t, "c-0", 3, 1))))
	if n := r.m.producer.order.Len(); n != 1 {
		t.Errorf("a registration that was cancelled is taken: %d wait", n)
	}
	for gen := range 3 * maxConnections {
		r.step(by(100+gen, from("d", registrationOf(t, fmt.Sprint("x-", gen), late+1, 1))))
	}
	s := r.m.producer.senders["d"]
	if len(s.replays) > maxConnections || s.replays[agent.PeerID{Name: "d", Gen: 1}] == nil {
		t.Errorf("%d connections are told apart; D's own is among them: %v", len(s.replays), s.replays[agent.PeerID{Name: "d", Gen: 1}] != nil)
	}
}

// The end of a READ counts also when the connection of its claim is lost first; with another token it does not.
func TestReadEndsAfterItsConnection(t *testing.T) {
	cfg := machineConfig()
	cfg.Mode = kv.Pull
	var ends []connector.SentReport
	r := newRig(cfg, func(a action) input {
		switch a := a.(type) {
		case lend:
			return lent{a.claim, agent.GrantID{1}, nil}
		case reportSent:
			ends = append(ends, a.SentReport)
		}
		return nil
	})
	blocks := kv.BlockIDs{{1}}
	r.step(stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: "p-0", Blocks: blocks, NumTokens: 4, Lease: 30 * time.Second, Generation: 1}}}})
	r.step(from("q.0", controlOf(t, &wire.Claim{Seq: 1, From: wire.Sender{Engine: "Q", Host: "q", Port: 5600, TP: 1}, RegistrationRef: testRef("p-0", 1), Lease: 1,
		Tokens: 4, Readers: 1, Blocks: wire.BlocksDigest(blocks)})))
	r.lose("q.0", 1, true)
	forged := testRef("p-0", 1)
	forged.Token[0]++
	r.step(by(2, from("q.0", controlOf(t, &wire.ReadDone{RegistrationRef: forged}))))
	if len(ends) != 0 {
		t.Fatalf("a stranger ended it: %+v", ends)
	}
	r.step(by(2, from("q.0", controlOf(t, &wire.ReadDone{RegistrationRef: testRef("p-0", 1)}))))
	if len(ends) != 1 || ends[0].Err != nil {
		t.Errorf("%+v", ends)
	}
}
