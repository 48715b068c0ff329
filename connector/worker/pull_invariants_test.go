package worker

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

// pullWorld is everything around one machine that pulls and is pulled from, as hostile and as late as it
// likes. It remembers what the machine did and complains when a rule is broken.
type pullWorld struct {
	t   *rapid.T
	m   *machine
	now time.Time

	flights map[connector.PeerAddr]bool
	by      map[connector.PeerAddr]agent.Name // whom each is for
	pins    map[*remote]int

	reads     map[kv.RequestID]bool // asked for, no report yet
	transfers map[agent.TransferID]uint64
	fetchOf   map[uint64]kv.RequestID // posted READs that have not stopped
	outcomes  map[agent.TransferID]agent.Outcome
	done      map[kv.RequestID]bool // whose READ ended well
	next      agent.TransferID
	expiry    map[kv.RequestID]time.Time // of reads from a D that has said so
	stock     map[kv.RequestID]bool      // was read from a stock engine

	earlier map[kv.RequestID]bool      // holds for a next turn
	holds   map[kv.RequestID]time.Time // finished, no report yet: when the lease ends at the latest
	blocks  map[kv.RequestID]kv.BlockID
	grants  map[agent.GrantID]kv.RequestID // live: of which hold
	lent    uint64
	serial  int
}

func TestPullInvariants(t *testing.T) {
	for i := range 40 { // four thousand runs
		t.Run(fmt.Sprint(i), func(t *testing.T) { rapid.Check(t, pullInvariants) })
	}
}

func pullInvariants(t *rapid.T) {
	cfg := machineConfig()
	cfg.Mode = kv.Pull
	w := &pullWorld{t: t, m: newMachine(cfg), now: time.Unix(1000, 0), flights: map[connector.PeerAddr]bool{}, pins: map[*remote]int{},
		reads: map[kv.RequestID]bool{}, transfers: map[agent.TransferID]uint64{}, fetchOf: map[uint64]kv.RequestID{},
		outcomes: map[agent.TransferID]agent.Outcome{}, done: map[kv.RequestID]bool{}, holds: map[kv.RequestID]time.Time{},
		expiry: map[kv.RequestID]time.Time{}, stock: map[kv.RequestID]bool{}, earlier: map[kv.RequestID]bool{}, blocks: map[kv.RequestID]kv.BlockID{}, grants: map[agent.GrantID]kv.RequestID{}}
	w.m.cfg.Clock = func(at time.Time) float64 { return float64(at.Unix()) }
	w.m.irrevocable = rapid.IntRange(0, 2).Draw(t, "irrevocable") == 0
	t.Repeat(map[string]func(*rapid.T){
		"read":     w.read,
		"cancel":   w.cancelRead,
		"finish":   w.finish,
		"release":  w.release,
		"withdraw": w.withdraw,
		"connect":  w.connect,
		"claim":    w.claim,
		"claim2":   w.claim,
		"complete": w.complete,
		"giveUp":   w.giveUp,
		"permit":   w.permit,
		"permit2":  w.permit,
		"refuse":   w.refuse,
		"result":   w.result,
		"stop":     w.stop,
		"lose":     w.lose,
		"ack":      w.ack,
		"beat":     w.beat,
		"time":     w.time,
		"":         func(*rapid.T) { w.check() },
	})
	w.drain()
}

func (w *pullWorld) step(in input) {
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

func (w *pullWorld) carryOut(a action) input {
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
			w.t.Fatalf("%s is let go more often than held", a.remote.engine)
		}
	case lend:
		return w.lend(a)
	case revoke:
		if _, live := w.grants[a.grant]; !live {
			w.t.Fatalf("grant %v is revoked, but not live", a.grant)
		}
		delete(w.grants, a.grant)
	case read:
		return w.post(a)
	case reportSent:
		if _, ok := w.holds[a.ID]; !ok {
			w.t.Fatalf("%s is reported as sent, but not held", a.ID)
		}
		delete(w.holds, a.ID)
		for g, id := range w.grants {
			if id == a.ID {
				w.t.Fatalf("blocks of %s are given back while grant %v lives", id, g)
			}
		}
	case reportReceived:
		if !w.reads[a.ID] {
			w.t.Fatalf("%s is reported, but not read", a.ID)
		}
		delete(w.reads, a.ID)
		for _, id := range w.fetchOf {
			if id == a.ID {
				w.t.Fatalf("%s is reported while bytes of it may move", id)
			}
		}
		if a.Err == nil && !w.done[a.ID] {
			w.t.Fatalf("%s is reported as received, but nothing of it was", a.ID)
		}
		if end, ok := w.expiry[a.ID]; ok && a.Err == nil && w.stock[a.ID] && !w.now.Before(end) {
			w.t.Fatalf("%s is reported as received of a stock engine that may have used the blocks again", a.ID)
		}
	case reportProgress:
		if !w.reads[a.id] {
			w.t.Fatalf("progress of %s, which is not read", a.id)
		}
	case grant, register, post, forget, lost, notify, cancel, emit:
	}
	return nil
}

func (w *pullWorld) lend(a lend) input {
	if rapid.IntRange(0, 9).Draw(w.t, "no grant") == 0 {
		return lent{a.claim, agent.GrantID{}, errors.New("too many grants")}
	}
	if len(a.ranges) != 2 {
		w.t.Fatalf("%d ranges are lent, a hold has two", len(a.ranges))
	}
	first := kv.BlockID((a.ranges[0].Addr - 4096) / 64)
	for id, b := range w.blocks {
		if _, held := w.holds[id]; held && b == first {
			w.lent++
			g := agent.GrantID{byte(w.lent), byte(w.lent >> 8), 1}
			w.grants[g] = id
			return lent{a.claim, g, nil}
		}
	}
	w.t.Fatalf("block %d is lent, which is not held", first)
	return nil
}

func (w *pullWorld) post(a read) input {
	switch rapid.IntRange(0, 5).Draw(w.t, "posted") {
	case 0:
		return readPosted{a.fetch, 0, agent.ErrBusy}
	case 1:
		return readPosted{a.fetch, 0, errors.New("refused")}
	}
	f := w.m.fetcher.fetches[a.fetch]
	if end, ok := w.expiry[f.want.ID]; ok && !w.now.Add(expiryMargin).Before(end) {
		w.t.Fatalf("%s is read %v before its peer gives the blocks back", f.want.ID, end.Sub(w.now))
	}
	w.stock[f.want.ID] = a.remote.stock
	w.next++
	w.transfers[w.next] = a.fetch
	w.fetchOf[a.fetch] = f.want.ID
	return readPosted{a.fetch, w.next, nil}
}

func (w *pullWorld) engine(t *rapid.T) string {
	return rapid.SampledFrom([]string{"Q", "R"}).Draw(t, "engine")
}

func (w *pullWorld) read(t *rapid.T) {
	w.serial++
	id := kv.RequestID(fmt.Sprintf("d%d", w.serial))
	from := kv.BlockIDs{{1, 2}}
	switch rapid.IntRange(0, 7).Draw(t, "odd") {
	case 0:
		from = kv.BlockIDs{{1, 1000}}
	case 1:
		from = nil
	}
	w.reads[id] = true
	r := connector.Read{
		Registration: connector.Registration{ID: id, Blocks: kv.BlockIDs{{3, 4}}, NumTokens: 8, Peer: addrOf(w.engine(t))},
		Remote:       "p", RemoteBlocks: from, Readers: rapid.IntRange(1, 3).Draw(t, "readers")}
	if r.Earlier = rapid.Bool().Draw(t, "earlier"); r.Earlier && rapid.Bool().Draw(t, "expiry told") {
		w.expiry[id] = w.now.Add(time.Duration(rapid.SampledFrom([]int{5, 6, 21, 60}).Draw(t, "expiry")) * time.Second)
		at := float64(w.expiry[id].Unix())
		r.Expiry = &at
	}
	w.step(stepMeta{connector.StepMeta{Reads: []connector.Read{r}}})
}

func (w *pullWorld) cancelRead(t *rapid.T) {
	if len(w.reads) > 0 {
		id := rapid.SampledFrom(slices.Sorted(maps.Keys(w.reads))).Draw(t, "read")
		w.step(stepMeta{connector.StepMeta{Cancels: []kv.RequestID{id, "nobody"}}})
	}
}

func (w *pullWorld) finish(t *rapid.T) {
	w.serial++
	id := kv.RequestID(fmt.Sprintf("p%d", w.serial))
	b := kv.BlockID(2 * (w.serial % 49))
	for other := range w.holds {
		if w.blocks[other] == b {
			return
		}
	}
	w.blocks[id] = b
	w.holds[id] = w.now.Add(30 * time.Second)
	f := connector.FinishedBlocks{ID: id, Blocks: kv.BlockIDs{{b, b + 1}}, NumTokens: 8, Lease: 30 * time.Second, Generation: 1, Digest: connector.Digest{1}}
	if f.Earlier = rapid.Bool().Draw(t, "earlier"); f.Earlier {
		w.earlier[id] = true
		f.Prefixes = []connector.Digest{{2}, {1}}
	}
	w.step(stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{f}}})
}

// release: nobody wants a hold any more. Blocks that nobody may be reading come back at once; an agent
// that can take its permissions back has nobody reading them then.
func (w *pullWorld) release(t *rapid.T) {
	id := w.hold(t)
	r := connector.Release{ID: id, Lease: kv.Generation(rapid.IntRange(1, 5).Draw(t, "lease")/5 + 1)}
	_, held := w.holds[id]
	lent := slices.Contains(slices.Collect(maps.Values(w.grants)), id)
	w.step(stepMeta{connector.StepMeta{Released: []connector.Release{r}}})
	_, now := w.holds[id]
	if r.Lease != 1 && now != held || r.Lease == 1 && now && !(w.m.irrevocable && lent) {
		t.Fatalf("release of lease %d of %s, which was held: %v, lent: %v; now it is held: %v", r.Lease, id, held, lent, now)
	}
}

func (w *pullWorld) withdraw(t *rapid.T) {
	w.step(stepMeta{connector.StepMeta{Withdrawn: []connector.Withdrawal{{ID: "w", Remote: "p", Peer: addrOf(w.engine(t)), Readers: 1}}}})
}

func (w *pullWorld) connect(t *rapid.T) {
	if len(w.flights) == 0 {
		t.Skip("no flight")
	}
	addrs := slices.SortedFunc(maps.Keys(w.flights), func(a, b connector.PeerAddr) int { return int(a.Host[0]) - int(b.Host[0]) })
	addr := rapid.SampledFrom(addrs).Draw(t, "addr")
	delete(w.flights, addr)
	if rapid.IntRange(0, 3).Draw(t, "fails") == 0 {
		w.step(connectFailed{addr, errors.New("no answer")})
		return
	}
	c := (&scenario{}).peerOf(string(addr.Engine))
	if rapid.IntRange(0, 2).Draw(t, "stock") == 0 {
		c.Ranks[0].Meta.Extension = nil
	}
	if g := w.m.remotes[addr.Engine]; g != nil {
		c = &peer.Connected{Engine: c.Engine, Gen: g.gen, Ranks: c.Ranks}
		c.Ranks[0].Agent.ID = g.agent.ID
	}
	w.step(connected{addr, c})
}

func (w *pullWorld) hold(t *rapid.T) kv.RequestID {
	ids := append(slices.Sorted(maps.Keys(w.holds)), "p-unknown")
	return rapid.SampledFrom(ids).Draw(t, "hold")
}

func (w *pullWorld) say(from string, n wire.Notification) {
	var msg []byte
	var err error
	if c, ok := n.(wire.Completion); ok {
		msg, err = wire.AppendCompletion(nil, c)
	} else {
		msg, err = wire.AppendControl(nil, n)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.step(notification{agent.Notification{From: agent.PeerID{Name: agent.Name(from), Gen: 1}, Msg: msg}})
}

func (w *pullWorld) claim(t *rapid.T) {
	id, engine := w.hold(t), w.engine(t)
	b := w.blocks[id]
	c := &wire.Claim{Seq: uint64(rapid.IntRange(1, 9).Draw(t, "seq")), From: wire.Sender{Engine: kv.EngineID(engine), Host: "h", Port: 5600, TP: 1},
		RegistrationRef: testRef(id, kv.Generation(rapid.IntRange(1, 12).Draw(t, "number"))), Lease: kv.Generation(rapid.IntRange(0, 2).Draw(t, "lease")),
		Tokens: 8, Readers: rapid.IntRange(1, 3).Draw(t, "readers"), Blocks: wire.BlocksDigest(kv.BlockIDs{{b, b + 1}}), Digest: connector.Digest{1}}
	part := rapid.IntRange(0, 3).Draw(t, "part") == 0
	if part { // the first block of what is kept for a next turn; of any other hold, nothing
		c.Tokens, c.Digest = 4, connector.Digest{byte(rapid.IntRange(1, 2).Draw(t, "digest"))}
	}
	if rapid.IntRange(0, 5).Draw(t, "other blocks") == 0 {
		c.Blocks[0]++
	}
	before := len(w.grants)
	w.say(agentOf(engine), c)
	if (c.Lease == 2 || c.Blocks != wire.BlocksDigest(kv.BlockIDs{{b, b + 1}})) && len(w.grants) > before {
		t.Fatalf("a claim that does not fit was granted: %+v", c)
	}
	if part && (!w.earlier[id] || c.Digest[0] == 1) && len(w.grants) > before {
		t.Fatalf("a claim of other tokens was granted: %+v", c)
	}
	if end, ok := w.holds[id]; ok && !w.earlier[id] { // at most
		w.holds[id] = later(end, w.now.Add(20*time.Second))
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func agentOf(engine string) string { return map[string]string{"Q": "q.0", "R": "r.0"}[engine] }

func (w *pullWorld) complete(t *rapid.T) {
	if rapid.Bool().Draw(t, "claimed") {
		w.say(agentOf(w.engine(t)), &wire.ReadDone{RegistrationRef: testRef(w.hold(t), kv.Generation(rapid.IntRange(1, 12).Draw(t, "number")))})
		return
	}
	w.say(agentOf(w.engine(t)), wire.Completion{ID: w.hold(t), N: rapid.IntRange(1, 3).Draw(t, "n")})
}

func (w *pullWorld) giveUp(t *rapid.T) {
	w.serial++
	engine, seq := w.engine(t), uint64(rapid.IntRange(1, w.serial).Draw(t, "seq"))
	w.say(agentOf(engine), &wire.Cancel{Seq: seq, Receipt: tokenOf(kv.Generation(seq)), From: wire.Sender{Engine: kv.EngineID(engine), Host: "h", Port: 5600, TP: 1},
		RegistrationRef: testRef(w.hold(t), kv.Generation(rapid.IntRange(0, 12).Draw(t, "number")))})
}

func (w *pullWorld) number(t *rapid.T) kv.Generation {
	return kv.Generation(rapid.IntRange(1, int(w.m.fetcher.number)+1).Draw(t, "number"))
}

func (w *pullWorld) permit(t *rapid.T) {
	w.say(agentOf(w.engine(t)), &wire.Claimed{Seq: 1, RegistrationRef: w.m.ourRef("p", w.number(t)), Grant: [16]byte{7}})
}

func (w *pullWorld) refuse(t *rapid.T) {
	w.say(agentOf(w.engine(t)), &wire.Failed{Seq: 1, RegistrationRef: w.m.ourRef("p", w.number(t)), Phase: "lease"})
}

func (w *pullWorld) transfer(t *rapid.T) agent.TransferID {
	if len(w.transfers) == 0 {
		t.Skip("no transfer")
	}
	return rapid.SampledFrom(slices.Sorted(maps.Keys(w.transfers))).Draw(t, "transfer")
}

func (w *pullWorld) result(t *rapid.T) {
	w.end(w.transfer(t), rapid.SampledFrom([]agent.Outcome{agent.OutcomeDone, agent.OutcomeDone, agent.OutcomeFailed, agent.OutcomePeerLost}).Draw(t, "outcome"))
}

func (w *pullWorld) end(id agent.TransferID, o agent.Outcome) {
	if _, twice := w.outcomes[id]; twice {
		return
	}
	w.outcomes[id] = o
	if o == agent.OutcomeDone {
		w.done[w.fetchOf[w.transfers[id]]] = true
	}
	w.step(transferResult{agent.Result{Transfer: id, Outcome: o, Bytes: 128, Descs: 2}})
}

func (w *pullWorld) stop(t *rapid.T) {
	w.stopped(w.transfer(t))
}

func (w *pullWorld) stopped(id agent.TransferID) {
	if _, ok := w.outcomes[id]; !ok {
		w.end(id, agent.OutcomeFailed)
	}
	delete(w.fetchOf, w.transfers[id])
	delete(w.transfers, id)
	w.step(transferStopped{agent.Stopped{Transfer: id}})
}

func (w *pullWorld) lose(t *rapid.T) {
	w.step(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: agent.Name(agentOf(w.engine(t))), Gen: 1}, Inbound: rapid.Bool().Draw(t, "inbound"), Err: errors.New("reset")}})
}

func (w *pullWorld) beat(t *rapid.T) {
	engine, id := w.engine(t), w.hold(t)
	w.say(agentOf(engine), &wire.Beat{Seq: 1, From: wire.Sender{Engine: kv.EngineID(engine), Host: "h", Port: 5600, TP: 1}, Names: []kv.RequestID{id}})
	if end, ok := w.holds[id]; ok && !w.earlier[id] {
		w.holds[id] = later(end, w.now.Add(20*time.Second))
	}
}

func (w *pullWorld) time(t *rapid.T) {
	w.now = w.now.Add(time.Duration(rapid.SampledFrom([]int{0, 1, 5, 11, 20, 31}).Draw(t, "seconds")) * time.Second)
	w.step(tick{})
}

func (w *pullWorld) check() {
	checkLine(w.t, &w.m.fetcher.busy)
	for id, end := range w.holds {
		if w.now.After(end) && !w.m.irrevocable {
			w.t.Fatalf("%s is held %v beyond its lease", id, w.now.Sub(end))
		}
	}
	if at, ok := w.m.Deadline(); ok && !at.After(w.now) {
		w.t.Fatalf("the deadline %v is not after now, %v", at, w.now)
	}
}

func (w *pullWorld) ack(t *rapid.T) {
	from := agentOf(w.engine(t))
	w.say(from, w.m.ackOf(agent.Name(from), uint64(rapid.IntRange(1, 30).Draw(t, "seq"))))
}

// drain lets everything end by itself: afterwards nothing is left. What an agent that cannot revoke has
// lent ends with the connection.
func (w *pullWorld) drain() {
	for i := range 30 {
		if i == 3 && w.m.irrevocable {
			for _, name := range []agent.Name{"q.0", "r.0"} {
				w.step(peerLost{agent.PeerLost{Peer: agent.PeerID{Name: name, Gen: 1}, Err: errors.New("reset")}})
			}
		}
		for _, id := range slices.Sorted(maps.Keys(w.transfers)) {
			w.stopped(id)
		}
		for addr := range w.flights {
			delete(w.flights, addr)
			w.step(connectFailed{addr, errors.New("no answer")})
		}
		w.now = w.now.Add(31 * time.Second)
		w.step(tick{})
	}
	for _, id := range slices.Sorted(maps.Keys(w.transfers)) {
		w.stopped(id)
	}
	s := w.m.snapshot()
	if len(w.reads)+len(w.holds)+len(w.grants) > 0 || s.Receiving+s.Held+s.Claims+s.InFlight+s.Letters > 0 {
		w.t.Fatalf("left: reads %v, holds %v, grants %v, %+v", w.reads, w.holds, w.grants, s)
	}
	for r, n := range w.pins {
		if n != 0 {
			w.t.Fatalf("%s is pinned %d times", r.engine, n)
		}
	}
	if at, ok := w.m.Deadline(); ok {
		w.t.Fatalf("a deadline is left: %v", at)
	}
}
