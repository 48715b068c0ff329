package session

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// A peer that sends any messages in any order, under any identity: nothing panics, no pin is lost or
// given back twice, no job ends twice, and every action is one that a driver can carry out.
func TestHostilePeer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h, err := New(Config{Local: testConnect("me:1"), Revocable: rapid.Bool().Draw(t, "revocable"), MaxPeers: 2, PeerPins: 4})
		if err != nil {
			t.Fatal(err)
		}
		w := &hostile{t: t, h: h, now: time.Unix(1000, 0), pins: map[core.PinID]bool{}, jobs: map[core.JobID]bool{}}
		t.Repeat(map[string]func(*rapid.T){
			"message": w.message, "another": w.message, "a third": w.message,
			"transfer": w.transfer, "time": w.time, "request": w.request, "link": w.link,
		})
		w.step(Shutdown{})
		for len(w.posted) > 0 {
			w.end(0, false)
		}
		if len(w.pins) > 0 || len(w.jobs) > 0 {
			t.Fatalf("left: pins %v, jobs %v", w.pins, w.jobs)
		}
	})
}

type hostile struct {
	t      *rapid.T
	h      *Hub
	now    time.Time
	pins   map[core.PinID]bool
	jobs   map[core.JobID]bool // loads and stores that have not ended
	posted []uint64
	next   uint64
	todo   []Event
}

func (w *hostile) id() uint64 {
	w.next++
	return w.next
}

func (w *hostile) step(ev Event) {
	w.todo = append(w.todo, ev)
	for len(w.todo) > 0 {
		ev := w.todo[0]
		w.todo = w.todo[1:]
		for _, a := range w.h.Step(w.now, ev) {
			w.act(a)
		}
	}
}

func (w *hostile) act(a Action) {
	switch a := a.(type) {
	case Admit:
		w.todo = append(w.todo, Admitted{Peer: a.Peer, Gen: a.Gen, Agent: agent.PeerID{Name: agent.Name(a.Peer), Gen: a.Gen}})
	case Send:
		if _, err := wire.DecodeP2P(wire.AppendP2P(nil, a.Msg)); err != nil {
			w.t.Fatalf("sent what nobody can read: %v", err)
		}
	case Serve:
		ev := Served{Lookup: a.Lookup}
		for range a.Keys {
			s := core.Served{Verdict: rapid.SampledFrom([]core.Verdict{core.Miss, core.Pending, core.Hit}).Draw(w.t, "verdict")}
			if s.Verdict == core.Hit {
				s.Pin = core.PinID(w.id())
				w.pins[s.Pin] = true
			}
			ev.Answers = append(ev.Answers, s)
		}
		w.todo = append(w.todo, ev)
	case Unpin:
		for _, p := range a.Pins {
			if !w.pins[p] {
				w.t.Fatalf("pin %d is given back twice", p)
			}
			delete(w.pins, p)
		}
	case Post:
		for _, i := range a.Remote {
			if i >= 16 {
				w.t.Fatalf("writes to block %d of 16", i)
			}
		}
		w.posted = append(w.posted, a.Transfer)
	case Grant:
		w.todo = append(w.todo, Granted{Job: a.Job, ID: agent.GrantID{1}})
	case LoadEnded:
		w.ended(a.Job)
	case StoreEnded:
		w.ended(a.Job)
	}
}

func (w *hostile) ended(j core.JobID) {
	if !w.jobs[j] {
		w.t.Fatalf("job %d ends twice", j)
	}
	delete(w.jobs, j)
}

func (w *hostile) peer(t *rapid.T) string {
	return rapid.SampledFrom([]string{"p:1", "p:2", "p:3", "me:1", "bad"}).Draw(t, "peer")
}

func (w *hostile) message(t *rapid.T) {
	peer := w.peer(t)
	id := rapid.SampledFrom([]string{"x", "y", ""}).Draw(t, "id")
	round := rapid.Uint64Range(0, 2).Draw(t, "round")
	var ks []core.Key
	for _, k := range rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", ""}), 0, 4).Draw(t, "keys") {
		ks = append(ks, core.Key(k))
	}
	var m wire.P2PMessage
	switch rapid.IntRange(0, 9).Draw(t, "type") {
	case 0, 1:
		c := testConnect(peer)
		if rapid.Bool().Draw(t, "stock") {
			c.Extension = nil
		}
		m = &c
	case 2:
		m = wire.P2PConnectAck{}
	case 3:
		m = wire.P2PDisconnect{}
	case 4, 5:
		m = &wire.P2PLookup{ID: id, Keys: ks, Round: round}
	case 6:
		f := &wire.P2PFetch{ID: id, Keys: ks, Round: round}
		for range ks {
			f.Indexes = append(f.Indexes, rapid.Uint64Range(0, 17).Draw(t, "index"))
		}
		m = f
	case 7:
		r := &wire.P2PLookupResp{ID: id, Keys: ks}
		for range ks {
			r.Hits = append(r.Hits, rapid.Bool().Draw(t, "hit"))
		}
		m = r
	case 8:
		m = wire.P2PTransferDone{ID: id, Round: round, Success: rapid.Bool().Draw(t, "ok")}
	case 9:
		if rapid.Bool().Draw(t, "ack") {
			m = wire.P2PAbortAck{ID: id, Round: round}
		} else {
			m = wire.P2PAbortFetch{ID: id, Round: round}
		}
	}
	w.step(Message{Identity: peer, Link: rapid.Uint64Range(1, 2).Draw(t, "link"), Msg: m})
}

func (w *hostile) link(t *rapid.T) {
	if rapid.IntRange(0, 4).Draw(t, "rarely") > 0 {
		return // a Skip after a draw would end the sequence
	}
	w.step(LinkEnded{Identity: w.peer(t), Link: rapid.Uint64Range(1, 2).Draw(t, "link")})
}

func (w *hostile) end(i int, ok bool) {
	no := w.posted[i]
	w.posted = append(w.posted[:i], w.posted[i+1:]...)
	w.step(TransferEnded{Transfer: no, OK: ok})
	w.step(TransferStopped{Transfer: no})
}

func (w *hostile) transfer(t *rapid.T) {
	if len(w.posted) == 0 {
		t.Skip()
	}
	w.end(rapid.IntRange(0, len(w.posted)-1).Draw(t, "which"), rapid.Bool().Draw(t, "ok"))
}

func (w *hostile) time(t *rapid.T) {
	w.now = w.now.Add(rapid.SampledFrom([]time.Duration{time.Second, 7 * time.Second, time.Minute}).Draw(t, "for"))
	w.step(Tick{})
	w.step(Changed{})
}

func (w *hostile) request(t *rapid.T) {
	req := kv.RequestID(fmt.Sprint("r", rapid.IntRange(0, 3).Draw(t, "req")))
	keys := []core.Key{"a", "b"}
	switch rapid.IntRange(0, 4).Draw(t, "what") {
	case 0:
		w.step(Begin{Req: req, Source: PeerID(w.peer(t)), SourceID: "x", Everything: rapid.Bool().Draw(t, "everything")})
	case 1:
		w.step(Begin{Req: req, Decoder: true, DecoderID: "y"})
	case 2:
		w.step(Ask{Req: req, Keys: keys})
	case 3:
		job := core.JobID(w.id())
		w.jobs[job] = true
		if rapid.Bool().Draw(t, "store") {
			w.step(Supply{Req: req, Job: job, Keys: keys, Slots: []core.Slot{0, 1}})
		} else {
			w.step(Fetch{Req: req, Job: job, Keys: keys, Slots: []core.Slot{0, 1}})
		}
	case 4:
		w.step(Finish{Req: req})
	}
}
