package p2p

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/wire"
)

// Front is one ROUTER for several Tiers of one node, which have other model facts, memory and agents but
// the same name. A link belongs to the Tier that its connect leads to:
//
//	peers ──> ROUTER ── connect ──> Route ──> Port ──> a Tier's loop
//	                └── the link's other messages ──┘
type Front struct {
	cfg    FrontConfig
	recv   receiver
	routes map[frontLink]*Port // of the receiver's goroutine
}

type frontLink struct {
	identity string
	link     uint64
}

// FrontConfig is what a Front needs.
type FrontConfig struct {
	// Listener receives; the Front takes it over. Required.
	Listener net.Listener
	// Route chooses the Tier for a peer by what its connect says, or refuses it with a reason. It is
	// called on the receiver's goroutine and must not block. Required.
	Route func(*wire.P2PConnect) (*Port, string)
	// OnRefused is told of each link that is dropped, with the reason, on the same goroutine. It must not
	// block. nil: nobody.
	OnRefused func(identity, why string)
	// PingEvery is as in Config.
	PingEvery time.Duration
}

// NewFront listens. Nothing is received before Start.
func NewFront(cfg FrontConfig) (*Front, error) {
	if cfg.Listener == nil || cfg.Route == nil {
		return nil, errors.New("p2p front: no listener or no route")
	}
	f := &Front{cfg: cfg, routes: map[frontLink]*Port{}}
	return f, f.recv.listen(cfg.Listener, heartbeat(cfg.PingEvery), f.forward)
}

// Start begins to receive.
func (f *Front) Start() { f.recv.start() }

// Close ends all links and waits for the goroutine. The Tiers behind it are closed before.
func (f *Front) Close() error { return f.recv.close() }

// NewPort makes a Tier's end of the Front, for Config.Port.
func (f *Front) NewPort() *Port {
	p := &Port{front: f, messages: make(chan session.Event, receivedMessages), closed: make(chan struct{})}
	p.mu.since = time.Now()
	return p
}

// forward brings one event to the port of its link.
func (f *Front) forward(ev session.Event) {
	switch ev := ev.(type) {
	case session.Message:
		k := frontLink{ev.Identity, ev.Link}
		p := f.routes[k]
		if p == nil {
			if p = f.route(ev, k); p == nil {
				return
			}
		}
		if !p.put(ev, f) {
			f.refuse(k, "the store has no place for it any more")
		}
	case session.LinkEnded:
		k := frontLink{ev.Identity, ev.Link}
		if p := f.routes[k]; p != nil {
			delete(f.routes, k)
			p.count(-1)
			p.put(ev, f)
		}
	}
}

// route gives a new link its port, or drops it. A link that was dropped may say something yet.
func (f *Front) route(ev session.Message, k frontLink) *Port {
	connect, ok := ev.Msg.(*wire.P2PConnect)
	if !ok {
		f.refuse(k, "it did not begin with a connect")
		return nil
	}
	p, why := f.cfg.Route(connect)
	if p == nil {
		f.refuse(k, why)
		return nil
	}
	f.routes[k] = p
	p.count(1)
	return p
}

func (f *Front) refuse(k frontLink, why string) {
	f.recv.drop(k.identity, k.link)
	if f.cfg.OnRefused != nil {
		f.cfg.OnRefused(k.identity, why)
	}
}

// Port is where one Tier gets its messages from a Front.
type Port struct {
	front    *Front
	messages chan session.Event
	closed   chan struct{} // nobody takes messages any more
	once     sync.Once

	mu struct {
		sync.Mutex
		links   int
		since   time.Time // there are none
		started bool      // a Tier takes the messages
	}
}

// Links is how many peers' connections lead here.
func (p *Port) Links() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.links
}

func (p *Port) count(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.links += n
	p.mu.since = time.Now()
}

// Unused is for how long no peer's connection has led here; 0 while one does.
func (p *Port) Unused(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.links > 0 {
		return 0
	}
	return now.Sub(p.mu.since)
}

// start says that a Tier takes the messages from now on.
func (p *Port) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.started = true
}

// Close makes the Front drop what leads here. The Tier does it when it ends; a port whose Tier never
// came about is closed by its maker.
func (p *Port) Close() { p.once.Do(func() { close(p.closed) }) }

// put hands an event over. It reports false when nobody will take it. Before the Tier has started, only
// what fits waits; from then on its loop, which waits for nobody, is waited for.
func (p *Port) put(ev session.Event, f *Front) bool {
	select {
	case <-p.closed:
		return false
	default:
	}
	select {
	case p.messages <- ev:
		return true
	default:
	}
	p.mu.Lock()
	started := p.mu.started
	p.mu.Unlock()
	if !started {
		return false
	}
	select {
	case p.messages <- ev:
		return true
	case <-p.closed:
		return false
	case <-f.recv.ctx.Done():
		return false
	}
}
