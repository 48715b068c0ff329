package session

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// Whatever is delivered late, cut, refused or aborted, between nodes whose engines compute, look up
// and evict: a block that is ready has its key's content, every job ends once, and nothing is left.
func TestNodesKeepTheirPromises(t *testing.T) {
	for _, rigid := range []bool{false, true} {
		t.Run(fmt.Sprintf("rigid=%v", rigid), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				w := newSim(t, rigid)
				for range 5 { // one alone is too short for a fetch and what may befall it
					t.Repeat(map[string]func(*rapid.T){
						"deliver": w.deliver, "deliver more": w.deliver, "admit": w.admit, "move": w.move, "sleep": w.sleep, "cut": w.cut,
						"flow": w.flow, "flow on": w.flow, "ask": w.lookup, "compute more": w.compute, "begin": w.begin, "lookup": w.lookup, "look again": w.lookup, "compute": w.compute, "finish": w.finish,
						"": func(*rapid.T) { w.check() },
					})
				}
				w.drain()
			})
		})
	}
}

type sim struct {
	t     *rapid.T
	rigid bool
	split bool // answers to lookups come key by key (p2p-tier.md, section 3.1)
	now   time.Time
	nodes []*simNode
	links uint64
	next  int
	moves []*simMove
}

type simNode struct {
	w      *sim
	name   string
	hub    *Hub
	m      *core.Machine
	mem    []core.Key // which content each slot has
	views  map[kv.RequestID]*simView
	conns  map[kv.Generation]*simConn
	admits []Admit
	grants map[core.JobID]simGrant
	owed   map[agent.Name]bool // dismissed, and not yet torn down
	todo   []Event
	// writable slots belong to a load that has not stopped.
	writable map[core.Slot]core.JobID
}

type simView struct {
	everything, failed, source bool
	asked                      map[core.Key]bool
	answers                    map[core.Key]bool
	unsent                     []core.Key
}

type simGrant struct {
	id    agent.GrantID
	slots []core.Slot
}

// simConn is one direction between two nodes.
type simConn struct {
	from, to *simNode
	gen      kv.Generation
	link     uint64 // 0: not up yet
	queue    []wire.P2PMessage
	hung     bool // ends after the queue
	over     bool
}

// simMove is one transfer, block by block.
type simMove struct {
	by, to        *simNode
	post          Post
	content       []core.Key // of the source's slots when it began
	at            int
	cancelled     bool
	ended, failed bool
}

func newSim(t *rapid.T, rigid bool) *sim {
	w := &sim{t: t, rigid: rigid, split: rapid.Bool().Draw(t, "split"), now: time.Unix(1000, 0)}
	for i := range 3 {
		n := &simNode{w: w, name: fmt.Sprintf("n:%d", i+1), mem: make([]core.Key, 5), views: map[kv.RequestID]*simView{},
			conns: map[kv.Generation]*simConn{}, grants: map[core.JobID]simGrant{}, owed: map[agent.Name]bool{}, writable: map[core.Slot]core.JobID{}}
		c := testConnect(n.name)
		c.NumBlocks = len(n.mem)
		c.Extension.Capabilities = []string{wire.CapP2PSums, wire.CapP2PLater}
		var err error
		if n.hub, err = New(Config{Local: c, Revocable: !rigid, MaxPeers: 2, PeerPins: 3, Portion: rapid.IntRange(1, 3).Draw(t, "portion")}); err != nil {
			t.Fatal(err)
		}
		if n.m, err = core.New(core.Config{Slots: len(n.mem), Tiers: 1}); err != nil {
			t.Fatal(err)
		}
		w.nodes = append(w.nodes, n)
	}
	return w
}

func (w *sim) node(name string) *simNode {
	for _, n := range w.nodes {
		if n.name == name {
			return n
		}
	}
	return nil
}

// step tells a node's hub, and what follows.
func (n *simNode) step(ev Event) {
	n.todo = append(n.todo, ev)
	n.run()
}

func (n *simNode) run() {
	for {
		for len(n.todo) > 0 {
			ev := n.todo[0]
			n.todo = n.todo[1:]
			for _, a := range n.hub.Step(n.w.now, ev) {
				n.act(a)
			}
		}
		// The tier's own jobs, and its changes.
		for _, a := range n.m.Actions() {
			switch a := a.(type) {
			case core.Load:
				v := n.views[a.Job.Req]
				for k, hit := range v.answers {
					if hit {
						delete(v.answers, k)
						delete(v.asked, k)
					}
				}
				for _, slot := range a.Job.Slots {
					n.writable[slot] = a.Job.ID
				}
				n.todo = append(n.todo, Fetch{Req: a.Job.Req, Job: a.Job.ID, Keys: a.Job.Keys, Slots: a.Job.Slots})
			case core.Store:
				n.todo = append(n.todo, Supply{Req: a.Job.Req, Job: a.Job.ID, Keys: a.Job.Keys, Slots: a.Job.Slots, Sums: a.Job.Sums})
			case core.Unwanted:
				if d := n.decline(a); d.Hits+len(d.Open) > 0 {
					n.todo = append(n.todo, d)
				}
			case core.End:
				delete(n.views, a.Req)
				n.todo = append(n.todo, Finish{Req: a.Req})
			}
		}
		if n.m.Changed() && n.hub.Watching() {
			n.todo = append(n.todo, Changed{})
		}
		if len(n.todo) == 0 {
			return
		}
	}
}

// decline is what the driver makes of keys that are not wanted.
func (n *simNode) decline(a core.Unwanted) Decline {
	v, d := n.views[a.Req], Decline{Req: a.Req}
	for _, k := range a.Keys {
		if !v.asked[k] {
			continue
		}
		if hit, ok := v.answers[k]; !ok {
			d.Open = append(d.Open, k)
		} else if hit {
			d.Hits++
		}
		delete(v.asked, k)
		delete(v.answers, k)
		v.unsent = slices.DeleteFunc(v.unsent, func(x core.Key) bool { return x == k })
	}
	return d
}

func (n *simNode) act(a Action) {
	switch a := a.(type) {
	case Dial:
		if to := n.w.node(string(a.Peer)); to != nil {
			n.conns[a.Gen] = &simConn{from: n, to: to, gen: a.Gen}
		} else {
			n.todo = append(n.todo, Down{Peer: a.Peer, Gen: a.Gen, Err: errors.New("nobody")})
		}
	case Send:
		if c := n.conns[a.Gen]; c != nil && !c.over {
			m, err := wire.DecodeP2P(wire.AppendP2P(nil, a.Msg))
			if err != nil {
				n.w.t.Fatalf("%s sends what nobody can read: %v", n.name, err)
			}
			c.queue = append(c.queue, m)
		}
	case Probe: // a connection that is cut is noticed otherwise
		n.todo = append(n.todo, Alive(a))
	case Hang:
		if c := n.conns[a.Gen]; c != nil {
			c.hung = true
		}
	case DropLink:
		for _, x := range n.w.nodes {
			for _, c := range x.conns {
				if c.link == a.Link && c.to == n && !c.over {
					c.break_()
				}
			}
		}
	case Admit:
		n.admits = append(n.admits, a)
	case Dismiss:
		n.admits = slices.DeleteFunc(n.admits, func(x Admit) bool { return x.Gen == a.Gen })
		if a.Agent.Name != "" {
			n.owed[a.Agent.Name] = true
		}
	case Grant:
		var id agent.GrantID
		n.w.next++
		id[0], id[1], id[2] = byte(n.w.next), byte(n.w.next>>8), 1
		n.grants[a.Job] = simGrant{id, a.Slots}
		n.todo = append(n.todo, Granted{Job: a.Job, ID: id})
	case Revoke:
		delete(n.grants, a.Job)
	case Post:
		for _, s := range a.Local {
			if n.mem[s] == "" {
				n.w.t.Fatalf("%s sends the empty slot %d", n.name, s)
			}
		}
		m := &simMove{by: n, to: n.w.node(string(a.Agent.Name)), post: a}
		for _, s := range a.Local {
			m.content = append(m.content, n.mem[s])
		}
		n.w.moves = append(n.w.moves, m)
	case Cancel:
		for _, m := range n.w.moves {
			if m.by == n && m.post.Transfer == a.Transfer {
				m.cancelled = true
			}
		}
	case Answer:
		if v := n.views[a.Req]; v != nil {
			v.answers[a.Key] = a.Hit
		}
	case Fail:
		if v := n.views[a.Req]; v != nil {
			v.failed = true
		}
	case LoadEnded:
		var good []bool
		if a.OK {
			good = slices.Repeat([]bool{true}, a.Blocks)
			var sums []core.Sum
			for i, s := range a.Slots {
				sums = append(sums, core.SumOf([]byte(n.mem[s])))
				if len(a.Sums) != a.Blocks || a.Sums[i] != sums[i].CRC {
					n.w.t.Fatalf("%s: %q has come to slot %d, with the sums %v", n.name, n.mem[s], s, a.Sums)
				}
			}
			n.m.SetSums(a.Job, sums)
		}
		if a.Stopped {
			n.stopped(a.Job)
		}
		n.m.LoadEnded(a.Job, good, a.Stopped)
	case LoadStopped:
		n.stopped(a.Job)
		n.m.LoadStopped(a.Job)
	case StoreEnded:
		n.m.StoreEnded(a.Job, a.OK)
	case Serve:
		n.todo = append(n.todo, Served{Lookup: a.Lookup, Answers: n.m.Serve(0, a.Keys, a.Most, n)})
	case Unpin:
		n.m.Unpin(a.Pins)
	}
}

func (n *simNode) stopped(job core.JobID) {
	maps.DeleteFunc(n.writable, func(_ core.Slot, j core.JobID) bool { return j == job })
}

// break_ ends a connection at once; both ends learn it.
func (c *simConn) break_() {
	c.over, c.queue = true, nil
	delete(c.from.conns, c.gen)
	if c.link != 0 {
		c.to.todo = append(c.to.todo, LinkEnded{Identity: c.from.name, Link: c.link})
	}
	if !c.hung {
		c.from.todo = append(c.from.todo, Down{Peer: PeerID(c.to.name), Gen: c.gen, Err: errors.New("reset")})
	}
}

// advance delivers the next thing of a connection.
func (c *simConn) advance() {
	switch {
	case c.link == 0:
		c.from.w.links++
		c.link = c.from.w.links
		if !c.hung {
			c.from.step(Up{Peer: PeerID(c.to.name), Gen: c.gen})
		}
	case len(c.queue) > 0:
		m := c.queue[0]
		c.queue = c.queue[1:]
		if r, ok := m.(*wire.P2PLookupResp); ok && c.from.w.split && len(r.Keys) > 1 {
			rest := &wire.P2PLookupResp{ID: r.ID, Keys: r.Keys[1:], Hits: r.Hits[1:]}
			one := &wire.P2PLookupResp{ID: r.ID, Keys: r.Keys[:1], Hits: r.Hits[:1]}
			if r.Later != nil {
				rest.Later, one.Later = r.Later[1:], r.Later[:1]
			}
			m, c.queue = one, slices.Insert(c.queue, 0, wire.P2PMessage(rest))
		}
		c.to.step(Message{Identity: c.from.name, Link: c.link, Msg: m})
	case c.hung:
		c.break_()
	}
	c.from.w.settle()
}

// settle lets every node handle what others have put into its inbox.
func (w *sim) settle() {
	for again := true; again; {
		again = false
		for _, n := range w.nodes {
			if len(n.todo) > 0 {
				n.run()
				again = true
			}
		}
	}
}

func (w *sim) busyConns() (out []*simConn) {
	for _, n := range w.nodes {
		for _, gen := range slices.Sorted(maps.Keys(n.conns)) {
			if c := n.conns[gen]; c.link == 0 || len(c.queue) > 0 || c.hung {
				out = append(out, c)
			}
		}
	}
	return out
}

// pickOne skips an action that has nothing to do. It is to be the first that an action draws: one that skips after a draw
// ends rapid's whole sequence of actions, nearly always before anything has happened.
func pickOne[T any](t *rapid.T, all []T) T {
	if len(all) == 0 {
		t.Skip("none")
	}
	return all[rapid.IntRange(0, len(all)-1).Draw(t, "which")]
}

func (w *sim) deliver(t *rapid.T) { pickOne(t, w.busyConns()).advance() }

func (w *sim) cut(t *rapid.T) {
	var all []*simConn
	for _, n := range w.nodes {
		for _, gen := range slices.Sorted(maps.Keys(n.conns)) {
			all = append(all, n.conns[gen])
		}
	}
	c := pickOne(t, all)
	if rapid.IntRange(0, 9).Draw(t, "rarely") != 0 {
		return
	}
	c.break_()
	w.settle()
}

func (w *sim) admit(t *rapid.T) {
	n := pickOne(t, w.which(func(n *simNode) bool { return len(n.admits) > 0 }))
	a := pickOne(t, n.admits)
	n.finishAdmission(a, rapid.IntRange(0, 9).Draw(t, "fails") == 0)
}

func (n *simNode) finishAdmission(a Admit, fails bool) {
	n.admits = slices.DeleteFunc(n.admits, func(x Admit) bool { return x.Gen == a.Gen })
	ev := Admitted{Peer: a.Peer, Gen: a.Gen}
	if fails {
		ev.Err = errors.New("no way")
	} else {
		ev.Agent = agent.PeerID{Name: agent.Name(a.Connect.PeerID), Gen: a.Gen}
	}
	n.step(ev)
	n.w.settle()
}

func (w *sim) move(t *rapid.T) {
	m := pickOne(t, w.moves)
	m.advance(rapid.IntRange(0, 19).Draw(t, "breaks") == 0)
}

// advance moves one block, or ends.
func (m *simMove) advance(breaks bool) {
	w := m.by.w
	switch {
	case !m.ended && (breaks || m.cancelled):
		m.ended, m.failed = true, true
		m.by.step(TransferEnded{Transfer: m.post.Transfer, Err: errors.New("broken")})
	case m.failed && m.at < len(m.post.Local) && !m.cancelled:
		if !m.copy() { // it has failed and not stopped: it may still write
			m.cancelled = true
		}
	case !m.ended && m.at < len(m.post.Local):
		if !m.copy() {
			m.ended, m.failed = true, true
			m.by.step(TransferEnded{Transfer: m.post.Transfer, Err: errors.New("refused")})
		}
	case !m.ended:
		m.ended = true
		m.by.step(TransferEnded{Transfer: m.post.Transfer, OK: true})
	default:
		w.moves = slices.DeleteFunc(w.moves, func(x *simMove) bool { return x == m })
		m.by.step(TransferStopped{Transfer: m.post.Transfer})
		w.tearDown()
	}
	w.settle()
}

// copy writes a block, if the agent of the memory's owner permits it or cannot refuse.
func (m *simMove) copy() bool {
	slot := core.Slot(m.post.Remote[m.at])
	allowed := m.to.w.rigid
	for _, g := range m.to.grants {
		allowed = allowed || g.id == m.post.Grant && slices.Contains(g.slots, slot)
	}
	if allowed {
		if m.to.writable[slot] == 0 {
			m.to.w.t.Fatalf("%s writes to slot %d of %s, which is no load's", m.by.name, slot, m.to.name)
		}
		if got := m.by.mem[m.post.Local[m.at]]; got != m.content[m.at] {
			m.to.w.t.Fatalf("%s: a slot has changed from %q to %q while it is sent", m.by.name, m.content[m.at], got)
		}
		m.to.mem[slot] = m.by.mem[m.post.Local[m.at]]
		m.at++
	}
	return allowed
}

// tearDown tells nodes of dismissed peers' agents that write no more.
func (w *sim) tearDown() {
	for _, n := range w.nodes {
		for _, name := range slices.Sorted(maps.Keys(n.owed)) {
			if !slices.ContainsFunc(w.moves, func(m *simMove) bool { return m.to == n && m.by.name == string(name) }) {
				delete(n.owed, name)
				n.todo = append(n.todo, TornDown{Agent: name})
			}
		}
	}
	w.settle()
}

func (w *sim) sleep(t *rapid.T) {
	w.pass(rapid.SampledFrom([]time.Duration{time.Millisecond, 600 * time.Millisecond, 6 * time.Second, 31 * time.Second}).Draw(t, "for"))
}

func (w *sim) pass(d time.Duration) {
	w.now = w.now.Add(d)
	for _, n := range w.nodes {
		n.step(Tick{})
	}
	w.settle()
}

var simKeys = []core.Key{"a", "b", "c", "d", "e", "f"}

func (w *sim) begin(t *rapid.T) {
	n := pickOne(t, w.nodes)
	w.next++
	b := Begin{Req: kv.RequestID(fmt.Sprint("r", w.next))}
	v := &simView{asked: map[core.Key]bool{}, answers: map[core.Key]bool{}}
	id := rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "id")
	if rapid.IntRange(0, 2).Draw(t, "role") > 0 {
		b.Source, b.SourceID = PeerID(pickOne(t, []string{"n:1", "n:2", "n:3", "n:9"})), id
		b.Everything = rapid.Bool().Draw(t, "everything")
		v.source, v.everything = true, b.Everything
	} else {
		b.Decoder, b.DecoderID = true, id
	}
	if !n.m.Begin(b.Req, core.RequestSpec{NoLoad: []bool{!v.source}, NoStore: []bool{!b.Decoder}, Whole: []bool{b.Decoder},
		Prefix: rapid.Bool().Draw(t, "prefix")}) {
		t.Fatal("refused")
	}
	n.views[b.Req] = v
	n.step(b)
	w.settle()
}

func (w *sim) request(t *rapid.T) (*simNode, kv.RequestID) {
	n := pickOne(t, w.which(func(n *simNode) bool { return len(n.views) > 0 }))
	return n, pickOne(t, slices.Sorted(maps.Keys(n.views)))
}

func (w *sim) which(has func(*simNode) bool) (all []*simNode) {
	for _, n := range w.nodes {
		if has(n) {
			all = append(all, n)
		}
	}
	return all
}

// Probe is what the driver does.
func (n *simNode) Probe(_ int, req kv.RequestID, k core.Key) core.Verdict {
	v := n.views[req]
	switch {
	case v == nil || v.failed || !v.source:
		return core.Miss
	case v.everything:
		return core.Hit
	}
	if hit, ok := v.answers[k]; ok {
		if hit {
			return core.Hit
		}
		return core.Miss
	}
	if !v.asked[k] {
		v.asked[k] = true
		v.unsent = append(v.unsent, k)
	}
	return core.Pending
}

func (w *sim) lookup(t *rapid.T) {
	n, req := w.request(t)
	ks := rapid.SliceOfNDistinct(rapid.SampledFrom(simKeys), 1, 4, rapid.ID).Draw(t, "keys")
	n.m.Lookup(req, ks, n)
	n.run()
	if v := n.views[req]; v != nil && len(v.unsent) > 0 {
		n.todo = append(n.todo, Ask{Req: req, Keys: v.unsent})
		v.unsent = nil
	}
	w.settle()
}

func (w *sim) compute(t *rapid.T) {
	n, req := w.request(t)
	ks := rapid.SliceOfNDistinct(rapid.SampledFrom(simKeys), 1, 4, rapid.ID).Draw(t, "keys")
	res, ok := n.m.Reserve(req, ks)
	if !ok {
		return
	}
	for i, at := range res.Index {
		n.mem[res.Slots[i]] = ks[at]
	}
	if res.ID != 0 {
		var sums []core.Sum
		for _, at := range res.Index {
			sums = append(sums, core.SumOf([]byte(ks[at])))
		}
		n.m.SetSums(res.ID, sums)
		n.m.Commit(res.ID, true)
	}
	n.run()
	w.settle()
}

func (w *sim) finish(t *rapid.T) {
	n, req := w.request(t)
	n.m.Finish(req)
	n.run()
	w.settle()
}

// flow lets a part of what is under way arrive.
func (w *sim) flow(t *rapid.T) {
	for range rapid.IntRange(1, 30).Draw(t, "steps") {
		for _, c := range w.busyConns() {
			c.advance()
		}
		for _, m := range slices.Clone(w.moves) {
			m.advance(false)
		}
		for _, n := range w.nodes {
			for _, a := range slices.Clone(n.admits) {
				n.finishAdmission(a, false)
			}
		}
	}
}

// check is rule 3: what is ready is what it says.
func (w *sim) check() {
	for _, n := range w.nodes {
		for _, k := range simKeys {
			if id, slots, ok := n.m.Use([]core.Key{k}); ok {
				if n.mem[slots[0]] != k {
					w.t.Fatalf("%s: slot %d is ready as %q and holds %q", n.name, slots[0], k, n.mem[slots[0]])
				}
				n.m.EndUse(id)
			}
		}
		n.m.Changed() // by our own EndUse
		if s := n.m.Stats(); s.Strays != 0 {
			w.t.Fatalf("%s: %d ends of jobs that had ended", n.name, s.Strays)
		}
	}
}

// drain lets everything come to its end.
func (w *sim) drain() {
	for _, n := range w.nodes {
		for _, req := range slices.Sorted(maps.Keys(n.views)) {
			n.m.Finish(req)
			n.run()
		}
	}
	w.settle()
	for range 40 {
		for moved := true; moved; {
			moved = false
			for _, c := range w.busyConns() {
				c.advance()
				moved = true
			}
			for _, m := range slices.Clone(w.moves) {
				m.advance(false)
				moved = true
			}
			for _, n := range w.nodes {
				for _, a := range slices.Clone(n.admits) {
					n.finishAdmission(a, false)
					moved = true
				}
			}
		}
		w.tearDown()
		w.pass(20 * time.Second)
	}
	w.check()
	for _, n := range w.nodes {
		s := n.m.Stats()
		h := n.hub
		left := []string{}
		add := func(what string, count int) {
			if count > 0 {
				left = append(left, fmt.Sprint(what, " ", count))
			}
		}
		add("loads", s.Loads+len(h.loads))
		add("stores", s.Stores)
		add("pins", s.PeerPins)
		add("writing", s.Writing)
		add("quarantined", s.Quarantined+len(h.halted))
		add("requests", s.Requests+len(h.requests))
		add("lookups", len(h.lookups))
		add("transfers", len(h.xfers))
		add("bindings", len(h.bindings))
		add("unbound", len(h.unbound)+h.slots)
		add("grants", len(n.grants))
		add("timers", len(h.timers))
		for _, x := range h.sessions {
			add("transactions", len(x.client.txs))
			add("rounds", len(x.server.rounds))
			add("peer's pins", x.server.pins)
		}
		if h.PendingWork() {
			left = append(left, "work")
		}
		sort.Strings(left)
		if len(left) > 0 {
			w.t.Fatalf("%s: left over: %v", n.name, left)
		}
	}
}
