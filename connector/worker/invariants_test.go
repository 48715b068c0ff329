package worker

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

// world is everything around one machine, as hostile and as late as it likes: peers, the agent, the
// ledger. It remembers what the machine did and complains when a rule is broken.
type world struct {
	t   *rapid.T
	m   *machine
	now time.Time

	flights map[connector.PeerAddr]bool
	by      map[connector.PeerAddr]agent.Name // whom each is for
	pins    map[*remote]int
	grants  map[agent.GrantID]kv.RequestID // live, by receive
	granted map[uint64]agent.GrantID

	receives map[kv.RequestID]bool // registered, no report yet
	wire     map[kv.RequestID]string
	holds    map[kv.RequestID]bool // finished, no report yet
	leases   map[kv.RequestID]kv.Generation
	lease    kv.Generation // the last one given

	nextTransfer agent.TransferID
	reading      map[agent.TransferID]kv.RequestID // posted, not stopped: whose blocks
	resulted     map[agent.TransferID]bool
	served       map[string]bool // registrations of which a WRITE was posted

	alive map[string]int // registrations received, neither dropped nor written, by engine and id

	seqs     map[agent.Name]uint64                  // the last number of a control message that we were sent
	cancels  map[agent.Name]map[uint64]kv.RequestID // that we have sent: of which receive, "" of none
	writable map[kv.RequestID]agent.Name            // receives that an agent may still write
	shut     bool
	asked    map[agent.Name]map[uint64]string // cancels that we were sent, by whom: of which registration
	promised map[string]bool                  // registrations of which we have said that they are not written any more
	writes   map[agent.TransferID]string      // posted and not stopped: of which registration

	gens   map[agent.Name]uint64
	last   input // the last registration
	serial int
}

func TestMachineInvariants(t *testing.T) {
	for i := range 10 { // a thousand runs
		t.Run(fmt.Sprint(i), func(t *testing.T) { rapid.Check(t, machineInvariants) })
	}
}

func machineInvariants(t *rapid.T) {
	w := &world{t: t, m: newMachine(machineConfig()), now: time.Unix(1000, 0),
		flights: map[connector.PeerAddr]bool{}, pins: map[*remote]int{}, grants: map[agent.GrantID]kv.RequestID{}, granted: map[uint64]agent.GrantID{},
		receives: map[kv.RequestID]bool{}, wire: map[kv.RequestID]string{}, holds: map[kv.RequestID]bool{}, leases: map[kv.RequestID]kv.Generation{}, reading: map[agent.TransferID]kv.RequestID{},
		resulted: map[agent.TransferID]bool{}, served: map[string]bool{}, gens: map[agent.Name]uint64{}, alive: map[string]int{},
		seqs: map[agent.Name]uint64{}, cancels: map[agent.Name]map[uint64]kv.RequestID{}, writable: map[kv.RequestID]agent.Name{},
		asked: map[agent.Name]map[uint64]string{}, promised: map[string]bool{}, writes: map[agent.TransferID]string{}}
	w.m.irrevocable = rapid.IntRange(0, 2).Draw(t, "irrevocable") == 0
	t.Repeat(map[string]func(*rapid.T){
		"register":   w.register,
		"finish":     w.finish,
		"drop":       w.drop,
		"cancel":     w.cancel,
		"beats":      w.beats,
		"connect":    w.connect,
		"notify":     w.notify,
		"complete":   w.complete,
		"result":     w.result,
		"stop":       w.stop,
		"lose":       w.lose,
		"stranger":   w.strangerLost,
		"heartbeat":  w.heartbeat,
		"time":       w.time,
		"":           func(*rapid.T) { w.check() },
		"regAgain":   w.notify,
		"replay":     w.replay,
		"finishMore": w.finish,
		"release":    w.release,
		"queue":      w.queue,
		"withdraw":   w.withdraw,
		"state":      w.state,
		"stateMore":  w.state,
		"ack":        w.ack,
		"failed":     w.failed,
		"beat":       w.beat,
		"cancelled":  w.cancelled,
	})
	w.drain()
}

// step feeds the machine as the driver does: what an action answers comes before anything else.
func (w *world) step(in input) {
	queue := []input{in}
	for len(queue) > 0 {
		next := queue[0]
		queue = queue[1:]
		for _, a := range slices.Clone(w.m.Step(w.now, next)) {
			if answer := w.carryOut(a); answer != nil {
				queue = append(queue, answer)
			}
		}
	}
}

func (w *world) carryOut(a action) input {
	switch a := a.(type) {
	case connect:
		if w.flights[a.addr] && (w.by[a.addr] == "" || a.by != "") { // once more only for our own work
			w.t.Fatalf("two connects to %v at once", a.addr)
		}
		if w.by == nil {
			w.by = map[connector.PeerAddr]agent.Name{}
		}
		w.flights[a.addr], w.by[a.addr] = true, a.by
	case pin:
		w.pins[a.remote]++
	case unpin:
		if w.pins[a.remote]--; w.pins[a.remote] < 0 {
			w.t.Fatal("unpinned more often than pinned")
		}
	case grant:
		if rapid.IntRange(0, 9).Draw(w.t, "grant fails") == 0 {
			return granted{receive: a.receive, err: errors.New("full")}
		}
		w.serial++
		g := agent.GrantID{byte(w.serial), byte(w.serial >> 8), 1}
		w.grants[g] = w.m.consumer.receives[a.receive].reg.ID
		return granted{receive: a.receive, grant: g}
	case revoke:
		if _, live := w.grants[a.grant]; !live {
			w.t.Fatal("a grant is revoked twice")
		}
		delete(w.grants, a.grant)
	case register:
		if rapid.IntRange(0, 9).Draw(w.t, "send fails") == 0 {
			return registrationFailed{a.receive, errors.New("gone")}
		}
		n, err := wire.ParseNotification(a.msg)
		if err != nil {
			w.t.Fatal(err)
		}
		w.wire[n.(*wire.PushReg).RequestID] = string(a.peer.Name)
		w.writable[w.m.consumer.receives[a.receive].reg.ID] = a.peer.Name
	case notify:
		n, err := wire.ParseNotification(a.msg)
		if err != nil {
			w.t.Fatal(err)
		}
		if c, ok := n.(*wire.Ack); ok {
			if key := w.asked[a.peer.Name][c.Seq]; key != "" {
				for _, writing := range w.writes {
					if writing == key {
						w.t.Fatalf("the cancel of %s is acknowledged while it is written", key)
					}
				}
				w.promised[key] = true
			}
		}
		if c, ok := n.(*wire.Cancel); ok {
			name := a.peer.Name
			if w.cancels[name] == nil {
				w.cancels[name] = map[uint64]kv.RequestID{}
			}
			w.cancels[name][c.Seq] = ""
			if r := w.m.consumer.byWireID[c.ID]; r != nil && r.gen == c.Generation {
				w.cancels[name][c.Seq] = r.reg.ID
			}
		}
	case post:
		return w.posted(a)
	case reportReceived:
		if !w.receives[a.ID] {
			w.t.Fatalf("receive %s is reported twice or for nothing", a.ID)
		}
		delete(w.receives, a.ID)
		if agent, yes := w.writable[a.ID]; yes && w.m.irrevocable && a.Err != nil && !w.shut {
			w.t.Fatalf("receive %s is reported (%s) while %s may write it", a.ID, a.Err.Reason, agent)
		}
		delete(w.writable, a.ID)
		for g, id := range w.grants {
			if id == a.ID {
				w.t.Fatalf("receive %s is reported while grant %v lives", a.ID, g)
			}
		}
	case reportSent:
		if !w.holds[a.ID] {
			w.t.Fatalf("hold %s is reported twice or for nothing", a.ID)
		}
		delete(w.holds, a.ID)
		for id, of := range w.reading {
			if of == a.ID {
				w.t.Fatalf("hold %s is reported while transfer %d reads it", a.ID, id)
			}
		}
	case emit:
		w.event(a.Event)
	}
	return nil
}

// event follows each registration from its arrival to its one end.
func (w *world) event(e event.Event) {
	switch e := e.(type) {
	case event.RegistrationReceived:
		w.alive[string(e.Peer)+" "+string(e.Request)]++
	case event.RegistrationMatched:
		if !w.holds[e.Request] {
			w.t.Fatalf("blocks of %s are matched, which holds none", e.Request)
		}
	case event.RegistrationDropped:
		key := string(e.Peer) + " " + string(e.Request)
		if e.Reason == "duplicate" {
			return
		}
		if w.alive[key]--; w.alive[key] < 0 {
			w.t.Fatalf("registration %s is dropped (%s) after its end", key, e.Reason)
		}
	}
}

func (w *world) posted(a post) input {
	u := w.m.producer.pushes[a.push]
	if !w.holds[u.hold.id] {
		w.t.Fatalf("a WRITE of %s is posted, whose blocks were given back", u.hold.id)
	}
	if u.reg.identity.hasDigest && u.reg.identity.digest != u.hold.identity.digest {
		w.t.Fatal("a WRITE pairs unlike prompts")
	}
	switch rapid.IntRange(0, 4).Draw(w.t, "post") {
	case 0:
		return posted{push: a.push, err: agent.ErrBusy}
	case 1:
		return posted{push: a.push, err: errors.New("refused")}
	}
	key := fmt.Sprint(u.reg.key, u.reg.generation())
	if w.served[key] {
		w.t.Fatalf("registration %s is written twice", key)
	}
	if w.promised[key] {
		w.t.Fatalf("registration %s is written after its cancel was acknowledged", key)
	}
	w.served[key] = true
	w.writes[w.nextTransfer+1] = key
	w.alive[string(u.reg.key.engine)+" "+string(u.reg.key.id)]--
	w.nextTransfer++
	w.reading[w.nextTransfer] = u.hold.id
	return posted{push: a.push, transfer: w.nextTransfer}
}

var (
	worldEngines = []string{"Q", "R"}
	worldIDs     = []string{"a-0-11111111", "a-0-22222222", "b-0", "b-0-33333333"}
)

func worldTransfer(t *rapid.T) kv.TransferID {
	return kv.TransferID(rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "transfer"))
}

func worldDigest(t *rapid.T) connector.Digest {
	return connector.Digest{byte(rapid.IntRange(0, 3).Draw(t, "prompt") / 3)}
}

func (w *world) register(t *rapid.T) {
	id := kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id"))
	if w.receives[id] {
		t.Skip("under way")
	}
	w.receives[id] = true
	blocks := kv.BlockIDs{{kv.BlockID(rapid.SampledFrom([]int{1, 2, 200}).Draw(t, "block"))}}
	w.step(stepMeta{connector.StepMeta{Registrations: []connector.Registration{{ID: id, TransferID: worldTransfer(t), Blocks: blocks, NumTokens: 4,
		Peer: addrOf(rapid.SampledFrom(worldEngines).Draw(t, "engine"))}}}})
}

func (w *world) finish(t *rapid.T) {
	id := kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id"))
	if w.holds[id] {
		t.Skip("under way")
	}
	w.holds[id] = true
	w.lease++
	w.leases[id] = w.lease
	blocks := kv.BlockIDs{{kv.BlockID(rapid.SampledFrom([]int{1, 2, 3, 4, 200}).Draw(t, "block"))}}
	w.step(stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: id, TransferID: worldTransfer(t), Blocks: blocks, NumTokens: 4,
		Lease: 30 * time.Second, Digest: worldDigest(t), Generation: w.lease}}}})
}

// release: nobody wants a hold any more. Blocks that nothing reads come back at once.
func (w *world) release(t *rapid.T) {
	id := kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id"))
	r := connector.Release{ID: id, Lease: w.leases[id] - kv.Generation(rapid.IntRange(0, 3).Draw(t, "other")/3)}
	held, wanted := w.holds[id], w.leases[id] == r.Lease
	busy := slices.Contains(slices.Collect(maps.Values(w.reading)), id)
	w.step(stepMeta{connector.StepMeta{Released: []connector.Release{r}}})
	if want := held && (busy || !wanted); w.holds[id] != want {
		t.Fatalf("%s was held: %v, read: %v, named right: %v; now it is held: %v", id, held, busy, wanted, w.holds[id])
	}
}

func (w *world) drop(t *rapid.T) {
	id := kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id"))
	if w.holds[id] {
		t.Skip("finished")
	}
	w.step(stepMeta{connector.StepMeta{Dropped: []connector.DroppedRequest{{ID: id, TransferID: worldTransfer(t), Reason: "aborted"}}, Processing: []kv.RequestID{"b-0"}}})
}

func (w *world) cancel(t *rapid.T) {
	w.step(stepMeta{connector.StepMeta{Cancels: []kv.RequestID{kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id"))}}})
}

func (w *world) beats(t *rapid.T) {
	m := connector.StepMeta{HasHeartbeats: true}
	for _, e := range worldEngines {
		if rapid.Bool().Draw(t, e) {
			m.Heartbeats = append(m.Heartbeats, connector.HeartbeatGroup{Peer: addrOf(e), IDs: []kv.RequestID{"a-0-11111111", "x"}})
		}
	}
	w.step(stepMeta{m})
}

func (w *world) connect(t *rapid.T) {
	if len(w.flights) == 0 {
		t.Skip("none")
	}
	addrs := slices.SortedFunc(maps.Keys(w.flights), func(a, b connector.PeerAddr) int { return cmpText(a.Engine, b.Engine) })
	w.answer(rapid.SampledFrom(addrs).Draw(t, "addr"), rapid.IntRange(0, 4).Draw(t, "how"))
}

func cmpText(a, b kv.EngineID) int {
	if a < b {
		return -1
	}
	if a > b {
		return 1
	}
	return 0
}

func (w *world) answer(addr connector.PeerAddr, how int) {
	delete(w.flights, addr)
	if how == 0 {
		w.step(connectFailed{addr, errors.New("no answer")})
		return
	}
	size, name := 4, agent.Name(string(addr.Engine)+".0")
	if how == 1 {
		size = 8
	}
	if how == 2 {
		name = "restarted"
	}
	for _, other := range []agent.Name{agent.Name(string(addr.Engine) + ".0"), "restarted"} {
		if other != name {
			w.gone(other) // another process has its place
			w.last = nil
			w.gens[other] += 2
		}
	}
	meta := &wire.AgentMetadata{EngineID: addr.Engine, KVCachesBaseAddr: []uint64{1 << 20}, NumBlocks: 100, BlockLens: []int{64},
		BlockStrides: []int{64}, KVCacheLayout: "LBHNC", BlockSize: size, PhysicalBlocksPerLogical: 1, DCPSize: 1, PCPSize: 1,
		Extension: &wire.Extension{Version: 1, Instance: "i", Capabilities: Capabilities()}}
	gen := kv.Generation(how)
	w.step(connected{addr, &peer.Connected{Engine: addr.Engine, Gen: gen, Ranks: []peer.RankPeer{{
		Agent: agent.Peer{ID: agent.PeerID{Name: name, Gen: gen}, Transport: "test"}, Meta: meta}}}})
}

func (w *world) notify(t *rapid.T) {
	engine := rapid.SampledFrom(worldEngines).Draw(t, "engine")
	from := agent.Name(engine + ".0")
	p := &wire.PushReg{RequestID: kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id")), DecodeEngineID: kv.EngineID(engine),
		DecodeHost: addrOf(engine).Host, DecodePort: 5600, DecodeTPSize: 1, TransferID: worldTransfer(t),
		LocalBlockIDs: kv.BlockIDs{{kv.BlockID(rapid.SampledFrom([]int{7, 8, 200}).Draw(t, "block"))}}}
	if rapid.IntRange(0, 3).Draw(t, "stock") > 0 {
		if rapid.IntRange(0, 3).Draw(t, "new") > 0 || w.gens[from] == 0 {
			w.gens[from]++
		}
		p.Extension = &wire.PushRegExtension{Grant: [16]byte{1}, NumTokens: rapid.SampledFrom([]int{4, 4, 4, 3}).Draw(t, "tokens"),
			PromptDigest: worldDigest(t), Generation: kv.Generation(w.gens[from]), Token: tokenOf(kv.Generation(w.gens[from]))}
	} else {
		w.serial++
		p.RequestID = kv.RequestID(fmt.Sprintf("%s-%08x", p.RequestID, w.serial)) // stock ids are unique
	}
	msg, err := wire.AppendPushReg(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	w.last = notification{agent.Notification{From: agent.PeerID{Name: from, Gen: 1}, Msg: msg}}
	w.step(w.last)
}

// replay sends the last registration a second time.
func (w *world) replay(t *rapid.T) {
	if w.last == nil {
		t.Skip("none")
	}
	w.step(w.last)
}

func (w *world) complete(t *rapid.T) {
	if len(w.wire) == 0 {
		t.Skip("none")
	}
	id := rapid.SampledFrom(slices.Sorted(maps.Keys(w.wire))).Draw(t, "id")
	from := agent.Name(w.wire[id])
	if rapid.IntRange(0, 9).Draw(t, "stranger") == 0 {
		from = "stranger"
	}
	var msg []byte
	var err error
	switch r := w.m.consumer.byWireID[id]; {
	case r == nil || from != r.remote.name():
	default: // either says that the agent does not write it any more
		delete(w.writable, r.reg.ID)
	}
	if rapid.IntRange(0, 3).Draw(t, "fail") == 0 {
		msg, err = wire.AppendPushFail(nil, wire.PushFail{ID: id, TP: 1})
	} else {
		msg, err = wire.AppendCompletion(nil, wire.Completion{ID: id, N: rapid.SampledFrom([]int{1, 1, 1, 2}).Draw(t, "n")})
	}
	if err != nil {
		t.Fatal(err)
	}
	w.step(notification{agent.Notification{From: agent.PeerID{Name: from, Gen: 1}, Msg: msg}})
}

func (w *world) queue(t *rapid.T) {
	id := kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id"))
	if w.holds[id] {
		t.Skip("finished")
	}
	m := connector.StepMeta{Queued: []connector.QueuedRequest{{ID: id, TransferID: worldTransfer(t), Digest: worldDigest(t)}}}
	if rapid.Bool().Draw(t, "runs") {
		m.Processing = []kv.RequestID{id}
	}
	w.step(stepMeta{m})
}

func (w *world) withdraw(t *rapid.T) {
	w.step(stepMeta{connector.StepMeta{Withdrawn: []connector.Withdrawal{{ID: kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id")),
		TransferID: worldTransfer(t), Remote: "R", Digest: worldDigest(t), Peer: addrOf(rapid.SampledFrom(worldEngines).Draw(t, "engine"))}}}})
}

// say delivers a control message of a peer, sometimes of the wrong one, sometimes twice.
func (w *world) say(t *rapid.T, from agent.Name, n wire.Notification) {
	msg, err := wire.AppendControl(nil, n)
	if err != nil {
		t.Fatal(err)
	}
	in := notification{agent.Notification{From: agent.PeerID{Name: from, Gen: kv.Generation(rapid.IntRange(1, 4).Draw(t, "connection"))}, Msg: msg}}
	w.step(in)
	if rapid.IntRange(0, 4).Draw(t, "twice") == 0 {
		w.step(in)
	}
}

// someWire is a receive that was registered, and with whom.
func (w *world) someWire(t *rapid.T) (kv.RequestID, kv.Generation, agent.Name) {
	if len(w.wire) == 0 {
		t.Skip("none")
	}
	id := rapid.SampledFrom(slices.Sorted(maps.Keys(w.wire))).Draw(t, "id")
	gen := kv.Generation(rapid.IntRange(1, 3).Draw(t, "generation"))
	if r := w.m.consumer.byWireID[id]; r != nil && rapid.IntRange(0, 4).Draw(t, "right") > 0 {
		gen = max(r.gen, 1)
	}
	from := agent.Name(w.wire[id])
	if rapid.IntRange(0, 9).Draw(t, "stranger") == 0 {
		from = "stranger"
	}
	return id, gen, from
}

func (w *world) state(t *rapid.T) {
	id, gen, from := w.someWire(t)
	state := rapid.SampledFrom([]wire.RequestState{wire.StateUnknown, wire.StateUnmatched, wire.StateQueued, wire.StateRunning, wire.StateFinished,
		wire.StateWriting, wire.StateSent}).Draw(t, "state")
	w.say(t, from, &wire.States{Seq: uint64(rapid.IntRange(0, 9).Draw(t, "seq")), Answers: []wire.StateAnswer{{RegistrationRef: w.m.ourRef(id, gen), State: state}}})
}

// ack confirms a cancel: its receive is not written any more.
func (w *world) ack(t *rapid.T) {
	if len(w.cancels) == 0 {
		t.Skip("none")
	}
	from := rapid.SampledFrom(slices.Sorted(maps.Keys(w.cancels))).Draw(t, "agent")
	seq := rapid.SampledFrom(slices.Sorted(maps.Keys(w.cancels[from]))).Draw(t, "seq")
	a := w.m.ackOf(from, seq)
	if rapid.IntRange(0, 3).Draw(t, "forged") == 0 { // and means nothing
		a.Receipt[0]++
		w.say(t, from, a)
		return
	}
	if id := w.cancels[from][seq]; id != "" {
		if r := w.m.consumer.byID[id]; r == nil || r.quarantined != nil {
			delete(w.writable, id)
		}
	}
	w.say(t, from, a)
}

func (w *world) failed(t *rapid.T) {
	id, gen, from := w.someWire(t)
	w.seqs[from]++
	w.say(t, from, &wire.Failed{Seq: w.seqs[from], RegistrationRef: w.m.ourRef(id, gen),
		Phase: rapid.SampledFrom([]string{"prefill", "lease", "nonsense", ""}).Draw(t, "phase"), Reason: "so it is"})
}

// theirs is a registration as a D may name it.
func (w *world) theirs(t *rapid.T) (agent.Name, wire.Sender, kv.RequestID, kv.Generation) {
	engine := rapid.SampledFrom(worldEngines).Draw(t, "engine")
	from := agent.Name(engine + ".0")
	w.seqs[from]++
	us := wire.Sender{Engine: kv.EngineID(engine), Host: addrOf(engine).Host, Port: 5600, TP: 1}
	if s := w.m.producer.senders[from]; s != nil && len(s.active) > 0 && rapid.IntRange(0, 3).Draw(t, "known") > 0 {
		refs := slices.SortedFunc(maps.Keys(s.active), func(a, b wire.RegistrationRef) int { return cmp.Compare(a.Generation, b.Generation) })
		ref := rapid.SampledFrom(refs).Draw(t, "registration")
		return from, us, ref.ID, max(ref.Generation, 1)
	}
	return from, us, kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id")), kv.Generation(max(1, int(w.gens[from])-rapid.IntRange(0, 2).Draw(t, "old")))
}

func (w *world) beat(t *rapid.T) {
	from, us, id, gen := w.theirs(t)
	w.say(t, from, &wire.Beat{Seq: w.seqs[from], From: us, Names: []kv.RequestID{id, "x"}, Registrations: []wire.RegistrationRef{testRef(id, gen)}})
}

func (w *world) cancelled(t *rapid.T) {
	from, us, id, gen := w.theirs(t)
	c := &wire.Cancel{Seq: w.seqs[from], Receipt: tokenOf(kv.Generation(w.seqs[from])), From: us, RegistrationRef: testRef(id, gen), TransferID: worldTransfer(t), Digest: worldDigest(t), RemoteID: "a-0-11111111"}
	if rapid.IntRange(0, 3).Draw(t, "unregistered") == 0 {
		c.Generation = 0
	}
	if w.asked[from] == nil {
		w.asked[from] = map[uint64]string{}
	}
	if c.Generation != 0 {
		w.asked[from][c.Seq] = fmt.Sprint(regKey{from, us.Engine, id}, gen)
	}
	w.say(t, from, c)
}

func (w *world) heartbeat(t *rapid.T) {
	msg, err := wire.AppendHeartbeat(nil, []kv.RequestID{kv.RequestID(rapid.SampledFrom(worldIDs).Draw(t, "id")), "x", "nobody"})
	if err != nil {
		t.Fatal(err)
	}
	w.step(notification{agent.Notification{From: agent.PeerID{Name: "Q.0", Gen: 1}, Msg: msg}})
}

func (w *world) transfer(t *rapid.T) agent.TransferID {
	if len(w.reading) == 0 {
		t.Skip("none")
	}
	return rapid.SampledFrom(slices.Sorted(maps.Keys(w.reading))).Draw(t, "transfer")
}

func (w *world) result(t *rapid.T) {
	id := w.transfer(t)
	if w.resulted[id] {
		t.Skip("given")
	}
	w.resulted[id] = true
	w.step(transferResult{agent.Result{Transfer: id, Outcome: agent.Outcome(rapid.SampledFrom([]int{0, 0, 1, 2, 3}).Draw(t, "outcome"))}})
}

func (w *world) stop(t *rapid.T) {
	id := w.transfer(t)
	if !w.resulted[id] {
		t.Skip("no result yet")
	}
	delete(w.reading, id)
	delete(w.writes, id)
	w.step(transferStopped{agent.Stopped{Transfer: id}})
}

func (w *world) lose(t *rapid.T) {
	name := agent.Name(rapid.SampledFrom(worldEngines).Draw(t, "engine") + ".0")
	w.last = nil      // what a lost agent has sent does not come again
	w.gens[name] += 2 // nor are its generations used again
	w.gone(name)
	w.step(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: name, Gen: kv.Generation(rapid.IntRange(1, 4).Draw(t, "gen"))},
		Inbound: true, Err: errors.New("reset")}})
	if rapid.Bool().Draw(t, "both ways") {
		w.step(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: name, Gen: kv.Generation(rapid.IntRange(1, 4).Draw(t, "gen"))}, Err: errors.New("reset")}})
	}
}

// strangerLost: somebody who had said an agent's name, and nothing else, has gone.
func (w *world) strangerLost(t *rapid.T) {
	name := agent.Name(rapid.SampledFrom(worldEngines).Draw(t, "engine") + ".0")
	if acts := w.m.Step(w.now, peerLost{agent.PeerLost{Peer: agent.PeerID{Name: name, Gen: 50}, Inbound: true, Err: errors.New("reset")}}); len(acts) != 0 {
		t.Fatalf("a stranger has gone, and the machine does %v", acts)
	}
}

// gone: an agent cannot write any more.
func (w *world) gone(name agent.Name) {
	for id, by := range w.writable {
		if by == name {
			delete(w.writable, id)
		}
	}
}

func (w *world) time(t *rapid.T) {
	w.pass(time.Duration(rapid.SampledFrom([]int{0, 1, 5, 20, 30, 480}).Draw(t, "seconds")) * time.Second)
}

// pass lets time pass from deadline to deadline, as the one timer would.
func (w *world) pass(d time.Duration) {
	end := w.now.Add(d)
	for range 1 << 16 {
		at, ok := w.m.Deadline()
		if !ok || at.After(end) {
			w.now = end
			return
		}
		if at.Before(w.now) {
			w.t.Fatalf("the deadline %v is before now, %v", at, w.now)
		}
		w.now = at
		w.step(tick{})
	}
	w.t.Fatal("the machine wants to be called again and again")
}

func (w *world) check() {
	m := w.m
	if len(m.consumer.receives) != len(w.receives) || len(m.consumer.byID) != len(w.receives) || len(m.consumer.byWireID) > len(w.receives) {
		w.t.Fatalf("%d receives, want %d", len(m.consumer.receives), len(w.receives))
	}
	if len(m.producer.holds) != len(w.holds) || len(m.producer.transfers) != len(w.reading) {
		w.t.Fatalf("%d holds and %d transfers, want %d and %d", len(m.producer.holds), len(m.producer.transfers), len(w.holds), len(w.reading))
	}
	for _, h := range m.producer.holds {
		if (h.push == nil) == (len(h.match) == 0) {
			w.t.Fatalf("hold %s has a push: %v, and is filed: %v", h.id, h.push != nil, len(h.match) > 0)
		}
	}
	checkLine(w.t, &m.producer.busy)
	pinned := 0
	for _, n := range w.pins {
		pinned += n
	}
	if busy := len(m.consumer.receives) + len(m.producer.pushes); pinned > busy {
		w.t.Fatalf("%d pins for %d things under way", pinned, busy)
	}
}

// checkLine: whatever waits for room will be tried again, by the end of a transfer to its peer or by the
// timer.
func checkLine(t *rapid.T, l *line) {
	n := 0
	for name, q := range l.queues {
		n += q.list.Len()
		if _, armed := l.timer.At(); !armed && l.flying[name] == 0 {
			t.Fatalf("%d transfers to %s wait for room, and nothing will tell of it", q.list.Len(), name)
		}
		if q.list.Len() == 0 || l.turns.Len() != len(l.queues) {
			t.Fatal("an empty queue, or one without a turn")
		}
	}
	if n != l.Len() || l.trying != 0 {
		t.Fatalf("%d of %d wait, %d is with the agent", n, l.Len(), l.trying)
	}
}

// drain ends everything that waits: afterwards nothing is left.
func (w *world) drain() {
	if rapid.Bool().Draw(w.t, "shutdown") {
		w.shut = true
		w.step(shutdown{})
		if len(w.receives)+len(w.grants) > 0 || len(w.holds) > len(w.reading) {
			w.t.Fatalf("after a shutdown: receives %v, grants %v, holds %v, transfers %v", w.receives, w.grants, w.holds, w.reading)
		}
	}
	w.step(stepMeta{connector.StepMeta{HasHeartbeats: true}})
	w.silence()
	for range 8 {
		for addr := range maps.Clone(w.flights) {
			w.answer(addr, 0)
		}
		for _, id := range slices.Sorted(maps.Keys(w.reading)) {
			if !w.resulted[id] {
				w.resulted[id] = true
				w.step(transferResult{agent.Result{Transfer: id, Outcome: agent.OutcomeClosed}})
			}
			delete(w.reading, id)
			delete(w.writes, id)
			w.step(transferStopped{agent.Stopped{Transfer: id}})
		}
		w.pass(20 * time.Minute)
	}
	if len(w.receives)+len(w.holds)+len(w.grants)+len(w.flights)+len(w.reading) > 0 {
		w.t.Fatalf("left: receives %v, holds %v, grants %v, connects %v, transfers %v", w.receives, w.holds, w.grants, w.flights, w.reading)
	}
	for r, n := range w.pins {
		if n != 0 {
			w.t.Fatalf("%d pins of %s are left", n, r.engine)
		}
	}
	m := w.m
	p := &m.producer
	for what, n := range map[string]int{"flights": len(m.flights), "byWireID": len(m.consumer.byWireID), "blocks": len(p.blocks.buckets),
		"leases": len(p.leases.buckets), "registrations": len(p.registrations), "waiting": len(p.waiting.buckets), "order": p.order.Len(),
		"ids": p.ids, "pushes": len(p.pushes), "transfers": len(p.transfers), "busy": p.busy.Len(), "notes": len(p.notes.buckets),
		"note order": p.noteOrder.Len(), "notices": m.notices.count(), "timers": m.timers.Len(), "prefills": len(p.prefills),
		"expected": len(p.expected.buckets), "withdrawn": len(p.withdrawn) + p.withdrawnOrder.Len(), "letters": m.snapshot().Letters,
		"pulses": len(m.consumer.pulses), "beats": len(m.beats.byAddr), "quarantined": m.consumer.quarantined + m.consumer.quarantinedBlocks,
		"active": w.active()} {
		if n != 0 {
			w.t.Fatalf("%d %s are left", n, what)
		}
	}
}

func (w *world) active() (n int) {
	for _, s := range w.m.producer.senders {
		n += len(s.active)
	}
	return n
}

// silence: nobody says anything any more. What waits for a peer that answers beats ends within the
// bound; what its agent may still write stays until it is gone.
func (w *world) silence() {
	for addr := range maps.Clone(w.flights) {
		w.answer(addr, 0)
	}
	w.pass(w.m.silenceBound() + w.m.interval())
	for _, r := range w.m.consumer.receives {
		if r.gen != 0 && r.remote.control && r.quarantined == nil {
			w.t.Fatalf("receive %s waits in silence", r.reg.ID)
		}
	}
	for id, by := range w.writable {
		if w.receives[id] && w.m.irrevocable && !w.shut && rapid.Bool().Draw(w.t, "acknowledged") {
			for seq, of := range w.cancels[by] {
				if of == id {
					delete(w.writable, id)
					msg, _ := wire.AppendControl(nil, w.m.ackOf(by, seq))
					w.step(notification{agent.Notification{From: agent.PeerID{Name: by, Gen: 1}, Msg: msg}})
				}
			}
		}
	}
	for _, name := range []agent.Name{"Q.0", "R.0", "restarted", "stranger"} {
		w.gone(name)
		for gen := range kv.Generation(5) {
			w.step(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: name, Gen: gen}, Inbound: true, Err: errors.New("reset")}})
			w.step(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: name, Gen: gen}, Err: errors.New("reset")}})
		}
	}
	for _, id := range slices.Sorted(maps.Keys(w.m.producer.prefills)) {
		w.step(stepMeta{connector.StepMeta{Dropped: []connector.DroppedRequest{{ID: id, Reason: "aborted"}}}})
	}
}
