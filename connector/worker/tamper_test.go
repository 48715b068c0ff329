package worker

import (
	"sync"

	"github.com/kvferry/kvferry/agent"
)

// tamper stands between a worker and its agent. What it does is set before the worker starts.
type tamper struct {
	agent.Agent
	// post may refuse the n-th transfer, counted from 0.
	post func(n int) error
	// mangle replaces an event by others; nil passes all.
	mangle func(agent.Event) []agent.Event
	// posted is told of each transfer that was started, and may answer with events of its own.
	posted func(agent.TransferID, agent.PeerID) []agent.Event

	events chan agent.Event
	extra  chan agent.Event
	mu     struct {
		sync.Mutex
		posts int
	}
}

// start begins to pass events on; it ends with the agent.
func (x *tamper) start() *tamper {
	x.events = make(chan agent.Event)
	x.extra = make(chan agent.Event, 64)
	go func() {
		defer close(x.events)
		for {
			select {
			case e := <-x.extra:
				x.events <- e
			case e, ok := <-x.Agent.Events():
				if !ok {
					return
				}
				out := []agent.Event{e}
				if x.mangle != nil {
					out = x.mangle(e)
				}
				for _, e := range out {
					x.events <- e
				}
			}
		}
	}()
	return x
}

func (x *tamper) Events() <-chan agent.Event { return x.events }

func (x *tamper) Post(t agent.Transfer) (agent.TransferID, error) {
	x.mu.Lock()
	n := x.mu.posts
	x.mu.posts++
	x.mu.Unlock()
	if x.post != nil {
		if err := x.post(n); err != nil {
			return 0, err
		}
	}
	id, err := x.Agent.Post(t)
	if err == nil && x.posted != nil {
		for _, e := range x.posted(id, agent.PeerID{}) {
			x.extra <- e
		}
	}
	return id, err
}
