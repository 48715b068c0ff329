package p2p

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/wire"
)

// Tier is the tier of peers.
type Tier struct {
	cfg       Config
	host      tier.Host
	router    *zmtp.Router
	running   sync.WaitGroup
	ctx       context.Context // of receiver and admissions
	cancel    context.CancelFunc
	wake      chan struct{}      // cap 1: the inbox is not empty
	messages  chan session.Event // what comes by the ROUTER, in order
	closing   chan struct{}
	loop      *loop
	admission chan struct{} // cap 1; nil when the agent admits several peers at once

	mu struct {
		sync.Mutex
		inbox    []session.Event
		views    map[kv.RequestID]*view
		watching bool // a peer's lookup waits for a change
		closed   bool
		// The receiver's: which links have ended, and what interrupts its wait when one does.
		ended     []session.LinkEnded
		receiving context.Context
		interrupt context.CancelFunc
	}
}

// view is what the engine's side knows of a request. Guarded by the Tier's mu.
type view struct {
	everything bool
	failed     bool
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
	if cfg.Silence == 0 {
		cfg.Silence = defaultSilence
	}
	t := &Tier{
		cfg: cfg, wake: make(chan struct{}, 1), messages: make(chan session.Event, receivedMessages), closing: make(chan struct{}),
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	if !cfg.Agent.Capabilities().ParallelAdmission {
		t.admission = make(chan struct{}, 1)
	}
	t.mu.views = map[kv.RequestID]*view{}
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
	t.router, err = zmtp.Listen(t.ctx, t.cfg.Listener, zmtp.Options{
		Heartbeat: t.cfg.heartbeat(),
		OnEnd: func(p zmtp.Peer, _ string, _ error) {
			if p.Generation != 0 {
				t.linkEnded(session.LinkEnded{Identity: p.Identity, Link: p.Generation})
			}
		},
	})
	if err != nil {
		return err
	}
	t.loop = l
	t.running.Add(2)
	go l.run()
	go t.receive()
	return nil
}

// receive brings messages to the loop, and the end of a link after its last message. When the loop is
// slow, the ROUTER holds each sender apart.
func (t *Tier) receive() {
	defer t.running.Done()
	over, cancel := context.WithCancel(t.ctx)
	cancel() // for taking only what is there
	for {
		m, err := t.router.Recv(t.untilEnded())
		if err == nil {
			t.forward(decode(m))
			continue
		}
		if t.ctx.Err() != nil || errors.Is(err, zmtp.ErrClosed) {
			return
		}
		ended := t.takeEnded()
		for range drainMessages {
			m, err := t.router.Recv(over)
			if err != nil {
				break
			}
			t.forward(decode(m))
		}
		for _, ev := range ended {
			t.forward(ev)
		}
	}
}

func decode(m zmtp.Message) session.Message {
	in := session.Message{Identity: m.Identity, Link: m.Generation}
	if len(m.Frames) == 1 {
		in.Msg, in.Err = wire.DecodeP2P(m.Frames[0])
	} else {
		in.Err = fmt.Errorf("%d frames instead of one: %w", len(m.Frames), wire.ErrP2PIgnored)
	}
	return in
}

func (t *Tier) forward(ev session.Event) {
	select {
	case t.messages <- ev:
	case <-t.ctx.Done():
	}
}

// linkEnded notes that a link has ended; its last messages may still wait in the ROUTER.
func (t *Tier) linkEnded(ev session.LinkEnded) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.ended = append(t.mu.ended, ev)
	if t.mu.interrupt != nil {
		t.mu.interrupt()
	}
}

// untilEnded is a context that lasts until a link ends.
func (t *Tier) untilEnded() context.Context {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.receiving == nil {
		t.mu.receiving, t.mu.interrupt = context.WithCancel(t.ctx)
		if len(t.mu.ended) > 0 {
			t.mu.interrupt()
		}
	}
	return t.mu.receiving
}

func (t *Tier) takeEnded() []session.LinkEnded {
	t.mu.Lock()
	defer t.mu.Unlock()
	ended := t.mu.ended
	t.mu.interrupt()
	t.mu.ended, t.mu.receiving, t.mu.interrupt = nil, nil, nil
	return ended
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

// Begin is Secondary.Begin. Naming a source connects to it.
func (t *Tier) Begin(req tier.Request) tier.Interest {
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
		return tier.Interest{}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if v == nil {
		v = &view{failed: true}
	}
	t.mu.views[req.ID] = v
	t.postLocked(ev)
	return tier.Interest{Load: ev.Source != "", Store: ev.Decoder, Whole: ev.Decoder}
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
	if v := t.mu.views[req]; v != nil && len(v.unsent) > 0 {
		t.postLocked(session.Ask{Req: req, Keys: v.unsent})
		v.unsent = nil
	}
}

// Load is Secondary.Load. The source keeps its hits for one fetch: those that are not in it are to be
// asked for anew.
func (t *Tier) Load(j core.Job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.mu.views[j.Req]; v != nil {
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
	t.post(session.Supply{Req: j.Req, Job: j.ID, Keys: j.Keys, Slots: j.Slots})
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

// answer tells the engine's side a verdict; fail that there will be none.
func (t *Tier) answer(a session.Answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.mu.views[a.Req]; v != nil {
		v.answers[a.Key] = a.Hit
	}
}

func (t *Tier) fail(req kv.RequestID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.mu.views[req]; v != nil {
		v.failed = true
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
	err := t.router.Close()
	t.running.Wait()
	for _, ev := range t.take() { // admissions that came too late for the loop
		if a, ok := ev.(session.Admitted); ok && a.Err == nil {
			t.cfg.Agent.RemovePeer(a.Agent)
		}
	}
	if t.loop.left > 0 {
		return fmt.Errorf("p2p tier: %d transfers did not stop within %v", t.loop.left, closeTime)
	}
	return err
}

// admit adds a peer to the agent: at once where that is cheap, else on a goroutine of its own.
func (t *Tier) admit(ctx context.Context, a session.Admit) {
	info := peerInfo(a.Connect)
	do := func() session.Admitted {
		p, err := t.cfg.Agent.AddPeer(ctx, info)
		return session.Admitted{Peer: a.Peer, Gen: a.Gen, Agent: p.ID, Err: err}
	}
	if t.cfg.Agent.Capabilities().CheapAdmission {
		t.loop.next = append(t.loop.next, do())
		return
	}
	t.running.Add(1)
	go func() {
		defer t.running.Done()
		ctx, cancel := context.WithTimeout(ctx, admitTimeout)
		defer cancel()
		if t.admission != nil {
			select {
			case t.admission <- struct{}{}:
				defer func() { <-t.admission }()
			case <-ctx.Done():
				t.post(session.Admitted{Peer: a.Peer, Gen: a.Gen, Err: context.Cause(ctx)})
				return
			}
		}
		t.post(do())
	}()
}

// loop is the goroutine that owns the hub. All its fields are its own.
type loop struct {
	t          *Tier
	hub        *session.Hub
	local      agent.ListID // all slots
	conns      map[kv.Generation]*conn
	admissions map[kv.Generation]context.CancelFunc
	grants     map[core.JobID]agent.GrantID
	posted     map[uint64]agent.TransferID
	numbers    map[agent.TransferID]uint64
	waiting    []session.Post // for a place in the agent
	next       []session.Event
	woken      bool // the engine is to be told
	done       chan struct{}
	left       int
}
