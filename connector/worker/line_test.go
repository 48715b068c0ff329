package worker

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// lineRig is a P or a D with engines Q and R, whose agent has room as room says.
type lineRig struct {
	*rig
	t     *testing.T
	room  func(engine kv.EngineID) bool
	posts map[kv.EngineID]int
	next  agent.TransferID
	gen   int
}

func newLineRig(t *testing.T, mode kv.TransferMode) *lineRig {
	cfg := machineConfig()
	cfg.Mode = mode
	r := &lineRig{t: t, posts: map[kv.EngineID]int{}}
	r.rig = newRig(cfg, func(a action) input {
		switch a := a.(type) {
		case connect:
			return connected{a.addr, (&scenario{}).peerOf(string(a.addr.Engine))}
		case post:
			id, err := r.post(a.remote.engine)
			return posted{a.push, id, err}
		case read:
			id, err := r.post(a.remote.engine)
			return readPosted{a.fetch, id, err}
		}
		return nil
	})
	return r
}

func (r *lineRig) post(engine kv.EngineID) (agent.TransferID, error) {
	r.posts[engine]++
	if !r.room(engine) {
		return 0, agent.ErrBusy
	}
	r.next++
	return r.next, nil
}

// write makes a hold and a registration of it.
func (r *lineRig) write(engine string) {
	r.gen++
	id := kv.RequestID(fmt.Sprintf("w%d-0", r.gen))
	msg, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: id, DecodeEngineID: kv.EngineID(engine), DecodeHost: addrOf(engine).Host,
		DecodePort: 5600, DecodeTPSize: 1, LocalBlockIDs: kv.BlockIDs{{1}},
		Extension: &wire.PushRegExtension{NumTokens: 4, Generation: kv.Generation(r.gen), Token: tokenOf(kv.Generation(r.gen))}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.step(from(agentOf(engine), msg))
	r.step(stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: id, Blocks: kv.BlockIDs{{1}}, NumTokens: 4,
		Lease: 30 * time.Second, Generation: kv.Generation(r.gen)}}}})
}

// read makes a READ with P's permission.
func (r *lineRig) read(engine string) {
	r.gen++
	r.step(stepMeta{connector.StepMeta{Reads: []connector.Read{{
		Registration: connector.Registration{ID: kv.RequestID(fmt.Sprintf("r%d-0", r.gen)), Blocks: kv.BlockIDs{{1}}, NumTokens: 4, Peer: addrOf(engine)},
		Remote:       "p-0", RemoteBlocks: kv.BlockIDs{{1}}, Readers: 1}}}})
	r.step(from(agentOf(engine), controlOf(r.t, &wire.Claimed{Seq: 1, RegistrationRef: r.m.ourRef("p-0", r.m.fetcher.number), Grant: [16]byte{7}})))
}

// A WRITE whose lease ends in the very Step in which the agent has no room for it leaves the others
// behind it in line: they are written when there is room.
func TestBusyAtLeaseEnd(t *testing.T) {
	r := newLineRig(t, kv.Push)
	free := false
	r.room = func(kv.EngineID) bool { return free }
	r.write("Q")
	r.now = r.now.Add(time.Second)
	r.write("Q")
	r.now = time.Unix(1000, 0).Add(30*time.Second + time.Millisecond) // stood still: the first's lease is over
	r.step(tick{})
	free = true
	r.write("Q")
	r.pass(100 * time.Millisecond)
	if n := r.m.producer.busy.Len(); n != 0 || len(r.m.producer.transfers) < 2 {
		t.Errorf("%d wait, %d are written", n, len(r.m.producer.transfers))
	}
}

// A peer that never has room makes nobody else wait.
func TestBusyPeerBlocksNobody(t *testing.T) {
	for mode, start := range map[kv.TransferMode]func(*lineRig, string){kv.Push: (*lineRig).write, kv.Pull: (*lineRig).read} {
		t.Run(fmt.Sprint(mode), func(t *testing.T) {
			r := newLineRig(t, mode)
			r.room = func(e kv.EngineID) bool { return e != "Q" }
			for range 3 {
				start(r, "Q")
			}
			start(r, "R")
			if r.posts["R"] != 1 {
				t.Fatal("a transfer to R waits for Q")
			}
			r.room = func(kv.EngineID) bool { return false }
			start(r, "R")
			start(r, "R") // behind
			r.room = func(e kv.EngineID) bool { return e != "Q" }
			r.pass(2 * busyRetry)
			if got := int(r.next); got != 3 {
				t.Errorf("%d of 3 transfers to R have begun", got)
			}
			// One of Q's is tried at a time, not all.
			before := r.posts["Q"]
			r.pass(busyRetry)
			if n := r.posts["Q"] - before; n > 1 {
				t.Errorf("%d tries to Q in one interval", n)
			}
			if n := r.m.producer.busy.Len() + r.m.fetcher.busy.Len(); n != 3 {
				t.Errorf("%d wait", n)
			}
			r.room = func(kv.EngineID) bool { return true }
			r.pass(busyRetry)
			if got := int(r.next); got != 6 || r.m.producer.busy.Len()+r.m.fetcher.busy.Len() != 0 {
				t.Errorf("%d of 6 transfers have begun", got)
			}
		})
	}
}
