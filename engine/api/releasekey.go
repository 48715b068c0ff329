package api

import (
	"container/list"
	"context"
	"sync"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// keys is what requests can be let go by that came with a release key, in whatever order the release, the
// answer and the loss of its connection happen. A key is in one of its tables, or in none:
//
//	        begin              deliver
//	(none) ───────> running ───────────> held ── release ──> (none)
//	   │               └── release: aborted, and what it holds is let go
//	   └─ release ──> early ── begin ──> running, aborted at once
//
// Any goroutine may call its methods; none blocks.
type keys struct {
	mu struct {
		sync.Mutex
		running map[string]*keyed // at most maxInFlight
		held    aged[[]hold]
		early   aged[struct{}]
	}
}

// hold is what a prefill answer names.
type hold struct {
	id    kv.RequestID
	lease kv.Generation
}

// keyed is a request that came with a key; nil is one without. Its handler's goroutine calls its methods.
type keyed struct {
	k        *keys
	key      string
	cancel   context.CancelFunc
	released bool // guarded by keys.mu
}

func newKeys() *keys {
	k := &keys{}
	k.mu.running = map[string]*keyed{}
	k.mu.held = newAged[[]hold](maxKeyedHolds)
	k.mu.early = newAged[struct{}](maxEarlyReleases)
	return k
}

// begin names a request by the key of its header, if it has one. The context ends when it is released.
func (k *keys) begin(ctx context.Context, now time.Time, key string) (context.Context, *keyed, error) {
	if key == "" {
		return ctx, nil, nil
	}
	if !wire.IsReleaseKey(key) {
		return ctx, nil, invalid(wire.ReleaseKeyHeader, openai.CodeInvalidValue,
			"The header %s has %d characters; it must have %d, hexadecimal digits in lower case.", wire.ReleaseKeyHeader, len(key), wire.ReleaseKeyLen)
	}
	r := &keyed{k: k, key: key}
	k.mu.Lock()
	defer k.mu.Unlock()
	_, held := k.mu.held.by[key]
	if held || k.mu.running[key] != nil {
		return ctx, nil, invalid(wire.ReleaseKeyHeader, openai.CodeInvalidValue,
			"The key in %s is another request's; make a random one for each request.", wire.ReleaseKeyHeader)
	}
	ctx, r.cancel = context.WithCancel(ctx)
	k.mu.early.expire(now.Add(-earlyRelease))
	if _, r.released = k.mu.early.take(key); r.released {
		r.cancel()
	}
	k.mu.running[key] = r
	return ctx, r, nil
}

// deliver is called when the answer is written; false: it was released before, and must hold nothing. From
// here on a release finds the holds.
func (r *keyed) deliver(now time.Time, holds []hold) bool {
	if r == nil {
		return true
	}
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	if r.released {
		return false
	}
	delete(r.k.mu.running, r.key)
	if len(holds) > 0 && len(holds) <= maxKeyedHolds {
		r.k.mu.held.put(now, r.key, len(holds), holds)
	}
	return true
}

// end is called when the handler is done with it.
func (r *keyed) end() {
	if r == nil {
		return
	}
	r.cancel()
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	if r.k.mu.running[r.key] == r {
		delete(r.k.mu.running, r.key)
	}
}

// release ends what a key is for: a request that runs, which is told so, or the holds, which are the
// caller's to let go. Of neither, the key is remembered: its request may still be on its way.
func (k *keys) release(now time.Time, key string) (holds []hold, aborted bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r := k.mu.running[key]; r != nil {
		r.released = true
		r.cancel()
		return nil, true
	}
	holds, ok := k.mu.held.take(key)
	if !ok {
		k.mu.early.expire(now.Add(-earlyRelease))
		k.mu.early.put(now, key, 1, struct{}{})
	}
	return holds, false
}

// aged is a bounded table in which the oldest makes room.
type aged[V any] struct {
	most  int // of the sizes together
	size  int
	by    map[string]*list.Element
	order *list.List // of agedEntry[V], the oldest first
}

type agedEntry[V any] struct {
	key   string
	since time.Time
	size  int
	value V
}

func newAged[V any](most int) aged[V] {
	return aged[V]{most: most, by: map[string]*list.Element{}, order: list.New()}
}

// put enters a key, anew if it is there. Its size is at most the table's.
func (t *aged[V]) put(now time.Time, key string, size int, v V) {
	t.take(key)
	t.by[key] = t.order.PushBack(agedEntry[V]{key, now, size, v})
	for t.size += size; t.size > t.most; {
		t.take(t.order.Front().Value.(agedEntry[V]).key)
	}
}

func (t *aged[V]) take(key string) (v V, ok bool) {
	e := t.by[key]
	if e == nil {
		return v, false
	}
	entry := t.order.Remove(e).(agedEntry[V])
	delete(t.by, key)
	t.size -= entry.size
	return entry.value, true
}

// expire drops what was entered before a time.
func (t *aged[V]) expire(before time.Time) {
	for e := t.order.Front(); e != nil && e.Value.(agedEntry[V]).since.Before(before); e = t.order.Front() {
		t.take(e.Value.(agedEntry[V]).key)
	}
}
