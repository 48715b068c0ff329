package p2p

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/wire"
)

// receiver is a ROUTER with one goroutine, which passes on what comes in: the messages of each link in
// order, and its end after the last one.
type receiver struct {
	ctx     context.Context
	cancel  context.CancelFunc
	router  *zmtp.Router
	forward func(session.Event) // may wait until ctx ends
	running sync.WaitGroup

	mu struct {
		sync.Mutex
		ended     []session.LinkEnded // links
		receiving context.Context     // of the wait for a message
		interrupt context.CancelFunc  // ends it when a link does
	}
}

// listen opens a receiver on a listener, which it takes over. Its goroutine runs from start on.
func (r *receiver) listen(ln net.Listener, hb zmtp.Heartbeat, forward func(session.Event)) (err error) {
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.forward = forward
	r.router, err = zmtp.Listen(r.ctx, watchful{ln}, zmtp.Options{
		Heartbeat: hb,
		OnEnd: func(p zmtp.Peer, _ string, _ error) {
			if p.Generation != 0 {
				r.linkEnded(session.LinkEnded{Identity: p.Identity, Link: p.Generation})
			}
		},
	})
	if err != nil {
		r.cancel()
	}
	return err
}

func (r *receiver) start() { r.running.Go(r.run) }

// close ends all links and the goroutine.
func (r *receiver) close() error {
	r.cancel()
	err := r.router.Close()
	r.running.Wait()
	return err
}

func (r *receiver) drop(identity string, link uint64) {
	r.router.Drop(zmtp.Peer{Identity: identity, Generation: link})
}

// run is the goroutine. While forward waits, the ROUTER holds each sender apart.
func (r *receiver) run() {
	over, cancel := context.WithCancel(r.ctx)
	cancel() // for taking only what is there
	for {
		m, err := r.router.Recv(r.untilEnded())
		if err == nil {
			r.forward(decode(m))
			continue
		}
		if r.ctx.Err() != nil || errors.Is(err, zmtp.ErrClosed) {
			return
		}
		ended := r.takeEnded()
		for range drainMessages {
			m, err := r.router.Recv(over)
			if err != nil {
				break
			}
			r.forward(decode(m))
		}
		for _, ev := range ended {
			r.forward(ev)
		}
	}
}

func decode(m zmtp.Message) session.Message {
	in := session.Message{Identity: m.Identity, Link: m.Generation, Host: m.Host}
	if len(m.Frames) == 1 {
		in.Msg, in.Err = wire.DecodeP2P(m.Frames[0])
	} else {
		in.Err = fmt.Errorf("%d frames instead of one: %w", len(m.Frames), wire.ErrP2PIgnored)
	}
	return in
}

// linkEnded notes that a link has ended; its last messages may still wait in the ROUTER.
func (r *receiver) linkEnded(ev session.LinkEnded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.ended = append(r.mu.ended, ev)
	if r.mu.interrupt != nil {
		r.mu.interrupt()
	}
}

// untilEnded is a context that lasts until a link ends.
func (r *receiver) untilEnded() context.Context {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.receiving == nil {
		r.mu.receiving, r.mu.interrupt = context.WithCancel(r.ctx)
		if len(r.mu.ended) > 0 {
			r.mu.interrupt()
		}
	}
	return r.mu.receiving
}

func (r *receiver) takeEnded() []session.LinkEnded {
	r.mu.Lock()
	defer r.mu.Unlock()
	ended := r.mu.ended
	r.mu.interrupt()
	r.mu.ended, r.mu.receiving, r.mu.interrupt = nil, nil, nil
	return ended
}
