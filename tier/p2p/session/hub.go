package session

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// Hub holds all sessions of one node.
type Hub struct {
	cfg       Config
	self      PeerID
	now       time.Time
	out       []Action
	timers    timers
	lastTimer uint64
	lastGen   kv.Generation
	lastID    uint64 // of lookups and transfers

	sessions map[PeerID]*session
	aliases  map[PeerID]*session // other names of peers that were dialled under one
	links    map[link]*session   // by which peers reach us; nil or dead: not listened to any more
	pauses   map[PeerID]time.Time
	requests map[kv.RequestID]*request
	bindings map[string]*binding
	lookups  map[uint64]*lookup
	xfers    map[uint64]*transfer
	loads    map[core.JobID]*load
	halted   map[agent.Name][]core.JobID // failed loads that a dead session's agent may still write

	unbound []*supply // stores whose peer has not asked yet, oldest first
	slots   int       // of unbound
	store   ownStore
	book    ledger
	shut    bool
}

type link struct {
	identity string
	id       uint64
}

// request is one of the engine's requests.
type request struct {
	id       kv.RequestID
	tx       *transaction // what it asks; nil: nothing, or failed
	decoder  bool
	decodeID string
}

// New makes a Hub without peers.
func New(cfg Config) (*Hub, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Hub{
		cfg: cfg.withDefaults(), self: PeerID(cfg.Local.PeerID),
		sessions: map[PeerID]*session{}, aliases: map[PeerID]*session{}, links: map[link]*session{},
		pauses: map[PeerID]time.Time{}, requests: map[kv.RequestID]*request{}, bindings: map[string]*binding{},
		lookups: map[uint64]*lookup{}, xfers: map[uint64]*transfer{}, loads: map[core.JobID]*load{},
		halted: map[agent.Name][]core.JobID{}, book: newLedger(),
	}, nil
}

// Step tells the hub that something has happened at a time, and returns what follows. What has
// happened counts before what was due by then.
func (h *Hub) Step(now time.Time, ev Event) []Action {
	if now.After(h.now) {
		h.now = now
	}
	h.handle(ev)
	h.runTimers()
	out := h.out
	h.out = nil
	return out
}

// Deadline is when the hub wants a Tick, if nothing happens before.
func (h *Hub) Deadline() (time.Time, bool) {
	if len(h.timers) == 0 {
		return time.Time{}, false
	}
	return h.timers[0].at, true
}

// PendingWork reports whether somebody waits for something: a handshake, an answer, a transfer.
func (h *Hub) PendingWork() bool {
	for _, s := range h.sessions {
		if s.busy() {
			return true
		}
	}
	return len(h.xfers) > 0
}

// Watching reports whether a peer's lookup waits for a change of the tier.
func (h *Hub) Watching() bool { return len(h.lookups) > 0 }

func (h *Hub) handle(ev Event) {
	switch ev := ev.(type) {
	case Begin:
		h.begin(ev)
	case Ask:
		if r := h.requests[ev.Req]; r != nil && r.tx != nil {
			r.tx.ask(ev.Epoch, ev.Keys)
		} else {
			h.emit(Fail{Req: ev.Req, Why: "it has no source"})
		}
	case Decline:
		if r := h.requests[ev.Req]; r != nil && r.tx != nil {
			r.tx.decline(ev)
		}
	case Fetch:
		if r := h.requests[ev.Req]; r != nil && r.tx != nil {
			r.tx.fetch(ev)
		} else {
			h.emit(LoadEnded{Job: ev.Job, Stopped: true})
		}
	case Supply:
		h.supply(ev)
	case Call:
		h.callStore()
	case Offer:
		h.offer(ev.Keys)
	case Finish:
		h.finish(ev.Req)
	case Served:
		h.served(ev)
	case Changed:
		for _, id := range slices.Sorted(maps.Keys(h.lookups)) {
			h.lookups[id].again()
		}
	case Up:
		if s := h.dialled(ev.Peer, ev.Gen); s != nil {
			s.up = true
			s.remote = netip.AddrPortFrom(ev.Remote.Addr().Unmap(), ev.Remote.Port())
		}
	case Down:
		if s := h.dialled(ev.Peer, ev.Gen); s != nil {
			s.lost(Lost, fmt.Sprintf("no connection to it: %v", ev.Err))
		}
	case Alive:
		if s := h.dialled(ev.Peer, ev.Gen); s != nil {
			s.silence.heard(h.now)
		}
	case Message:
		h.message(ev)
	case LinkEnded:
		h.linkEnded(ev)
	case Admitted:
		h.admitted(ev)
	case AgentLost:
		for _, s := range h.inOrder() {
			if s.agent == ev.Agent {
				s.lost(Lost, "its agent's connection is gone")
			}
		}
	case TornDown:
		for _, job := range h.halted[ev.Agent] {
			h.emit(LoadStopped{Job: job})
		}
		delete(h.halted, ev.Agent)
	case Granted:
		if l := h.loads[ev.Job]; l != nil {
			l.granted(ev)
		}
	case PostFailed:
		h.transferEnded(TransferEnded{Transfer: ev.Transfer, Err: ev.Err})
		h.transferStopped(ev.Transfer)
	case TransferEnded:
		h.transferEnded(ev)
	case TransferStopped:
		h.transferStopped(ev.Transfer)
	case Damaged:
		h.note(ev.Peer, "blocks_damaged", "%d blocks of job %d do not have their checksums", ev.Blocks, ev.Job)
		h.count(ev.Peer, func(c *Counts) { c.BlocksDamaged += uint64(ev.Blocks) })
		h.report(event.TierBlocksDamaged{Peer: string(ev.Peer), Blocks: ev.Blocks})
	case Tick:
	case Shutdown:
		h.shutdown()
	}
}

func (h *Hub) emit(a Action) { h.out = append(h.out, a) }

func (h *Hub) note(p PeerID, what, format string, args ...any) {
	h.emit(Note{Peer: p, What: what, Text: fmt.Sprintf(format, args...)})
}

func (h *Hub) nextID() uint64 {
	h.lastID++
	return h.lastID
}

// dialled is the living session of a generation.
func (h *Hub) dialled(p PeerID, gen kv.Generation) *session {
	if s := h.sessions[p]; s != nil && s.gen == gen {
		return s
	}
	return nil
}

// inOrder is all sessions by age.
func (h *Hub) inOrder() []*session {
	all := slices.Collect(maps.Values(h.sessions))
	slices.SortFunc(all, func(a, b *session) int { return cmp.Compare(a.gen, b.gen) })
	return all
}

// begin makes a request known, and its session if it names a source.
func (h *Hub) begin(ev Begin) {
	if h.requests[ev.Req] != nil || h.shut {
		h.emit(Fail{Req: ev.Req, Why: "the tier is closed, or knows the request already"})
		return
	}
	r := &request{id: ev.Req, decoder: ev.Decoder, decodeID: ev.DecoderID}
	h.requests[ev.Req] = r
	if ev.Decoder {
		h.decoding(ev.DecoderID)
	}
	if ev.Source == "" {
		return
	}
	s, why := h.reach(ev.Source)
	if s != nil {
		r.tx, why = s.open(r, ev.SourceID, ev.Everything)
	}
	if r.tx == nil {
		h.emit(Fail{Req: ev.Req, Why: why})
	}
}

func (h *Hub) finish(id kv.RequestID) {
	r := h.requests[id]
	if r == nil {
		return
	}
	delete(h.requests, id)
	if r.tx != nil {
		r.tx.finish()
	}
	if r.decoder {
		h.decoded(r.decodeID)
	}
}

// reach gives the session with a peer, new or not; nil and why when there can be none.
func (h *Hub) reach(p PeerID) (*session, string) {
	if s := h.sessions[p]; s != nil {
		return s, ""
	}
	if s := h.aliases[p]; s != nil {
		return s, ""
	}
	if p == h.self {
		return nil, "its source is this node itself"
	}
	if n := h.unheard(); n > h.cfg.MaxPeers/unheardShareDiv {
		return nil, fmt.Sprintf("%d sources that requests have named do not answer", n)
	}
	if !h.makeRoom(0) && !h.displace("") {
		return nil, fmt.Sprintf("%d peers are connected and busy", len(h.sessions))
	}
	return h.newSession(p, nil), ""
}

// unheard counts the sessions that were dialled, with peers that have not said anything.
func (h *Hub) unheard() (n int) {
	for _, s := range h.sessions {
		if s.theirs == nil && s.link.id == 0 {
			n++
		}
	}
	return n
}

// makeRoom ends the longest idle session if there are too many. It reports whether another fits.
func (h *Hub) makeRoom(idle time.Duration) bool {
	if len(h.sessions) < h.cfg.MaxPeers {
		return true
	}
	var oldest *session
	for _, s := range h.inOrder() {
		if !s.busy() && (oldest == nil || s.active.Before(oldest.active)) {
			oldest = s
		}
	}
	if oldest == nil || idle < 0 || h.now.Sub(oldest.active) < idle {
		return false
	}
	oldest.end(Evicted, "evicted, it was idle and there are too many peers")
	return true
}

// displace makes room for a peer at the cost of the host that has most of the sessions, if those are at
// least two more than the newcomer's host has: nobody fills all places and keeps them. It reports
// whether it did.
func (h *Hub) displace(host string) bool {
	count := map[string]int{}
	for _, s := range h.sessions {
		count[s.host]++
	}
	own := count[host]
	if host == "" {
		own = 0
	}
	delete(count, "") // those that we dialled and have not heard of
	greedy := ""
	for _, at := range slices.Sorted(maps.Keys(count)) {
		if count[at] > count[greedy] {
			greedy = at
		}
	}
	if count[greedy] < own+2 {
		return false
	}
	var victim *session
	for _, s := range h.inOrder() {
		if s.host == greedy && (victim == nil || s.cheaper(victim)) {
			victim = s
		}
	}
	victim.end(Displaced, fmt.Sprintf("displaced: %s has %d of %d places", greedy, count[greedy], h.cfg.MaxPeers))
	return true
}

// cheaper reports whether the end of s costs less than that of o: one in its handshake, then an idle one,
// then the one that was silent for longer.
func (s *session) cheaper(o *session) bool {
	if a, b := s.ready(), o.ready(); a != b {
		return b
	}
	if a, b := s.busy(), o.busy(); a != b {
		return b
	}
	return s.active.Before(o.active)
}

// message brings a message to its session.
func (h *Hub) message(ev Message) {
	k := link{ev.Identity, ev.Link}
	s, known := h.links[k]
	if known && (s == nil || s.dead) { // dropped; this was still under way
		if _, bye := ev.Msg.(wire.P2PDisconnect); bye && s != nil {
			s.polite = true
		}
		return
	}
	if s == nil {
		if s = h.greet(ev, k); s == nil {
			return
		}
	}
	s.receive(ev.Msg, ev.Err)
}

// greet gives a new link its session, or drops it.
func (h *Hub) greet(ev Message, k link) *session {
	p, err := ParsePeer(ev.Identity)
	refuse := func(reason Reason, why string) *session {
		if len(h.links) >= maxLinks {
			maps.DeleteFunc(h.links, func(_ link, s *session) bool { return s == nil || s.dead })
		}
		h.links[k] = nil
		h.emit(DropLink{Identity: k.identity, Link: k.id})
		h.note(p, "link_refused", "%s", why)
		h.refused(p, reason, why)
		return nil
	}
	if err != nil {
		return refuse(BadName, err.Error())
	}
	if p == h.self || h.shut {
		return refuse(BadName, "it has our own name, or we are closing")
	}
	connect, ok := ev.Msg.(*wire.P2PConnect)
	if !ok {
		// To whoever sends this our session is not the one that it believes to have: let it notice.
		return refuse(NoConnect, "it did not begin with a connect")
	}
	s := h.sessions[p]
	if s == nil {
		s = h.awaited(p)
	}
	if s.isStale(connect) {
		return refuse(Stale, "it answers the connect of a session that is over")
	}
	if s != nil && s.link.id != 0 {
		s.end(Replaced, "it has connected anew")
		s = nil
	}
	if s == nil {
		if !h.makeRoom(h.cfg.IdleTimeout) && !h.displace(ev.Host) {
			return refuse(Full, fmt.Sprintf("%d peers are connected already", len(h.sessions)))
		}
		s = h.newSession(p, connect)
	}
	s.link, s.host = k, ev.Host
	h.links[k] = s
	return s
}

// awaited finds the session that has dialled this peer under another name.
func (h *Hub) awaited(p PeerID) *session {
	at, ok := p.addr()
	if !ok {
		return nil
	}
	for _, s := range h.inOrder() {
		if s.link.id == 0 && s.remote == at {
			h.aliases[p] = s
			return s
		}
	}
	return nil
}

func (h *Hub) linkEnded(ev LinkEnded) {
	k := link{ev.Identity, ev.Link}
	s := h.links[k]
	delete(h.links, k)
	if s != nil && !s.dead {
		s.link = link{}
		s.lost(Lost, "it has closed its connection")
	}
}

func (h *Hub) shutdown() {
	h.shut = true
	for _, s := range h.inOrder() {
		s.end(Closing, "this node is closing")
	}
	for _, u := range h.unbound {
		h.drop(u, false)
	}
	h.unbound, h.slots = nil, 0
	for _, id := range slices.Sorted(maps.Keys(h.xfers)) {
		h.emit(Cancel{Transfer: id})
	}
	for _, t := range slices.Clone(h.timers) {
		h.stop(t)
	}
}
