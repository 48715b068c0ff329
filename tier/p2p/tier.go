package p2p

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// Tier is the tier of peers.
type Tier struct {
	cfg       Config
	host      tier.Host
	recv      receiver // with a Config.Listener
	running   sync.WaitGroup
	ctx       context.Context // of admissions
	cancel    context.CancelFunc
	wake      chan struct{}      // cap 1: the inbox is not empty
	messages  chan session.Event // what comes by the ROUTER, in order
	closing   chan struct{}
	loop      *loop
	admission chan struct{} // cap 1; nil when the agent admits several peers at once
	asked     chan chan session.Stats
	checking  chan struct{} // places for goroutines that read blocks
	ownID     string        // what ids of our own begin with: nobody else's do

	mu struct {
		sync.Mutex
		inbox    []session.Event
		views    map[kv.RequestID]*view
		watching bool // a peer's lookup waits for a change
		heard    bool // by a view, after a lookup that did not see it: the engine is to be woken
		closed   bool
		storeUp  bool   // the store can be asked
		storeIDs uint64 // how many requests have asked it
	}
}

// view is what the engine's side knows of a request. Guarded by the Tier's mu.
type view struct {
	everything bool
	failed     bool
	epoch      uint64 // fetches so far
	probing    bool   // a lookup is under way, which is to see the answers of one message together
	late       []session.Answer
	answers    map[core.Key]bool
	asked      map[core.Key]struct{}
	unsent     []core.Key
}

var _ tier.Secondary = (*Tier)(nil)

// New makes a tier; Start opens it.
func New(cfg Config) (*Tier, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{}).DialContext
	}
	if cfg.Events == nil {
		cfg.Events = event.Discard
	}
	if cfg.Silence == 0 {
		cfg.Silence = defaultSilence
	}
	t := &Tier{
		cfg: cfg, wake: make(chan struct{}, 1), messages: make(chan session.Event, receivedMessages), closing: make(chan struct{}),
	}
	t.asked = make(chan chan session.Stats)
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.checking = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/checkShareDiv))
	if cfg.Port != nil {
		t.messages = cfg.Port.messages
	}
	if !cfg.Agent.Capabilities().ParallelAdmission {
		t.admission = make(chan struct{}, 1)
	}
	t.mu.views = map[kv.RequestID]*view{}
	sum := sha256.Sum256([]byte("requests of " + cfg.Instance))
	t.ownID = hex.EncodeToString(sum[:8])
	return t, nil
}

// Name is "p2p".
func (t *Tier) Name() string { return "p2p" }

// Start listens and begins to serve.
func (t *Tier) Start(h tier.Host) error {
	t.host = h
	l, err := newLoop(t)
	if err != nil {
		return err
	}
	if t.cfg.Port == nil {
		if err := t.recv.listen(t.cfg.Listener, t.cfg.heartbeat(), t.forward); err != nil {
			return err
		}
		t.recv.start()
	} else {
		t.cfg.Port.start()
	}
	t.loop = l
	if t.cfg.Store != "" {
		t.post(session.Call{})
	}
	t.running.Add(1)
	go l.run()
	return nil
}

// forward brings what was received to the loop.
func (t *Tier) forward(ev session.Event) {
	select {
	case t.messages <- ev:
	case <-t.recv.ctx.Done():
	}
}

// post puts an event into the loop's inbox. What can be in there is bounded by what can be under way:
// requests, jobs, connections, admissions.
func (t *Tier) post(ev session.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.postLocked(ev)
}

func (t *Tier) postLocked(ev session.Event) {
	t.mu.inbox = append(t.mu.inbox, ev)
	notify(t.wake)
}

// Begin is Secondary.Begin. Naming a source connects to it. A request that names none asks the store.
func (t *Tier) Begin(req tier.Request) tier.Interest {
	if req.Source == nil {
		req.Source = t.storeSource()
	}
	ev := session.Begin{Req: req.ID}
	var v *view
	if s := req.Source; s != nil {
		v = &view{everything: s.Everything, answers: map[core.Key]bool{}, asked: map[core.Key]struct{}{}}
		peer, err := session.ParsePeer(s.Host + ":" + strconv.Itoa(s.Port))
		if err == nil && s.KVRequestID != "" {
			ev.Source, ev.SourceID, ev.Everything = peer, s.KVRequestID, s.Everything
		} else {
			v.failed = true
		}
	}
	if d := req.Decoder; d != nil && d.KVRequestID != "" {
		ev.Decoder, ev.DecoderID = true, d.KVRequestID
	}
	if ev.Source == "" && !ev.Decoder {
		return tier.Interest{Store: t.cfg.Store != ""}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if v == nil {
		v = &view{failed: true}
	}
	t.mu.views[req.ID] = v
	t.postLocked(ev)
	return tier.Interest{Load: ev.Source != "", Store: ev.Decoder || t.cfg.Store != "", Whole: ev.Decoder}
}

// End is Secondary.End.
func (t *Tier) End(req kv.RequestID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.views[req] != nil {
		delete(t.mu.views, req)
		t.postLocked(session.Finish{Req: req})
	}
}

// Probe is Secondary.Probe: the first Probe of a key asks the source at the next Flush.
func (t *Tier) Probe(req kv.RequestID, key core.Key) core.Verdict {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.mu.views[req]
	switch {
	case v == nil || v.failed:
		return core.Miss
	case v.everything:
		return core.Hit
	}
	v.probing = true
	if hit, ok := v.answers[key]; ok {
		if hit {
			return core.Hit
		}
		return core.Miss
	}
	if _, ok := v.asked[key]; !ok {
		v.asked[key] = struct{}{}
		v.unsent = append(v.unsent, key)
	}
	return core.Pending
}

// Flush is Secondary.Flush.
func (t *Tier) Flush(req kv.RequestID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.mu.views[req]
	if v == nil {
		return
	}
	v.probing = false
	t.hearLate(req, v)
	if len(v.unsent) > 0 {
		t.postLocked(session.Ask{Req: req, Epoch: v.epoch, Keys: v.unsent})
		v.unsent = nil
	}
}

// hearLate takes the answers that came while a lookup was under way. The lock is held.
func (t *Tier) hearLate(req kv.RequestID, v *view) {
	if len(v.late) == 0 {
		return
	}
	late := v.late
	v.late, t.mu.heard = nil, true
	t.hear(req, v, late)
	notify(t.wake)
}

// Unwanted is Secondary.Unwanted: what the source keeps of it is given back.
func (t *Tier) Unwanted(req kv.RequestID, keys []core.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.mu.views[req]
	if v == nil || v.failed || len(v.asked) == 0 {
		return
	}
	t.hearLate(req, v)
	d := session.Decline{Req: req}
	for _, k := range keys {
		if _, ok := v.asked[k]; !ok {
			continue
		}
		hit, answered := v.answers[k]
		switch {
		case !answered:
			d.Open = append(d.Open, k)
		case hit:
			d.Hits++
		}
		delete(v.asked, k)
		delete(v.answers, k)
	}
	if d.Hits+len(d.Open) > 0 {
		t.postLocked(d)
	}
}

// Load is Secondary.Load. The source keeps its hits for one fetch: those that are not in it are to be
// asked for anew, those whose answer is still under way too.
func (t *Tier) Load(j core.Job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.mu.views[j.Req]; v != nil {
		v.epoch++
		for key, hit := range v.answers {
			if hit {
				delete(v.answers, key)
				delete(v.asked, key)
			}
		}
	}
	t.postLocked(session.Fetch{Req: j.Req, Job: j.ID, Keys: j.Keys, Slots: j.Slots})
}

// Store is Secondary.Store.
func (t *Tier) Store(j core.Job) {
	t.post(session.Supply{Req: j.Req, Job: j.ID, Keys: j.Keys, Slots: j.Slots, Sums: j.Sums})
}

// Changed is Secondary.Changed.
func (t *Tier) Changed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.watching {
		t.mu.watching = false
		t.postLocked(session.Changed{})
	}
}

// answer tells the engine's side verdicts; fail that there will be none.
func (t *Tier) answer(all []session.Answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, a := range all {
		switch v := t.mu.views[a.Req]; {
		case v == nil:
		case v.probing:
			v.late = append(v.late, a)
		default:
			t.hear(a.Req, v, []session.Answer{a})
		}
	}
}

// hear takes answers. A hit that is not wanted any more is declined. The lock is held.
func (t *Tier) hear(req kv.RequestID, v *view, all []session.Answer) {
	unwanted := 0
	for _, a := range all {
		_, asked := v.asked[a.Key]
		switch {
		case a.Hit && a.Epoch != v.epoch: // the source does not keep it any more
			delete(v.asked, a.Key)
		case asked:
			v.answers[a.Key] = a.Hit
		case a.Hit:
			unwanted++
		}
	}
	if unwanted > 0 {
		t.postLocked(session.Decline{Req: req, Hits: unwanted})
	}
}

func (t *Tier) fail(req kv.RequestID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.mu.views[req]; v != nil {
		v.failed = true
	}
}

// Stats counts sessions, lookups, fetches and bytes, in all and by peer. It waits for the loop, which waits
// for nobody, so it must not be called from OnNote or Events. Before Start it is empty; after Close it
// stays what it was.
func (t *Tier) Stats() session.Stats {
	if t.loop == nil {
		return session.Stats{}
	}
	reply := make(chan session.Stats, 1)
	select {
	case t.asked <- reply:
		return <-reply
	case <-t.loop.done:
		return t.loop.last
	}
}

// Close tells the peers, ends every job, and waits until no transfer touches the memory.
func (t *Tier) Close() error {
	t.mu.Lock()
	first := !t.mu.closed
	t.mu.closed = true
	t.mu.Unlock()
	if !first {
		return nil
	}
	close(t.closing)
	<-t.loop.done
	t.cancel()
	err := t.hangUp()
	t.running.Wait()
	late, _ := t.take()
	for _, ev := range late { // admissions that came too late for the loop
		if a, ok := ev.(session.Admitted); ok && a.Err == nil {
			t.cfg.Agent.RemovePeer(a.Agent)
		}
	}
	if t.loop.left > 0 {
		return fmt.Errorf("p2p tier: %d transfers did not stop within %v", t.loop.left, closeTime)
	}
	return err
}

// hangUp ends the way by which peers reach us.
func (t *Tier) hangUp() error {
	if t.cfg.Port == nil {
		return t.recv.close()
	}
	t.cfg.Port.Close()
	return nil
}

// dropLink ends one peer's connection to us.
func (t *Tier) dropLink(a session.DropLink) {
	if t.cfg.Port != nil {
		t.cfg.Port.front.recv.drop(a.Identity, a.Link)
		return
	}
	t.recv.drop(a.Identity, a.Link)
}

// loop is the goroutine that owns the hub. All its fields are its own.
type loop struct {
	t       *Tier
	hub     *session.Hub
	local   agent.ListID // all slots
	conns   map[kv.Generation]*conn
	peers   *admissions
	grants  map[core.JobID]agent.GrantID
	posted  map[uint64]agent.TransferID
	numbers map[agent.TransferID]uint64
	waiting []session.Post // for a place in the agent
	turns   turns          // of peers whose lookups are being answered
	next    []session.Event
	woken   bool // the engine is to be told
	done    chan struct{}
	last    session.Stats // when done
	left    int
}
