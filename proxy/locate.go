package proxy

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/proxy/core"
)

// location is how the engines of an attempt work together, or why they do not.
type location struct {
	peer    core.Peer // P's coordinates
	gen     uint64    // of them
	mode    kv.TransferMode
	order   core.Order
	failure *core.Failure
}

// locate finds out how the attempt's engines work together: at once if both are known, else by asking.
func (q *request) locate() {
	a := q.attempt
	p, pgen, pok := a.targets[core.Prefill].known()
	d, _, dok := a.targets[core.Decode].known()
	if pok && dok {
		if l := q.r.pair(a, p, pgen, d); l.failure == nil {
			q.next = append(q.next, q.isLocated(l))
			return
		}
		// One may have been started anew in another mode: both are asked again.
	}
	q.legs.Go(func() {
		if l := q.r.askBoth(a); a.ctx.Err() == nil {
			a.located <- l // else nobody wants to know any more
		}
	})
}

// isLocated notes where P is; the hand-off may be there already.
func (q *request) isLocated(l location) core.Located {
	a := q.attempt
	a.peer, a.gen, a.asked, a.mode, a.order = l.peer, l.gen, l.failure == nil, l.mode, l.order
	if l.failure == nil && q.prefilled {
		if err := q.handoffMode(); err != nil {
			l.failure = q.r.unpaired(a, err)
		}
	}
	if f := l.failure; f != nil {
		q.r.metrics.legFailed(f.Leg, f)
	}
	return core.Located{Attempt: a.number, Order: l.order, Failure: l.failure}
}

// handoffMode compares P's answer with the pair's mode. A pair that was not told any has P's. Coordinates of
// a P that has come back somewhere else since are forgotten: D may not say that they are wrong, because it
// may have computed the prompt itself.
func (q *request) handoffMode() error {
	a := q.attempt
	if a.mode == kv.Push && !a.handoff.IsOf(a.peer) {
		a.targets[core.Prefill].forget(a.gen)
	}
	if a.mode == "" {
		a.mode = a.handoff.Mode()
	}
	return a.handoff.CheckMode(a.mode)
}

// askBoth asks both engines for their coordinates. Each question is bounded and shared by all who wait.
func (r *Router) askBoth(a *attempt) location {
	var (
		asked sync.WaitGroup
		p, d  core.Peer
		gen   uint64
		perr  error
		derr  error
	)
	asked.Go(func() { d, _, derr = r.coordinates(a.ctx, a.targets[core.Decode]) })
	p, gen, perr = r.coordinates(a.ctx, a.targets[core.Prefill])
	asked.Wait()
	var wrong *wrongEngineError
	switch {
	case perr != nil:
		return location{failure: r.coordinatesFailure(a.targets[core.Prefill], perr)}
	case errors.As(derr, &wrong):
		return location{failure: r.coordinatesFailure(a.targets[core.Decode], derr)}
	case derr != nil:
		d = core.Peer{} // its leg will show what is wrong with it
	}
	return r.pair(a, p, gen, d)
}

// pair puts two engines together.
func (r *Router) pair(a *attempt, p core.Peer, gen uint64, d core.Peer) location {
	mode, err := core.Pair(p, d)
	if err != nil {
		return location{failure: r.unpaired(a, err)}
	}
	l := location{peer: p, gen: gen, mode: mode}
	if mode == kv.Pull || r.cfg.Sequential {
		l.order = core.InOrder
	}
	if r.cfg.Sequential && p.Mode == "" && d.Mode == "" {
		l.mode = "" // P's answer tells it
	}
	return l
}

// unpaired is two engines that do not work together. What is known of them is asked anew.
func (r *Router) unpaired(a *attempt, err error) *core.Failure {
	p, d := a.targets[core.Prefill], a.targets[core.Decode]
	p.forgetAny()
	d.forgetAny()
	f := brokenFailure(p, core.Unpaired, "and the decode engine at %s cannot work together: %v", d.name, err)
	f.Retry = len(r.pools[core.Prefill].targets) > 1 || len(r.pools[core.Decode].targets) > 1
	return f
}

func (r *Router) coordinatesFailure(t *target, err error) *core.Failure {
	f := brokenFailure(t, core.Coordinates, "does not say where its side channel is: %v", err)
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		f = connectFailure(t, err)
	}
	f.Retry = len(r.pools[t.leg].targets) > 1
	return f
}

// known is what the router has of an engine without asking.
func (t *target) known() (core.Peer, uint64, bool) {
	if t.fixed != nil {
		return *t.fixed, 0, true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.peer == nil {
		return core.Peer{}, 0, false
	}
	return *t.mu.peer, t.mu.gen, true
}

// wrongEngineError is an engine that tells of itself what cannot be.
type wrongEngineError struct{ err error }

func (e *wrongEngineError) Error() string { return fmt.Sprintf("/kv/coordinates: %v", e.err) }
func (e *wrongEngineError) Unwrap() error { return e.err }
