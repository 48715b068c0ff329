package proxy

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/proxy/core"
)

// Close frees what outlives requests: kept connections, questions under way, and what decode engines keep of
// conversations. Call it when the server has been shut down. Requests that are left have r.grace to end; in the
// same time engines that are being told to let go are told, and then decode engines of all turns that are
// remembered: nobody else will. It may be called again.
func (r *Router) Close() {
	grace := time.AfterFunc(r.grace, r.cancel)
	select {
	case <-r.gate.shut(): // no request is left that could start anything
	case <-r.ctx.Done():
	}
	r.dropAllTurns()
	r.words.end()
	grace.Stop()
	r.cancel()
	r.asking.end()
	r.transport.CloseIdleConnections()
}

// dropAllTurns begins to tell each decode engine of the turns that it keeps, all engines side by side.
func (r *Router) dropAllTurns() {
	kept := map[*target][]core.Turn{}
	for _, t := range r.turns.takeAll() {
		r.metrics.turn(turnDropped)
		if d := r.pools[core.Decode].named(t.Engine); d != nil && t.Releasable() {
			kept[d] = append(kept[d], t)
		}
	}
	for d, turns := range kept {
		r.words.start(func() { r.dropTurnsOf(d, turns) })
	}
}

// dropTurnsOf tells one engine of its turns, in their order and maxEndReleases at a time, until the router's
// context ends or the engine cannot be talked to.
func (r *Router) dropTurnsOf(d *target, turns []core.Turn) {
	var (
		next, told atomic.Int64
		workers    sync.WaitGroup
		failed     atomic.Pointer[error]
	)
	ctx, giveUp := context.WithCancel(r.ctx)
	defer giveUp()
	for range min(len(turns), maxEndReleases) {
		workers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(turns) || ctx.Err() != nil {
					return
				}
				released, err := r.postRelease(ctx, d, turnHeader(turns[i]), turns[i].ReleaseBody())
				r.countRelease(released, err)
				if err == nil {
					told.Add(1)
					continue
				}
				failed.CompareAndSwap(nil, &err)
				if said := (*statusError)(nil); !errors.As(err, &said) {
					giveUp() // it is gone, or does not talk
				}
			}
		})
	}
	workers.Wait()
	if n := told.Load(); n < int64(len(turns)) {
		err := r.ctx.Err()
		if first := failed.Load(); first != nil {
			err = *first
		}
		level := slog.LevelWarn
		if errors.Is(err, syscall.ECONNREFUSED) {
			level = slog.LevelInfo // it has ended as well, and keeps nothing
		}
		r.log.Log(context.Background(), level, "a decode engine was not told of all that it keeps for next turns; the rest stays until its --decoder-kv-blocks-ttl",
			"engine", d.name, "told", n, "of", len(turns), "error", err)
	}
}
